"""Memory for packed weights."""

import errno
import mmap
import threading
import weakref

import numpy as np
import pytest

from llama_adapter.runtime.kernels import memory as module
from llama_adapter.runtime.kernels.memory import WeightMemory

PAGE, SHARED = 2 << 20, 32 << 20
SIZES = (1, 63, 64, 1000, 3 << 20, 5, SHARED // 2, SHARED // 2 + 1, 40 << 20, 7 << 20, 9 << 20, 100)


def test_pieces_are_aligned_and_apart() -> None:
    """Four threads take pieces of all sizes, and write to all bytes of them."""
    memory = WeightMemory()
    pieces: list[np.ndarray] = []

    def take() -> None:
        pieces.extend(memory.allocate(size) for size in SIZES)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % 64 == 0
        piece[:] = number
    assert sorted(piece.nbytes for piece in pieces) == sorted(SIZES * 4)
    assert all((piece == number).all() for number, piece in enumerate(pieces))


class Advised(mmap.mmap):
    """A mapping that keeps what was asked for it."""

    advice: tuple[int, ...] = ()

    def madvise(self, *advice: int) -> None:
        self.advice += advice


def test_small_pieces_lie_side_by_side_in_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.mmap, "mmap", Advised)
    memory, size = WeightMemory(), 700 * 1024
    pieces = [memory.allocate(size) for _ in range(6)]
    starts = [piece.ctypes.data for piece in pieces]
    assert starts == [starts[0] + index * size for index in range(6)]
    assert starts[0] % PAGE == 0
    for piece in (pieces[0], memory.allocate(SHARED)):
        assert isinstance(piece.base, memoryview)
        assert isinstance(piece.base.obj, Advised)
        assert piece.base.obj.advice == (mmap.MADV_HUGEPAGE,)


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
    again = memory.allocate(100)
    assert len(mappings) == 3
    assert again.nbytes == 100


class Refused(mmap.mmap):
    """A mapping on a system without large pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.mmap, "mmap", Refused)
    piece = WeightMemory().allocate(1000)
    piece[:] = 7
    assert (piece == 7).all()


def test_too_little_memory() -> None:
    with pytest.raises(MemoryError, match=r"4,611,686,018,427,387,904 bytes for weights"):
        WeightMemory().allocate(1 << 62)
