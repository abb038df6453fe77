"""An index of the questions that files of records answer already. It takes 30 bytes of memory per record."""

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.jobs.records.record import Record, parse_record, superseded_names
from llama_adapter.app.pictures.names import name_key, place_of
from llama_adapter.runtime.record_lines import read_lines

State = Literal["answered", "failed"]
Keys = NDArray[np.uint64]

# Number of records under other names that are examined. A picture with more copies may be answered again.
_MAX_DOUBTS = 16


class Claim(NamedTuple):
    """What is recorded about a question: its state, and the record if it has a former name of the picture."""

    state: State
    former: Record | None = None


class Moves:
    """Collects the keys of replaced records: id and name, each as an integer below 2**64."""

    def __init__(self) -> None:
        self._rows, self._ids, self._names = array("Q"), array("Q"), array("Q")

    def add(self, row: int, record_id: int, name: int) -> None:
        """The record in this row replaces earlier ones with these keys. Rows ascend."""
        self._rows.append(row)
        self._ids.append(record_id)
        self._names.append(name)

    def are_replaced(self, ids: Keys, names: Keys) -> NDArray[np.bool_]:
        """Whether each row with these keys, of shape (rows,), comes before a record that replaces it."""
        num_rows = len(ids)
        if not self._rows:
            return np.zeros(num_rows, dtype=np.bool_)
        both = [np.concatenate((own, _as_keys(moved))) for own, moved in ((ids, self._ids), (names, self._names))]
        last = last_places(*both, later=np.arange(len(both[0])) >= num_rows)[:num_rows]
        rows = np.concatenate((np.zeros(num_rows, dtype=np.uint64), _as_keys(self._rows)))  # 0: replaced by none
        are_replaced: NDArray[np.bool_] = np.arange(num_rows) < rows[last]
        return are_replaced


def last_places(*keys: Keys, later: NDArray[np.bool_] | None = None) -> NDArray[np.intp]:
    """For each row, the last row with the same keys. Rows marked in `later` sort after others with the same keys."""
    count = len(keys[0])
    rank = np.zeros(count, dtype=np.bool_) if later is None else later
    order = np.lexsort((np.arange(count), rank, *keys))
    differs = np.zeros(max(count - 1, 0), dtype=np.bool_)
    for key in keys:
        differs |= key[order[:-1]] != key[order[1:]]
    is_end = np.append(differs, True)[:count]
    places = np.zeros(count, dtype=np.intp)
    places[order] = order[is_end][np.cumsum(is_end) - is_end]
    return places


def _as_keys(numbers: "array[int]") -> Keys:
    return np.array(numbers, dtype=np.uint64)


