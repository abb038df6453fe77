"""The ranks of a training run, which are processes started by `torchrun`: their process group and its collectives."""

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.parallel.launch import Launched, launched
from llama_adapter.app.models.parallel.rendezvous import environment_store
from llama_adapter.runtime.devices import Backend, open_backend
from llama_adapter.runtime.problems import is_out_of_memory
from llama_adapter.runtime.text import one_line

# Found in messages of torch.distributed's libraries about a rank that has ended.
_LOST: Final = re.compile(r"gloo|nccl|hccl|connection|peer|timed? ?out|process group", re.IGNORECASE)
_MOST_REASON: Final = 200  # characters


class OneRank:
    """A run in one process: `sum` returns its argument."""

    rank, size = 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and messages."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the tensors of all ranks, which have one shape. Every rank gets it. May overwrite `values`."""
        return values

    def wait(self) -> None:
        """Return when all ranks have called this."""

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Inside this context, errors of torch about another rank that has ended are raised as RankError."""
        yield

    def close(self) -> None:
        """Leave the process group. May be called again."""


class TrainingRanks(OneRank):
    """Ranks of a process group. Raises RankError if another rank has ended, or does not respond in time."""

    def __init__(self, place: Launched, *, backend: Backend, timeout_s: float) -> None:
        """Join the process group."""
        self.rank, self.size, self._device, self._timeout_s = place.rank, place.size, backend.device, timeout_s
        store = environment_store(place, timeout_s=timeout_s)
        if place.is_local:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if backend.device.type != "cpu":
            torch.get_device_module(backend.device).set_device(backend.device)
        with self.failing():
            dist.init_process_group(
                backend.capabilities.collectives,
                store=PrefixStore("training", store),
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=timeout_s),
            )

    def sum(self, values: Tensor) -> Tensor:
        moved = values.to(self._device)
        with self.failing():
            dist.all_reduce(moved)
        return moved.to(values.device)

    def wait(self) -> None:
        self.sum(torch.zeros(1))

    def close(self) -> None:
        if dist.is_initialized():
            gc.collect()  # frees cycles that hold groups: a gloo group destroyed at interpreter exit would abort it
            dist.destroy_process_group()

    @contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch has several classes for such errors, and some have no class
            if is_out_of_memory(error) or not _LOST.search(str(error)):
                raise
            raise RankError(
                f"Rank {self.rank} of {self.size} lost the others: one of them has ended, or did not come within "
                f"{self._timeout_s:g} s ({one_line(str(error))[:_MOST_REASON]})",
                hint="the output of the other ranks says why; --resume goes on from the last checkpoint",
            ) from None


def device_name(wanted: str) -> str:
    """The device of this rank. With several ranks on a machine, each rank has a different device."""
    place = launched()
    if place is None or place.size == 1 or wanted == "cpu" or ":" in wanted:
        return wanted
    kind = open_backend(wanted).device.type
    return kind if kind == "cpu" else f"{kind}:{place.local_rank}"


def num_ranks_here() -> int:
    """The number of ranks on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched() is not None else 1


def meet(*, backend: Backend, timeout_s: float) -> OneRank:
    """The ranks of this run: those started by `torchrun`, or this process alone. Raises RankError."""
    place = launched()
    if place is None or place.size == 1:
        return OneRank()
    return TrainingRanks(place, backend=backend, timeout_s=timeout_s)
