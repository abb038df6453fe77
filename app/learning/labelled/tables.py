"""Reads tables of labelled pictures and texts, see `read_rows`."""

import os

from llama_adapter.app.learning.labelled.example import Examples
from llama_adapter.app.learning.labelled.members import with_members
from llama_adapter.app.learning.labelled.rows import Columns, row_examples, without_copies
from llama_adapter.app.pictures.inputs.items import InputsError
from llama_adapter.app.pictures.inputs.tables import TABLE_SUFFIXES, read_rows
from llama_adapter.runtime.text import shown_name

_WHAT = "table of labelled pictures"
_EVERYTHING = Columns()


def is_table_name(name: str) -> bool:
    """Whether the name of a file is that of a table."""
    return name.lower().endswith(TABLE_SUFFIXES)


def table_examples(path: str, *, columns: Columns = _EVERYTHING, split: str = "") -> Examples:
    """The examples of a table, without duplicates.

    Paths of pictures are relative to the table's folder; missing pictures are not reported. A picture may be in an
    archive: `shard.tar/000.jpg`. Malformed rows, and
    different answers to the same question about the same picture, are problems with their line.

    Raises InputsError if the file is unusable as a whole, and OSError.
    """
    found = Examples()
    for row in read_rows(path, what=_WHAT, wanted=columns.wanted, known=columns.known):
        place = f"{path}, line {row.line}"
        try:
            if row.problem:
                raise ValueError(row.problem)
            root = os.path.dirname(path)
            found.examples += row_examples(
                row.values,
                columns=columns,
                place=place,
                line=row.line,
                root=root,
                split=split,
                left_out=found.left_out,
            )
        except ValueError as error:
            found.refuse(place, str(error))
    captions = [one for one in found.examples if one.task == "caption"]
    if sum(one.answers[0].endswith("?") for one in captions) * 2 > len(captions) > 1:
        raise InputsError(
            f"Wanted answers in the {_WHAT} `{shown_name(path)}`, but most of its descriptions are questions.",
            hint="call the column of questions `question`, and that of the answers `answer`",
        )
    without_copies(found, question=columns.question, name_of=lambda example: f"line {example.line}")
    with_members(found)
    return found
