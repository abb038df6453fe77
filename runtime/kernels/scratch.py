"""Working memory of the kernels, which each thread keeps between calls and releases when it ends."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as kernels.c requires


class _Scratch(NamedTuple):
    memory: Tensor | None
    address: int  # of its first aligned byte
    num_bytes: int  # from there


_NONE = _Scratch(None, 0, 0)


class _Held(threading.local):
    scratch = _NONE  # each thread's own


_held = _Held()


def in_scratch(kernel: Callable[..., int]) -> Callable[..., None]:
    """A function of kernels.c without its last two arguments, scratch and its size.

    It raises RuntimeError, as torch does for tensors, if memory is insufficient. Then nothing was computed, and the
    thread holds no scratch.
    """

    def run(*arguments: int) -> None:
        scratch = _held.scratch
        while needed := kernel(*arguments, scratch.address, scratch.num_bytes):
            scratch = _held.scratch = _NONE  # release the smaller one first
            scratch = _held.scratch = _allocated(needed + needed // 4)  # the next step of a decoder needs a little more

    return run


def _allocated(num_bytes: int) -> _Scratch:
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
    return _Scratch(memory, -memory.data_ptr() % _ALIGNMENT + memory.data_ptr(), num_bytes)
