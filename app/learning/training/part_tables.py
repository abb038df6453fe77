"""Writes the parts of the data as tables: `train.jsonl`, `validation.jsonl` and `test.jsonl` of a run.

`train`, `eval` and `ask --calibrate` can read them, and find the same pictures, questions, choices and answers as in
the run. Paths are absolute, so a table works from every folder. The path of a picture in an archive is, for example,
`/data/shard.tar/000.jpg`.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.learning.evaluating.outcomes import question_of
from llama_adapter.app.learning.labelled.example import MOST_NAMED, Example
from llama_adapter.app.learning.training.prepare import TrainingData
from llama_adapter.app.pictures.inputs import PictureInput, natural_key
from llama_adapter.app.pictures.inputs.fields import as_template
from llama_adapter.runtime.atomic_write import write_text


def write_tables(data: TrainingData, folder: Path) -> None:
    """Write a table for each part with examples; of an empty part, remove that of an earlier run. Raises OSError."""
    for part, examples in data.parts:
        path = folder / f"{part}.jsonl"
        if not examples:
            path.unlink(missing_ok=True)
            continue
        rows = table_rows([one.example for one in examples], part=part)
        write_text(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def table_rows(examples: Sequence[Example], *, part: str) -> Iterator[dict[str, Any]]:
    """A row for each example; reading the row gives the same example.

    Variables in questions are filled in. Rows of captions have no question: the reading command sets it. If the
    examples have many classes, and all of them occur as labels in the table, the rows do not list them.
    """
    classes = _classes(examples)
    for example in examples:
        is_class = example.choices is not None and example.choices == classes
        yield dict(_columns(example, part=part, is_class=is_class))


def _classes(examples: Sequence[Example]) -> tuple[str, ...] | None:
    """The choices of all examples with choices, if they are many and all occur as answers."""
    asked = [example for example in examples if example.choices is not None]
    if not asked or len({example.choices for example in asked}) > 1 or any(len(one.answers) > 1 for one in asked):
        return None
    found = tuple(sorted({one.answers[0] for one in asked}, key=natural_key))
    return found if len(found) > MOST_NAMED and found == asked[0].choices else None


def _columns(example: Example, *, part: str, is_class: bool) -> Iterator[tuple[str, Any]]:
    has_picture = example.item.source is not None
    if has_picture:
        yield "picture", _absolute(example.item)
    asked = question_of(example, question=None)
    if asked.instruction is not None and example.task != "caption":
        yield "prompt", as_template(asked.instruction) if has_picture else asked.instruction
    if asked.input is not None:
        yield "input", as_template(asked.input) if has_picture else asked.input
    if example.choices is not None and not is_class:
        yield "choices", list(example.choices)
    answers = list(example.answers) if len(example.answers) > 1 else example.answers[0]
    yield "label" if is_class else "captions" if example.task == "caption" else "answers", answers
    if example.part:
        yield "part", example.part
    yield "split", part
    yield from example.item.columns.items()


def _absolute(item: PictureInput) -> str:
    """The absolute path of a picture, or of its archive followed by its name in the archive.

    Links are resolved in the folder only, so a link to a file keeps its name.
    """
    path, member = item.root, item.label.removeprefix(item.root or "")
    if isinstance(item.source, str):
        path, member = item.source, ""
    assert path is not None, "a picture without a file of its own lies in an archive"
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name) + member
