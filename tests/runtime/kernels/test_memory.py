"""Memory for packed weights."""

import errno
import itertools
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from llama_adapter.runtime.kernels import arrays
from llama_adapter.runtime.kernels import memory as module
from llama_adapter.runtime.kernels.arrays import packed
from llama_adapter.runtime.kernels.library import KINDS, Library
from llama_adapter.runtime.kernels.memory import WeightMemory

MB = 1 << 20
PAGE, SHARED = 2 * MB, 32 * MB
SIZES = (1, 63, 64, 1000, 3 * MB, 5, SHARED // 2, 7 * MB, 9 * MB, 100, SHARED // 2 + 1)


class Watched(mmap.mmap):
    """A mapping that keeps how it was made, and what was asked for it."""

    flags: int
    advice: tuple[int, ...] = ()

    def __new__(cls, *arguments: Any, flags: int) -> "Watched":
        mapping = super().__new__(cls, *arguments, flags=flags)
        mapping.flags = flags
        return mapping

    def madvise(self, *advice: int) -> None:
        self.advice += advice


class Refused(mmap.mmap):
    """A mapping on a system without large pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def mapping_of(piece: np.ndarray) -> Watched:
    assert isinstance(piece.base, memoryview)
    assert isinstance(piece.base.obj, Watched)
    return piece.base.obj


def test_pieces_are_aligned_and_apart() -> None:
    """Two threads take pieces of all sizes, twice."""
    memory = WeightMemory()
    pieces: list[np.ndarray] = []

    def take() -> None:
        pieces.extend(memory.allocate(size) for size in SIZES * 2)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(piece.nbytes for piece in pieces) == sorted(SIZES * 4)
    places = sorted((piece.ctypes.data, piece.ctypes.data + piece.nbytes) for piece in pieces)
    assert all(start % 64 == 0 for start, _ in places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


def test_small_pieces_lie_side_by_side_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.mmap, "mmap", Watched)
    memory, size = WeightMemory(), 700 * 1024
    pieces = [memory.allocate(size) for _ in range(6)]
    starts = [piece.ctypes.data for piece in pieces]
    assert starts == [starts[0] + index * size for index in range(6)]
    mapping = mapping_of(pieces[0])
    first = np.frombuffer(mapping, np.uint8).ctypes.data
    assert mapping.flags == mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    assert mapping.advice == (mmap.MADV_HUGEPAGE, starts[0] - first, SHARED)
    assert starts[0] % PAGE == 0


@pytest.mark.parametrize("size", [SHARED // 2 + 1, 17 * MB + 100, 64 * MB - 1])
def test_a_large_piece_has_its_own_mapping(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its whole pages are large: the rest of a last one would be memory that nobody counts."""
    monkeypatch.setattr(module.mmap, "mmap", Watched)
    memory = WeightMemory()
    before, piece, after = memory.allocate(10), memory.allocate(size), memory.allocate(10)
    mapping = mapping_of(piece)
    assert mapping is not mapping_of(before)
    assert mapping_of(before) is mapping_of(after)
    rounded = -(-size // 64) * 64
    assert len(mapping) == rounded + PAGE
    assert piece.ctypes.data % PAGE == 0
    assert mapping.advice[2] == rounded // PAGE * PAGE


def test_a_mapping_is_freed_with_its_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []
    original = module._map

    def watched(num_bytes: int) -> tuple[mmap.mmap, int]:
        mapping, start = original(num_bytes)
        mappings.append(weakref.ref(mapping))
        return mapping, start

    monkeypatch.setattr(module, "_map", watched)
    memory = WeightMemory()
    first, second, large = memory.allocate(100), memory.allocate(PAGE)[5:], memory.allocate(SHARED)
    assert [mapping() is None for mapping in mappings] == [False, False]
    del first, large
    assert [mapping() is None for mapping in mappings] == [False, True]
    del second
    assert [mapping() is None for mapping in mappings] == [True, True]
    memory.allocate(100)
    assert len(mappings) == 3


def test_an_interrupted_allocation_gives_no_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = WeightMemory()
    kept = [memory.allocate(9 * MB) for _ in range(3)]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.weakref, "ref", interrupt)
        with pytest.raises(KeyboardInterrupt):
            memory.allocate(9 * MB)
    own = memory.allocate(9 * MB)
    assert not any(np.shares_memory(own, piece) for piece in kept)


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.mmap, "mmap", Refused)
    piece = WeightMemory().allocate(1000)
    piece[:] = 7
    assert (piece == 7).all()


def test_too_little_memory() -> None:
    with pytest.raises(MemoryError, match=r"^4,611,686,018,427,387,904 bytes for weights$"):
        WeightMemory().allocate(1 << 62)


def test_packed_weights_lie_side_by_side(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing writes to all of its own memory, and to none beside it."""
    weight = np.arange(96 * 8, dtype=np.float32).reshape(96, 8)
    memory = WeightMemory()
    monkeypatch.setattr(arrays, "WEIGHT_MEMORY", memory)
    num_bytes = library.packed_bytes(KINDS["float32"], 96, 8)
    first, between, second = (memory.allocate(size) for size in (64, num_bytes, 64))
    first[:], second[:] = 171, 172
    own, other = packed(weight, library=library), packed(weight, library=library)
    assert own.nbytes == num_bytes
    assert other.ctypes.data - own.ctypes.data == num_bytes
    library.pack(KINDS["float32"], 96, 8, weight.ctypes.data, None, between.ctypes.data, 2)
    assert bytes(own) == bytes(other) == bytes(between)
    assert (first == 171).all()
    assert (second == 172).all()
