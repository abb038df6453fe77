"""What the kernels compute in: memory that each thread keeps from call to call, and gives back when it ends."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as kernels.c asks for


class _Scratch(NamedTuple):
    memory: Tensor | None
    address: int  # of its first byte that is aligned
    num_bytes: int  # from there


_NONE = _Scratch(None, 0, 0)


class _Held(threading.local):
    scratch = _NONE  # each thread's own


_held = _Held()


def in_scratch(kernel: Callable[..., int]) -> Callable[..., None]:
    """A function of kernels.c that takes, behind its own arguments, scratch and its bytes, as one that brings them.

    It raises RuntimeError, as torch does for tensors, where there is not enough memory; then nothing was computed, and
    the thread holds no scratch.
    """

    def run(*arguments: int) -> None:
        scratch = _held.scratch
        while needed := kernel(*arguments, scratch.address, scratch.num_bytes):
            scratch = _held.scratch = _NONE  # what is too small makes room
            scratch = _held.scratch = _allocated(needed + needed // 4)  # a decoder's next step needs a little more

    return run


def _allocated(num_bytes: int) -> _Scratch:
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8, device="cpu")
    return _Scratch(memory, -memory.data_ptr() % _ALIGNMENT + memory.data_ptr(), num_bytes)
