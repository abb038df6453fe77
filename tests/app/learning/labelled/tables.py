"""Tables for the tests of labelled data, and examples as short tuples."""

import json
from pathlib import Path
from typing import Any

from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.labelled.reading import read_examples
from llama_adapter.app.learning.labelled.rows import Columns
from llama_adapter.app.pictures.inputs import PictureInput, QuestionFields


def write_lines(path: Path, *rows: dict[str, Any]) -> Path:
    """Write a table of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def example(*answers: str, source: str | None = None, columns: dict[str, str] | None = None, **fields: Any) -> Example:
    """An example of open answers about a picture or none; `fields` are those of its question and of `Example`."""
    item = PictureInput(source=source, label=source or "line 1", columns=columns or {})
    question = QuestionFields(instruction=fields.pop("instruction", None), input=fields.pop("input", None))
    return Example(
        **{"item": item, "question": question, "task": "answer", "answers": answers, "place": "data", **fields}
    )


def read(path: Path, **columns: Any) -> Examples:
    """Read labelled data without digests of pictures, which may be empty files then."""
    return read_examples(str(path), columns=Columns(**columns), digests=False)


def brief(example: Example, *, folder: Path) -> tuple[str | None, str | None, str, tuple[str, ...]]:
    """Picture relative to the folder, question, task and answers."""
    source = example.item.source
    picture = None if source is None else str(Path(example.item.label).relative_to(folder))
    return picture, example.question.instruction, example.task, example.answers


def reasons(found: Examples, *, folder: Path) -> list[str]:
    """The problems as text, with paths relative to the folder; warnings are marked."""
    return [
        ("warning: " if problem.is_warning else "") + str(problem).replace(f"{folder}/", "")
        for problem in found.problems
    ]
