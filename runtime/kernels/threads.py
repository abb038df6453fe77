"""The number of threads of the kernels, and a context in which torch's own threads are idle. Imports no torch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llama_adapter.runtime.host_cpus import default_threads

_held = threading.local()  # has `count` while this thread is inside `torch_stands_aside`


def num_threads() -> int:
    """Number of threads for a call of the kernels.

    It is torch's number; inside `torch_stands_aside`, torch's number outside of it.
    """
    count: int | None = getattr(_held, "count", None)
    return default_threads() if count is None else count


@contextmanager
def torch_stands_aside() -> Iterator[None]:
    """Inside this context, torch uses one thread and the kernels keep their number. It is also a decorator.

    After each operator, torch's threads spin for milliseconds on the cores that the kernels need. If only a few small
    operators are between long calls of the kernels, torch gains less from its threads than the kernels lose.
    """
    count = num_threads()
    if count == 1 or getattr(_held, "count", None) is not None:
        yield
        return
    import torch

    _held.count = count
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
        _held.count = None
