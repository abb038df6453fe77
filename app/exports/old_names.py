"""Records of earlier versions, which have escapes in the names of some pictures: whose they are. Opens no picture."""

import os
from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.records.picture_names import escaped_name, find_escaped
from llama_adapter.app.records.record import Record, may_be_escaped


def file_name(record: Record) -> str:
    """The name of a record's picture; of a record of an earlier version, that of the file that is there for it."""
    return find_escaped(record["picture"]) if may_be_escaped(record) else record["picture"]


class OldNames:
    """Finds the records under escaped names whose pictures have later records under their own, in 16 bytes for each.

    Names are compared by keys, which are numbers. A name that a file has counts as its own, even if it looks escaped.
    """

    def __init__(self) -> None:
        self._rows, self._keys = array("Q"), array("Q")  # of records whose names may be escaped
        self._own: dict[int, int | None] = {}  # key of the escaped form -> key of the name; None where two share it

    def see(self, row: int, record: Record, *, key: Callable[[str], int]) -> None:
        """Take the record in this row. All are to be shown, in their order."""
        name = record["picture"]
        if may_be_escaped(record):
            self._rows.append(row)
            self._keys.append(key(name))
        elif self._rows and (escaped := escaped_name(name)) != name and not os.path.lexists(escaped):
            own = key(name)
            if self._own.setdefault(key(escaped), own) != own:
                self._own[key(escaped)] = None

    def rename(self, pictures: NDArray[np.uint64]) -> None:
        """Put the keys of the pictures' own names into the rows of their old ones."""
        for row, old in zip(self._rows, self._keys, strict=True):
            own = self._own.get(old)
            if own is not None:
                pictures[row] = own
