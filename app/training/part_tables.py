"""The parts of a division as tables: `train.jsonl`, `validation.jsonl` and `test.jsonl` of a run.

`train`, `eval` and `ask --calibrate` read them: the same pictures, questions, choices and answers as in the run. Paths
are absolute, so a table works from every folder. A picture in an archive is `/data/shard.tar/000.jpg`.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from llama_adapter.app.evaluating.question import question_of
from llama_adapter.app.inputs import PictureInput, natural_key
from llama_adapter.app.jobs.questions import as_template
from llama_adapter.app.labelled.example import Example
from llama_adapter.app.training.asking import MOST_NAMED
from llama_adapter.app.training.prepare import TrainingData
from llama_adapter.runtime.atomic_write import atomic_write

# Columns by task.
_ANSWERS: Final[Mapping[str, str]] = {"choice": "answers", "answer": "answers", "caption": "captions"}


def table_name(part: str) -> str:
    """The file of a part."""
    return f"{part}.jsonl"


def write_tables(data: TrainingData, folder: Path) -> None:
    """Write a table for each part that has examples, and remove that of an earlier run of one that has none.

    Raises OSError.
    """
    for part, examples in data.parts:
        path = folder / table_name(part)
        if not examples:
            path.unlink(missing_ok=True)
            continue
        with atomic_write(path) as file:
            for row in table_rows([one.example for one in examples], part=part):
                file.write(json.dumps(row).encode() + b"\n")


def table_rows(examples: Sequence[Example], *, part: str) -> Iterator[dict[str, Any]]:
    """A row for each example, which is read as the same example.

    Variables of questions are filled in. Captions have no question: it is that of the command. Many classes are not
    listed in every row where they follow from the labels of the table.
    """
    classes, real_folder = _classes(examples), cache(os.path.realpath)
    for example in examples:
        is_class = example.choices is not None and example.choices == classes
        yield dict(_columns(example, part=part, is_class=is_class, real_folder=real_folder))


def _classes(examples: Sequence[Example]) -> tuple[str, ...] | None:
    """The choices of all examples with choices, if they are many and all occur as answers."""
    asked = [example for example in examples if example.choices is not None]
    if not asked or len({example.choices for example in asked}) > 1 or any(len(one.answers) > 1 for one in asked):
        return None
    found = tuple(sorted({one.answers[0] for one in asked}, key=natural_key))
    return found if len(found) > MOST_NAMED and found == asked[0].choices else None


def _columns(
    example: Example, *, part: str, is_class: bool, real_folder: Callable[[str], str]
) -> Iterator[tuple[str, Any]]:
    has_picture = example.item.source is not None
    if has_picture:
        yield "picture", _absolute(example.item, real_folder)
    asked = question_of(example, question=None)
    if asked.instruction is not None and example.task != "caption":
        yield "prompt", as_template(asked.instruction) if has_picture else asked.instruction
    if asked.input is not None:
        yield "input", as_template(asked.input) if has_picture else asked.input
    if example.choices is not None and not is_class:
        yield "choices", list(example.choices)
    answers = list(example.answers) if len(example.answers) > 1 else example.answers[0]
    yield "label" if is_class else _ANSWERS[example.task], answers
    if example.part:
        yield "part", example.part
    yield "split", part
    yield from example.item.columns.items()


def _absolute(item: PictureInput, real_folder: Callable[[str], str]) -> str:
    """The path of a picture, or of its archive with its name in there. The file keeps its name, also that of a link."""
    path, member = item.root, item.label.removeprefix(item.root or "")
    if isinstance(item.source, str):
        path, member = item.source, ""
    assert path is not None, "a picture without a file of its own lies in an archive"
    folder, name = os.path.split(path)
    return os.path.join(real_folder(folder), name) + member
