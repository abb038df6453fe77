"""A first pass over files finds the records that count; a second pass streams these records."""

import itertools
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.jobs.records.index import Keys, Moves, last_places
from llama_adapter.app.jobs.records.record import Record, read_records, superseded_names
from llama_adapter.app.pictures.inputs import natural_key
from llama_adapter.app.pictures.names import name_key, picture_key
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.record_lines import RecordFileError

MAX_REMEMBERED: Final = 100  # limit for each of prompts, choices and runs, which are used in messages and columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Selects records, in addition to dropping superseded ones."""

    prompt: str | None = None  # only records with this prompt
    only_answers: bool = False  # no records with an error
    skip_unfamiliar: bool = False  # no records of pictures that are unlike the training data


@dataclass(kw_only=True, slots=True)
class Survey:
    """The result of the first pass. It takes 17 bytes for each record."""

    paths: tuple[str, ...]
    selection: Selection
    num_lines: list[int] = field(default_factory=list)  # records of each file; records added later are ignored
    num_taken: int = 0
    num_failed: int = 0  # records with an error that are not superseded
    num_superseded: int = 0
    num_unfamiliar: int = 0  # left out by `skip_unfamiliar`
    # At most `MAX_REMEMBERED` of each: prompts of all records, choices and runs of selected records.
    prompts: dict[str, None] = field(default_factory=dict)
    choices: dict[tuple[str, ...], None] = field(default_factory=dict)
    runs: dict[str, None] = field(default_factory=dict)
    _kept: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    _pictures: Keys = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    _prompts: Keys = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))

    def records(self) -> Iterator[Record]:
        """The records that count, in their order. Raises the errors of `read_records`.

        Also raises RecordFileError if a file has fewer records than in the first pass, because another run overwrote
        it.
        """
        start = 0
        for path, num_lines in zip(self.paths, self.num_lines, strict=True):
            num_read = 0
            for record in itertools.islice(read_records(path), num_lines):
                if self._kept[start + num_read]:
                    yield record
                num_read += 1
            if num_read < num_lines:
                raise RecordFileError(
                    f"`{path}` had {num_lines:,} records at first and {num_read:,} later: another run overwrote it; "
                    "export it again when that has ended."
                )
            start += num_lines

    @property
    def num_pictures(self) -> int:
        """Number of pictures, by name, with records that count."""
        return len(np.unique(self._pictures[self._kept]))

    @property
    def num_repeated(self) -> int:
        """Number of records whose picture and prompt also have a later answer, by another model or settings."""
        return self.num_taken - len(self._pairs)

    @property
    def has_several_prompts(self) -> bool:
        """Whether some picture has answers to more than one prompt."""
        return self.num_pictures < len(self._pairs)

    @property
    def _pairs(self) -> Keys:
        """The different pairs of picture and prompt."""
        return np.unique(np.stack((self._pictures[self._kept], self._prompts[self._kept]), axis=1), axis=0)

    def last_of_pictures(self) -> Iterator[Record]:
        """For each picture, the last record that counts."""
        is_last = _is_last(self._pictures[self._kept])
        return itertools.compress(self.records(), is_last)


def survey(paths: Sequence[str], selection: Selection) -> Survey:
    """Read all files once.

    A failure is superseded by a record of a later run for the same picture and prompt, or by one that names it in
    `supersedes`. A record of the same run does not supersede it, because it belongs to another question or picture
    (other choices, or a member with the same name in an archive). A record of a moved picture replaces the one under
    the former name. Among records with the same id and picture, the last answer counts, or the last failure if there is
    no answer. Raises RecordFileError and OSError.
    """
    found = Survey(paths=tuple(paths), selection=selection)
    pictures, prompts, ids, runs = array("Q"), array("Q"), array("Q"), array("Q")
    failed, meant, unfamiliar, moves = bytearray(), bytearray(), bytearray(), Moves()
    superseded: dict[int, tuple[int, int]] = {}  # by name: position and run of the last superseding record
    for path in paths:
        num_before = len(pictures)
        for record in read_records(path):
            pictures.append(picture_key(record["picture"]))
            prompts.append(name_key(record["prompt"]))
            ids.append(name_key(record["id"]))
            runs.append(name_key(record["run"]))
            if (former := record.get("moved_from")) is not None:
                moves.add(len(runs) - 1, ids[-1], picture_key(former))
            for name in superseded_names(record):
                superseded[picture_key(name)] = len(runs) - 1, runs[-1]
            failed.append(record["error"] is not None)
            takes_prompt = selection.prompt is None or selection.prompt == record["prompt"]
            meant.append(takes_prompt)
            unfamiliar.append(selection.skip_unfamiliar and record.get("unfamiliar") is True)
            if len(found.prompts) < MAX_REMEMBERED:
                found.prompts.setdefault(record["prompt"])
            if meant[-1] and not unfamiliar[-1] and not (failed[-1] and selection.only_answers):
                _remember(found, record)
        found.num_lines.append(len(pictures) - num_before)
    found._pictures, found._prompts, ids_N, runs_N = (
        np.array(keys, dtype=np.uint64) for keys in (pictures, prompts, ids, runs)
    )
    is_failed = np.frombuffer(failed, dtype=np.bool_)
    is_current = _is_last(found._pictures, ids_N, later=~is_failed)
    is_current &= ~moves.are_replaced(ids_N, found._pictures)
    is_current &= ~is_failed | (runs_N[last_places(found._pictures, found._prompts)] == runs_N)
    for place in np.flatnonzero(is_current & is_failed).tolist() if superseded else ():
        by, run = superseded.get(pictures[place], (-1, 0))
        is_current[place] = by < place or run == runs[place]
    is_meant_N = np.frombuffer(meant, dtype=np.bool_)
    is_left_out = np.frombuffer(unfamiliar, dtype=np.bool_)
    found._kept = is_current & is_meant_N & ~(is_failed & selection.only_answers) & ~is_left_out
    found.num_unfamiliar = int((is_current & is_meant_N & is_left_out).sum())
    found.num_failed = int((is_current & is_meant_N & is_failed).sum())
    found.num_taken = int(found._kept.sum())
    found.num_superseded = int((~is_current & is_meant_N).sum())
    return found


def record_files(names: Sequence[str]) -> list[str]:
    """The named files, of folders the .jsonl files in natural order. Raises UsageError for pipes: all is read twice."""
    files: list[str] = []
    for name in names:
        if os.path.isdir(name):
            parts = [str(part) for part in Path(name).glob("*.jsonl") if not part.name.startswith(".")]
            files += sorted(parts, key=natural_key)
        elif os.path.exists(name) and not os.path.isfile(name):
            raise UsageError(f"`{name}` is no file, and records are read twice", hint="write them to a file first")
        else:
            files.append(name)
    return list(dict.fromkeys(files))


def _is_last(*keys: Keys, later: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """Whether each row is the last one with its keys, see `last_places`."""
    is_last: NDArray[np.bool_] = last_places(*keys, later=later) == np.arange(len(keys[0]))
    return is_last


def _remember(found: Survey, record: Record) -> None:
    """Remember the choices and the run of a selected record."""
    if record["choice"] is not None and len(found.choices) < MAX_REMEMBERED:
        found.choices.setdefault(tuple(record["choice"]))
    if len(found.runs) < MAX_REMEMBERED:
        found.runs.setdefault(record["run"])
