"""Records of pictures that were moved: a later record replaces the one under the former name."""

from array import array

import numpy as np
from numpy.typing import NDArray


class Moves:
    """Collects the keys of replaced records; a key is a number of integers below 2**64, such as id and name."""

    def __init__(self, *, num_keys: int) -> None:
        self._rows, self._keys = array("Q"), [array("Q") for _ in range(num_keys)]

    def add(self, row: int, *keys: int) -> None:
        """The record in this row replaces earlier ones with these keys. Rows ascend."""
        self._rows.append(row)
        for kept, key in zip(self._keys, keys, strict=True):
            kept.append(key)

    def are_replaced(self, *keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether each row with these keys, of shape (rows,), comes before a record that replaces it."""
        num_rows = len(keys[0])
        if not self._rows:
            return np.zeros(num_rows, dtype=np.bool_)
        rows = np.concatenate((np.arange(num_rows, dtype=np.uint64), np.array(self._rows, dtype=np.uint64)))
        both = [
            np.concatenate((own, np.array(moved, dtype=np.uint64))) for own, moved in zip(keys, self._keys, strict=True)
        ]
        order = np.lexsort((rows, *both))
        starts = np.zeros(len(order), dtype=np.bool_)
        for one in both:
            starts[1:] |= one[order[1:]] != one[order[:-1]]
        group = np.empty(len(order), dtype=np.intp)
        group[order] = np.cumsum(starts)
        last = np.full(len(order), -1, dtype=np.int64)  # the last replacing row of each group
        np.maximum.at(last, group[num_rows:], rows[num_rows:].astype(np.int64))
        are_replaced: NDArray[np.bool_] = np.arange(num_rows) < last[group[:num_rows]]
        return are_replaced
