"""The task `text_generation`: answer a prompt without a picture."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.captioning.tasks.entry import Option, TaskEntry
from llama_adapter.app.captioning.tasks.question import Question

_DESCRIPTION = """\
Answer prompts without a picture: with LLaMA alone, or with LLaMA and an adapter. On a terminal, the text of a single
prompt appears as it is generated. A malformed row of a file gets an error record and does not affect the others.

  llama-adapter generate --prompt "Name three colours." --llama-dir LLaMA --llama-type 7B
  llama-adapter generate --prompt-file prompts.jsonl --out answers.jsonl      run again to resume
"""


def _question(values: Mapping[str, Any]) -> Question:
    instruction, given = values.get("instruction"), values.get("input")
    if given is not None and instruction is None:
        raise ValueError("input needs instruction")
    if not values.get("raw"):
        return Question(instruction=instruction, input=given)
    if given is not None:
        raise ValueError("input and raw exclude each other")
    return Question(raw=instruction)


TEXT_GENERATION = TaskEntry(
    name="text_generation",
    command="generate",
    takes="a prompt",
    answers="text",
    needs_picture=False,
    help="answer prompts without a picture",
    description=_DESCRIPTION,
    options=(
        Option(name="instruction", flag="--prompt", help="what the model is to do"),
        Option(name="input", flag="--input", help="further context for --prompt"),
    ),
    question=_question,
    needs_instruction=True,
)
