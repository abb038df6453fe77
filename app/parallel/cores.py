"""Cores of this machine, divided among ranks that compute on them, and among processes that start ranks."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress

import torch


def cores_of_ranks(size: int) -> list[list[int] | None]:
    """Cores of each rank, in order and disjoint; one each, shared, where there are fewer than ranks.

    None on systems that bind no processes.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [None] * size
    cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    each = max(1, len(cores) // size)
    return [[cores[place % len(cores)] for place in range(rank * each, (rank + 1) * each)] for rank in range(size)]


def bind_to(cores: list[int]) -> Callable[[], None]:
    """Let all threads of this process run on `cores` only, as many as there are; returns what undoes it."""
    count, before = torch.get_num_threads(), os.sched_getaffinity(0)
    _bind_threads(set(cores))
    torch.set_num_threads(len(cores))

    def undo() -> None:
        _bind_threads(before)
        torch.set_num_threads(count)

    return undo


def _bind_threads(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


class OwnCores:
    """Cores that no other process has which asks in this way, until this one ends or closes it.

    Each is the name of a socket: the kernel gives a name to one process only, and takes it back however that one ends.
    Containers that have a network of their own have names of their own.
    """

    def __init__(self, count: int) -> None:
        """Take `count` cores. `cores` has as many if the machine does; those that others have come last."""
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
        """Let others have them."""
        for name in self._names:
            name.close()


def compute_with(threads: int, *, ranks: int) -> OwnCores | None:
    """Let this process and its ranks compute with so many threads; several ranks on cores of their own, if kept."""
    if ranks == 1 or not hasattr(os, "sched_setaffinity"):
        torch.set_num_threads(threads)
        return None
    own = OwnCores(threads)
    bind_to(own.cores)
    return own
