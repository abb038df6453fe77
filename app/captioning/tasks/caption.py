"""The task `caption`: describe a picture."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.captioning.tasks.entry import Option, TaskEntry
from llama_adapter.app.captioning.tasks.question import Question

_DESCRIPTION = """\
Describe each picture. Each answer is written as soon as it is ready: as a line of text on a terminal, as a JSON line
into a pipe or file. A picture that cannot be read gets an error record and does not affect the others.

  llama-adapter caption photo.jpg folder/
  llama-adapter caption photos --recursive --out captions.jsonl      run again to resume
"""


def _question(values: Mapping[str, Any]) -> Question:
    instruction, given, raw = (values.get(name) for name in ("instruction", "input", "raw"))
    if given is not None and instruction is None:
        raise ValueError("input needs instruction")
    if raw is not None and instruction is not None:
        raise ValueError("instruction and raw exclude each other")
    return Question(instruction=instruction, input=given, raw=raw)


CAPTION = TaskEntry(
    name="caption",
    command="caption",
    takes="a picture, and optionally a prompt",
    answers="text",
    help="describe pictures",
    description=_DESCRIPTION,
    options=(
        Option(
            name="instruction",
            flag="--prompt",
            help="instruction; {stem}, {name}, {parent} and {path} stand for parts of the picture's path (default: the "
            "model's own caption prompt)",
        ),
        Option(name="input", flag="--input", help="further context for --prompt"),
        Option(name="raw", flag="--raw-prompt", help="text for the model without the instruction template"),
    ),
    question=_question,
)
