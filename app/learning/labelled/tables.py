"""Reads tables of labelled pictures and texts, see `read_rows`, and finds pictures that they name in archives."""

import os
from collections import defaultdict
from dataclasses import replace

from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.labelled.pictures import pictures_in
from llama_adapter.app.learning.labelled.rows import KNOWN, NO_PICTURE_COLUMN, WANTED, Columns, add_row, without_copies
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.app.pictures.inputs.archives import is_archive_name
from llama_adapter.app.pictures.inputs.items import InputsError
from llama_adapter.app.pictures.inputs.tables import read_rows
from llama_adapter.runtime.text import shown_name

_WHAT = "table of labelled pictures"


def table_examples(path: str, *, columns: Columns) -> Examples:
    """The examples of a table, without duplicates.

    Paths of pictures are relative to `columns.picture_folder`, by default to the folder of the table; missing pictures
    are not reported. A picture may be in an archive: `shard.tar/000.jpg`. Malformed rows, and different answers to the
    same question about the same picture, are problems with their line.

    Raises InputsError if the file is unusable as a whole, and OSError.
    """
    found = Examples()
    root = os.path.dirname(path) if columns.picture_folder is None else columns.picture_folder
    for row in read_rows(path, what=_WHAT, wanted=WANTED, known=KNOWN, root=root):
        place = f"{path}, line {row.line}"
        if row.problem:
            found.refuse(place, row.problem)
            continue
        kind = "rows without an answer"
        add_row(found, row.values, columns=columns, place=place, line=row.line, root=root, unanswered=kind)
    unnamed = next((one for one in found.problems if one.reason.endswith(NO_PICTURE_COLUMN)), None)
    if unnamed is not None and all(one.item.source is None for one in found.examples):
        raise InputsError(
            f"Wanted pictures in the {_WHAT} `{shown_name(path)}`, but its examples have none:", details=[str(unnamed)]
        )
    captions = [one for one in found.examples if one.task == "caption"]
    if sum(one.answers[0].endswith("?") for one in captions) * 2 > len(captions) > 1:
        raise InputsError(
            f"Wanted answers in the {_WHAT} `{shown_name(path)}`, but most of its descriptions are questions.",
            hint="call the column of questions `question`, and that of the answers `answer`",
        )
    without_copies(found, question=columns.question)
    with_members(found)
    return found


def with_members(found: Examples) -> None:
    """Replace paths into archives by the pictures in the archives. Each archive is read once, by `pictures_in`.

    If an archive lacks a name, the path stays, and the picture is reported as missing later. A picture that cannot be
    extracted is an error.
    """
    wanted = defaultdict[str, set[str]](set)
    for example in found.examples:
        source = example.item.source
        if isinstance(source, str) and (archive := archive_in(source)) is not None:
            wanted[archive].add(source)
    members: dict[str, PictureInput | None] = {}
    for archive, labels in wanted.items():
        members |= pictures_in(archive, found, wanted=labels)
    kept: list[Example] = []
    for example in found.examples:
        if example.item.label not in members:
            kept.append(example)
        elif (member := members[example.item.label]) is None:
            continue  # two pictures have its name
        elif member.error is not None:
            found.refuse(example.place, member.error.message, unreadable=example)
        else:
            item = replace(example.item, source=member.source, root=member.root)
            kept.append(replace(example, item=item))
    found.examples[:] = kept


def archive_in(path: str) -> str | None:
    """The archive in a path, such as `a/shard.tar` in `a/shard.tar/b/c.jpg`; None if the path has no archive."""
    parts = path.split("/")
    places = (end for end in range(1, len(parts)) if is_archive_name(parts[end - 1]))
    return next(filter(os.path.isfile, ("/".join(parts[:end]) for end in places)), None)
