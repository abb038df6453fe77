"""Records of earlier versions, which escaped the names of some pictures: finds the pictures they belong to."""

import os
from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.records.picture_names import escaped_name, find_escaped
from llama_adapter.app.records.record import Record, may_be_escaped


def file_name(record: Record) -> str:
    """The name of a record's picture; for an escaped one, that of the existing file."""
    return find_escaped(record["picture"]) if may_be_escaped(record) else record["picture"]


class OldNames:
    """Finds records under escaped names whose pictures have later records under their own name; 16 bytes for each.

    Names are compared by their keys. A name that looks escaped counts as is if a file has it.
    """

    def __init__(self) -> None:
        self._rows, self._keys = array("Q"), array("Q")  # of records whose names may be escaped
        self._own: dict[int, int | None] = {}  # key of the escaped form -> key of the name; None where two share it

    def see(self, row: int, record: Record, *, key: Callable[[str], int]) -> None:
        """Take the record in this row. Call it for all records in their order."""
        name = record["picture"]
        if may_be_escaped(record):
            self._rows.append(row)
            self._keys.append(key(name))
        elif self._rows and (escaped := escaped_name(name)) != name and not os.path.lexists(escaped):
            own = key(name)
            if self._own.setdefault(key(escaped), own) != own:
                self._own[key(escaped)] = None

    def rename(self, pictures: NDArray[np.uint64]) -> None:
        """Replace the keys of escaped names in `pictures` by those of the pictures' own names."""
        for row, old in zip(self._rows, self._keys, strict=True):
            own = self._own.get(old)
            if own is not None:
                pictures[row] = own
