"""Memory for packed weights, in large pages where the system has them. Imports no torch.

A decode step of one row reads all weights once. Layers of small models are smaller than a large page, so they share
mappings: with a mapping for each layer, a step of SmolLM2-135M in bfloat16 takes 1.3 times as long on AMD Zen 4.
"""

import mmap
import threading
import weakref
from contextlib import suppress
from typing import Final

import numpy as np

ALIGNMENT: Final = 64  # bytes: packed weights are padded to a multiple, so that each begins at a cache line
_PAGE: Final = 2 << 20  # bytes of a large page on x86, and on ARM with pages of 4 KB; elsewhere nothing is gained
_SHARED: Final = 32 << 20  # bytes of a mapping for several weights; more than half of it gets a mapping of its own


class WeightMemory(threading.local):
    """Places the weights of a thread side by side in shared mappings. A mapping is freed with the last array in it."""

    def __init__(self) -> None:
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._next = self._end = 0  # in the mapping

    def allocate(self, num_bytes: int) -> np.ndarray:
        """New uint8 memory of this size, which begins at a multiple of ALIGNMENT. Raises MemoryError."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > _SHARED // 2:
            mapping, start = _map(size)
            return np.frombuffer(mapping, np.uint8, num_bytes, start)
        shared = self._mapping() if self._mapping else None
        if shared is None or self._next + size > self._end:
            shared, start = _map(_SHARED)
            self._mapping, self._next, self._end = None, start, start + _SHARED
            self._mapping = weakref.ref(shared)
        own = np.frombuffer(shared, np.uint8, num_bytes, self._next)
        self._next += size
        return own


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """A mapping with room for so many bytes from a multiple of _PAGE on, and this place. Its whole pages are large."""
    try:
        mapping = mmap.mmap(-1, num_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes:,} bytes for weights") from error
    start = -np.frombuffer(mapping, np.uint8).ctypes.data % _PAGE
    with suppress(OSError):  # a system without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE, start, num_bytes // _PAGE * _PAGE)
    return mapping, start


WEIGHT_MEMORY: Final = WeightMemory()