class RecordIndex:
    """The records of some files. Each record answers one prompt about one picture. Can be pickled.

    A record belongs to a picture if id and name match. A record with the same id and another name belongs to it too if
    no file of that name exists, or if the name is another spelling of the picture's path. So renamed and moved pictures
    are not answered again. If both files exist, they are copies, and each gets its own record. A record with
    `moved_from` is a copy of one under a former name, which it replaces.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Reads all files, oldest first. Raises `RecordFileError` and OSError."""
        self._paths = tuple(map(Path, paths))
        all_ids, all_names, files, offsets, failed = array("Q"), array("Q"), array("L"), array("Q"), bytearray()
        superseded: dict[int, tuple[int, int, str]] = {}  # by name: position and run of the last superseding record
        moves = Moves()
        for number, path in enumerate(self._paths):
            for offset, record in read_lines(path, parse_record):
                all_ids.append(name_key(record["id"]))
                all_names.append(name_key(record["picture"]))
                files.append(number)
                offsets.append(offset)
                failed.append(record["error"] is not None)
                if (former := record.get("moved_from")) is not None:
                    moves.add(len(failed) - 1, all_ids[-1], name_key(former))
                for mended in superseded_names(record):
                    superseded[name_key(mended)] = number, offset, record["run"]
        ids, names = _as_keys(all_ids), _as_keys(all_names)
        order = np.lexsort((names, ids))  # stable: equal keys keep their order
        self._ids, self._names = ids[order], names[order]
        self._files = np.array(files, dtype=np.uint32)[order]
        self._offsets = np.array(offsets, dtype=np.uint64)[order]
        self._has_failed = np.frombuffer(bytes(failed), dtype=np.bool_)[order]
        self._is_claimed = moves.are_replaced(ids, names)[order]
        self._drop_superseded(superseded)
        self._failed_names = np.sort(self._names[self._has_failed & ~self._is_claimed])

    def __len__(self) -> int:
        return len(self._ids)

    def look_up(self, record_id: str, picture: str) -> State | Literal["elsewhere"] | None:
        """The state recorded for this id and name; "elsewhere" if only other names are recorded. Reads no file."""
        own, first, last = self._rows(record_id, picture)
        if not own:
            return "elsewhere" if last > first else None
        return "failed" if all(self._has_failed[row] for row in own) else "answered"

    def has_failed(self, name: str) -> bool:
        """Whether any question about a picture with this name has failed and was not answered later."""
        first, last = _bounds(self._failed_names, np.uint64(name_key(name)), 0, len(self._failed_names))
        return last > first

    def has_failed_since(self, record_id: str, picture: str, *, failure_id: str) -> bool:
        """Whether `failure_id` was recorded for this picture in a later run than the last record of `record_id`.

        That happens if the picture's bytes were unreadable in the later run. Readers of the file then treat the failure
        as the latest result. A failure in the same run belongs to another picture with this name, as in an archive.
        """
        own, failures = (self._rows(one, picture)[0] for one in (record_id, failure_id))
        if not own or not failures:
            return bool(failures)
        answered, failed = (max(rows, key=self._place) for rows in (own, failures))
        if self._place(failed) < self._place(answered):
            return False
        return self._record_of(failed)["run"] != self._record_of(answered)["run"]

    def claim(self, record_id: str, picture: str, *, path: str | None = None) -> Claim | None:
        """Claim the record of this picture, whose file is `path`, unless another picture has claimed it.

        Not thread-safe.
        """
        for row, former in self._candidates(record_id, picture, path):
            self._is_claimed[row] = True
            return Claim("failed" if self._has_failed[row] else "answered", former)
        return None

    def _candidates(self, record_id: str, picture: str, path: str | None) -> Iterator[tuple[int, Record | None]]:
        """Rows that no picture has claimed, answers first, with their record if its picture has moved."""
        own, first, last = self._rows(record_id, picture)
        yield from ((row, None) for row in sorted(own, key=self._has_failed.__getitem__) if not self._is_claimed[row])
        # Done with numpy, because there may be a hundred thousand copies of one picture.
        free = np.flatnonzero(~self._is_claimed[first:last]) + first
        others = free[(free < own.start) | (free >= own.stop)]
        for row in others[:_MAX_DOUBTS].tolist():
            record = self._record_of(row)
            if _stands_for(record, path):
                yield row, None if path is None or os.path.lexists(record["picture"]) else record

    def _rows(self, record_id: str, picture: str) -> tuple[range, int, int]:
        """The rows with this id and name, and the bounds of all rows with this id."""
        first, last = _bounds(self._ids, np.uint64(name_key(record_id)), 0, len(self))
        return range(*_bounds(self._names, np.uint64(name_key(picture)), first, last)), first, last

    def _place(self, row: int) -> tuple[int, int]:
        """File number and offset, which are in the order of time."""
        return int(self._files[row]), int(self._offsets[row])

    def _record_of(self, row: int) -> Record:
        with open(self._paths[self._files[row]], "rb") as file:
            file.seek(int(self._offsets[row]))
            return cast(Record, json.loads(file.readline()))

    def _drop_superseded(self, superseded: Mapping[int, tuple[int, int, str]]) -> None:
        """Drop failures that have an answer with the same id and name, or that a record of a later run supersedes."""
        for row in np.flatnonzero(self._has_failed).tolist():
            by = superseded.get(int(self._names[row]))
            if by is not None and by[:2] > self._place(row) and self._record_of(row)["run"] != by[2]:
                self._is_claimed[row] = True
                continue
            same = _bounds(self._ids, self._ids[row], 0, len(self))
            same = _bounds(self._names, self._names[row], *same)
            self._is_claimed[row] |= not self._has_failed[slice(*same)].all()


def _bounds(ascending: Keys, value: np.uint64, first: int, last: int) -> tuple[int, int]:
    """The bounds of `value` in the sorted `ascending[first:last]`."""
    part = ascending[first:last]
    return first + int(part.searchsorted(value, "left")), first + int(part.searchsorted(value, "right"))


def _stands_for(record: Record, path: str | None) -> bool:
    """Whether a record under another name may belong to the picture whose file is `path`."""
    recorded = record["picture"]
    if "://" in recorded:
        return False
    if path is not None and os.path.lexists(recorded):
        return place_of(recorded) == place_of(path)
    return not any(os.path.isfile(place) for place in (Path(recorded), *Path(recorded).parents))
