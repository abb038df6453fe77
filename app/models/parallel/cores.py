"""Divides the cores of this machine among ranks that compute on a CPU, and among processes that start ranks."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress

import torch


def cores_of_ranks(size: int) -> list[list[int] | None]:
    """The cores of each rank: consecutive and disjoint. If there are fewer cores than ranks, ranks share cores.

    All are None on systems that cannot bind processes to cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * size
    cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    each = max(1, len(cores) // size)
    return [[cores[place % len(cores)] for place in range(rank * each, (rank + 1) * each)] for rank in range(size)]


def bind_to(cores: list[int]) -> Callable[[], None]:
    """Bind all threads of this process to `cores`, with one compute thread per core; returns a function to undo it."""
    count, before = torch.get_num_threads(), os.sched_getaffinity(0)
    _bind_threads(set(cores))
    torch.set_num_threads(len(cores))

    def undo() -> None:
        _bind_threads(before)
        torch.set_num_threads(count)

    return undo


def _bind_threads(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


class OwnCores:
    """Reserves cores: no other process that uses this class gets them until this process ends or calls `close`.

    A reserved core is a bound abstract Unix socket whose name has the core's number. The kernel lets only one process
    bind a name, and releases it however this process ends. Containers with a separate network have separate names.
    """

    def __init__(self, count: int) -> None:
        """Reserve `count` cores. If too few are free, `cores` ends with cores that other processes have reserved.

        It is shorter than `count` only if the machine has fewer cores.
        """
        self._names: list[socket.socket] = []
        usable = sorted(os.sched_getaffinity(0))
        own = [core for core in usable if len(self._names) < count and self._take(core)]
        self.cores = (own + [core for core in usable if core not in own])[:count]

    def _take(self, core: int) -> bool:
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0llama-adapter/core/{core}")
        except OSError:  # another process has it
            name.close()
            return False
        self._names.append(name)
        return True

    def close(self) -> None:
        """Release the cores."""
        for name in self._names:
            name.close()


def compute_with(threads: int, *, ranks: int) -> OwnCores | None:
    """Let this process and its ranks compute with `threads` threads.

    With several ranks, it reserves cores and binds this process to them. The caller must keep the returned object,
    which holds the reservation.
    """
    if ranks == 1 or not hasattr(os, "sched_setaffinity"):
        torch.set_num_threads(threads)
        return None
    own = OwnCores(threads)
    bind_to(own.cores)
    return own
