"""The task `ask`: answer a question about a picture in free text."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.captioning.tasks.entry import Option, TaskEntry
from llama_adapter.app.captioning.tasks.question import Question

_DESCRIPTION = """\
Ask the same question about each picture. With --choices, the answer is the most likely of them, with its probability;
otherwise it is free text. The output is as for `caption`.

  llama-adapter ask photos --recursive --question "Is there a person?" --choices yes,no --out answers.jsonl
  llama-adapter export-records answers.jsonl --to csv --out answers.csv
"""


def _question(values: Mapping[str, Any]) -> Question:
    instruction = values.get("instruction")
    if instruction is not None and not instruction.strip():
        raise ValueError("instruction must be a question, got an empty text")
    return Question(instruction=instruction, input=values.get("input"))


ASK = TaskEntry(
    name="ask",
    command="ask",
    takes="a picture and a question",
    answers="text",
    help="ask a question about pictures",
    description=_DESCRIPTION,
    options=(
        Option(name="instruction", flag="--question", help="what to ask"),
        Option(name="input", flag="--input", help="further context for the question"),
    ),
    question=_question,
    needs_instruction=True,
)
