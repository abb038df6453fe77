"""Pictures that `encode` encoded: a prefix file, or a folder of prefix files with records."""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs.items import PictureInput
from llama_adapter.app.pictures.names import name_key
from llama_adapter.app.pictures.prefixes import PREFIX_FILE
from llama_adapter.app.pictures.prefixes.file import PrefixFileError, PrefixRow, read_prefix_file
from llama_adapter.runtime.record_lines import PART_NAME, RecordFileError, parse_object, read_lines
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.formats import PICTURE_NOTES

_SUCCESS = 1 << 32  # added to the rank of a success, so that it exceeds the rank of any failure


def prefix_inputs(name: str) -> Iterator[PictureInput]:
    """The encoded pictures of a file or folder. Their labels are the names under which they were encoded.

    For a folder, the records are read: a picture that could not be encoded is an item with its error. If several runs
    encoded a picture with the same name, the last run counts. A moved picture has its last name only. For a file or
    folder that is unreadable or damaged, the last item has an error of code "prefixes".
    """
    try:
        if os.path.isdir(name):
            for record in _current_records(name):
                yield _item(record, folder=name)
            return
        for row, entry in enumerate(read_prefix_file(name).entries):
            yield PictureInput(source=PrefixRow(name, row, entry.digest), label=entry.name, root=name)
    except PrefixFileError as error:
        yield PictureInput.failed(name, "prefixes", f"{error.message}; {error.hint}.", root=name)
    except (RecordFileError, OSError) as error:
        message = f"Wanted the records of the prefixes in `{shown_name(name)}`: {error}; copy the whole folder."
        yield PictureInput.failed(name, "prefixes", message, root=name)


def _current_records(folder: str) -> Iterator[dict[str, Any]]:
    """The records that count. Memory use is 80 bytes for each record, and 100 more for each of a moved picture."""
    numbered = ((PART_NAME.fullmatch(part.name), part) for part in Path(folder).iterdir())
    parts = [part for _, part in sorted((int(match[1]), part) for match, part in numbered if match is not None)]
    if not parts:
        raise RecordFileError("there is no part-00000.jsonl")
    runs: dict[str, int] = {}
    names, ranks = array("Q"), array("Q")
    moved: dict[int, int] = {}  # key of a picture's digest and former name -> the run that found it elsewhere
    for record in (record for part in parts for _, record in read_lines(part, _record)):
        number = runs.setdefault(record["run"], len(runs))
        names.append(name_key(record["picture"]))
        ranks.append(number + (_SUCCESS if record["error"] is None else 0))
        if isinstance(former := record.get("moved_from"), str):
            moved[_key(record, former)] = number
    _, of_name = np.unique(np.array(names, dtype=np.uint64), return_inverse=True)
    rank = np.array(ranks, dtype=np.uint64)
    highest = np.zeros(len(rank), dtype=np.uint64)
    np.maximum.at(highest, of_name, rank)
    counts = rank == highest[of_name]
    records = (record for part in parts for _, record in read_lines(part, _record))
    for record, does in zip(records, counts, strict=False):
        if does and runs[record["run"]] >= moved.get(_key(record, record["picture"]), 0):
            yield record


def _key(record: dict[str, Any], name: str) -> int:
    return name_key(f"{record.get('digest')} {name}")


def _record(line: bytes) -> dict[str, Any] | None:
    """A record of `encode`, None for anything else: files are not trusted."""
    record = parse_object(line)
    if record is None:
        return None
    try:
        texts = [record["picture"], record["run"]]
        error = record["error"]
        texts += [] if error is None else [error["code"], error["message"]]
    except (KeyError, TypeError):
        return None
    return record if all(isinstance(text, str) for text in texts) else None


def _item(record: dict[str, Any], *, folder: str) -> PictureInput:
    label, error = record["picture"], record["error"]
    file, row, digest = (record.get(name) for name in ("file", "row", "digest"))
    if error is not None:
        failure = AnswerError(code=error["code"], message=error["message"])
        digest = digest if isinstance(digest, str) else ""
        return PictureInput(source=label, label=label, root=folder, digest=digest, error=failure)
    # Records are not trusted: only file names in this folder are accepted.
    if isinstance(file, str) and PREFIX_FILE.fullmatch(file) and type(row) is int and row >= 0 and type(digest) is str:
        notes = tuple(note for note in PICTURE_NOTES if record.get(note) is True)
        return PictureInput(source=PrefixRow(os.path.join(folder, file), row, digest, notes), label=label, root=folder)
    wanted = f"Wanted the place of an encoded picture in the record of `{shown_name(label)}`"
    message = f"{wanted}; encode all pictures again with --overwrite."
    return PictureInput.failed(label, "prefixes", message, root=folder)
