"""What the user named, as inputs: one per picture, in order. Opens no picture and imports no model."""

from llama_adapter.app.inputs.errors import InputsError
from llama_adapter.app.inputs.folders import expand_inputs
from llama_adapter.app.inputs.items import PictureInput, QuestionFields
from llama_adapter.app.inputs.natural import natural_key
from llama_adapter.app.inputs.reading import check_inputs, count_inputs, may_wait, read_inputs
from llama_adapter.app.inputs.sheets import read_question_sheet
from llama_adapter.app.inputs.spec import InputSpec

__all__ = [
    "InputSpec",
    "InputsError",
    "PictureInput",
    "QuestionFields",
    "check_inputs",
    "count_inputs",
    "expand_inputs",
    "may_wait",
    "natural_key",
    "read_inputs",
    "read_question_sheet",
]
