"""How many threads the kernels take, and how torch's own stand aside while they are at work."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_held = threading.local()  # `count`, while torch stands aside in this thread


def num_threads() -> int:
    """Of a call of the kernels: as many as torch has, or had before it stood aside."""
    count: int | None = getattr(_held, "count", None)
    return torch.get_num_threads() if count is None else count


@contextmanager
def torch_stands_aside() -> Iterator[None]:
    """Within, torch computes in one thread, and the kernels in as many as ever; also a decorator.

    After each operator torch's threads go on looking for work for milliseconds, on the cores that the kernels want.
    With few small operators between the kernels' long calls, torch gains less by its threads than the kernels lose.
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
