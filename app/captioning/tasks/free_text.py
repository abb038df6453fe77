"""The tasks that are answered in free text: `caption`, `ask` and `text_generation`."""

from collections.abc import Mapping
from typing import Any

from llama_adapter.app.captioning.tasks.entry import PROMPT_OPTIONS, Option, TaskEntry
from llama_adapter.app.captioning.tasks.question import Question

_CAPTION_DESCRIPTION = """\
Describe each picture. Each answer is written as soon as it is ready: as a line of text on a terminal, as a JSON line
into a pipe or file. A picture that cannot be read gets an error record and does not affect the others.

  llama-adapter caption photo.jpg folder/
  llama-adapter caption photos --recursive --out captions.jsonl      run again to resume
"""
_ASK_DESCRIPTION = """\
Ask the same question about each picture. With --choices, the answer is the most likely of them, with its probability;
otherwise it is free text. The output is as for `caption`.

  llama-adapter ask photos --recursive --question "Is there a person?" --choices yes,no --out answers.jsonl
  llama-adapter export-records answers.jsonl --to csv --out answers.csv
"""
_GENERATE_DESCRIPTION = """\
Answer prompts without a picture: with LLaMA alone, or with LLaMA and an adapter. On a terminal, the text of a single
prompt appears as it is generated. A malformed row of a file gets an error record and does not affect the others.

  llama-adapter generate --prompt "Name three colours." --llama-dir LLaMA --llama-type 7B
  llama-adapter generate --prompt-file prompts.jsonl --out answers.jsonl      run again to resume
"""


def _caption(values: Mapping[str, Any]) -> Question:
    instruction, given, raw = (values.get(name) for name in PROMPT_OPTIONS)
    if given is not None and instruction is None:
        raise ValueError("input needs instruction")
    if raw is not None and instruction is not None:
        raise ValueError("instruction and raw exclude each other")
    return Question(instruction=instruction, input=given, raw=raw)


def _ask(values: Mapping[str, Any]) -> Question:
    instruction = values.get("instruction")
    if isinstance(instruction, str) and not instruction.strip():
        raise ValueError("instruction must be a question, got an empty text")
    return Question(instruction=instruction, input=values.get("input"))


def _generate(values: Mapping[str, Any]) -> Question:
    instruction, given = values.get("instruction"), values.get("input")
    if given is not None and instruction is None:
        raise ValueError("input needs instruction")
    if not values.get("raw"):
        return Question(instruction=instruction, input=given)
    if given is not None:
        raise ValueError("input and raw exclude each other")
    return Question(raw=instruction)


CAPTION = TaskEntry(
    name="caption",
    command="caption",
    takes="a picture, and optionally a prompt",
    help="describe pictures",
    description=_CAPTION_DESCRIPTION,
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
    question=_caption,
)
ASK = TaskEntry(
    name="ask",
    command="ask",
    takes="a picture and a question",
    help="ask a question about pictures",
    description=_ASK_DESCRIPTION,
    options=(
        Option(name="instruction", flag="--question", help="what to ask"),
        Option(name="input", flag="--input", help="further context for the question"),
    ),
    question=_ask,
    needs_instruction=True,
)
TEXT_GENERATION = TaskEntry(
    name="text_generation",
    command="generate",
    takes="a prompt",
    needs_picture=False,
    help="answer prompts without a picture",
    description=_GENERATE_DESCRIPTION,
    options=(
        Option(name="instruction", flag="--prompt", help="what the model is to do"),
        Option(name="input", flag="--input", help="further context for --prompt"),
    ),
    question=_generate,
    needs_instruction=True,
)
