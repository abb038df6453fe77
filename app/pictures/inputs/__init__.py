"""Inputs: turns the names that the user gives into one item per picture. Opens no picture and imports no model."""

from llama_adapter.app.pictures.inputs.folders import count_in_sub_folders, natural_key
from llama_adapter.app.pictures.inputs.items import InputsError, InputSpec, PictureInput, QuestionFields
from llama_adapter.app.pictures.inputs.prompts import read_question_sheet
from llama_adapter.app.pictures.inputs.reading import (
    check_inputs,
    count_inputs,
    may_bring_columns,
    may_wait,
    read_inputs,
)

__all__ = [
    "InputSpec",
    "InputsError",
    "PictureInput",
    "QuestionFields",
    "check_inputs",
    "count_in_sub_folders",
    "count_inputs",
    "may_bring_columns",
    "may_wait",
    "natural_key",
    "read_inputs",
    "read_question_sheet",
]
