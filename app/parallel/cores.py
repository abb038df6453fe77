"""Cores of this machine, divided among ranks that compute on them."""

import os
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
