"""Threads of the kernels, and a context in which torch's own threads are idle."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_held = threading.local()  # `count`, inside `torch_stands_aside` in this thread


def num_threads() -> int:
    """Threads of a call of the kernels: torch's number, or its number outside `torch_stands_aside`."""
    count: int | None = getattr(_held, "count", None)
    return torch.get_num_threads() if count is None else count


@contextmanager
def torch_stands_aside() -> Iterator[None]:
    """Inside, torch computes in one thread and the kernels keep their number; also a decorator.

    After each operator torch's threads spin for milliseconds on the cores that the kernels need. With few small
    operators between long calls of the kernels, torch gains less from its threads than the kernels lose.
    """
    count = num_threads()
    if count == 1 or getattr(_held, "count", None) is not None:
        yield
        return
    _held.count = count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _held.count = None
