"""Ranks: the processes that compute one decoder together, and the collectives between their devices in a step.

`ALONE` stands for a decoder in one process; its collectives return their argument. `Ranks` uses `torch.distributed`.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from llama_adapter.runtime.devices.base import Collectives
from llama_adapter.runtime.problems import is_out_of_memory

_LITTLE = 1 << 20  # bytes: a process that cannot get them has failed by itself

# The name of this collective since torch 2.13, and its name before.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class CollectiveError(RuntimeError):
    """A collective that failed, because another rank ended or did not join it within the time limit."""


@contextmanager
def collective() -> Iterator[None]:
    """Turns a RuntimeError of `torch.distributed` into a CollectiveError, except when memory runs out."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        if _memory_is_short():  # gloo's messages do not say so
            raise MemoryError(f"while the ranks communicated: {error}") from None
        raise CollectiveError(str(error)) from None


def _memory_is_short() -> bool:
    try:
        mmap.mmap(-1, _LITTLE).close()
    except OSError:
        return True
    return False


class Alone:
    """One process with the whole decoder."""

    rank = 0
    size = 1

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, which have the same shape, on every rank. May overwrite its argument."""
        return partial

    def join(self, part: Tensor, *, width: int) -> Tensor:
        """All ranks' tensors concatenated in the last dimension to `width`.

        Only the last ranks' parts may be shorter.
        """
        return part

    def from_first(self, values: Tensor) -> Tensor:
        """The first rank's tensor, on every rank. The other ranks pass a tensor of the same shape and dtype."""
        return values


class Ranks(Alone):
    """Ranks of a process group. After a collective has raised CollectiveError, none can be used any more.

    On a device with a queue, a collective returns before it is computed, as operators do. Reading its result on the
    host waits for it.

    With gloo, sums are computed here, in the order of the ranks, so that a row's numbers do not depend on the other
    rows of a batch: gloo's ring adds each part of a tensor in a different order. For two ranks this is also faster: one
    exchange instead of two, with the same number of bytes.
    """

    def __init__(self, *, rank: int, size: int, collectives: Collectives) -> None:
        """`torch.distributed` must already have a default process group of this size."""
        self.rank, self.size = rank, size
        self.num_calls = 0  # collectives started so far; another thread reads it to see that work goes on
        self._sums_in_order = collectives == "gloo"

    def sum(self, partial: Tensor) -> Tensor:
        if not self._sums_in_order:
            with collective():
                dist.all_reduce(partial)
            self.num_calls += 1
            return partial
        total, *others = self._gathered(partial)
        for part in others:
            total += part
        return total

    def join(self, part: Tensor, *, width: int) -> Tensor:
        each = -(-width // self.size)
        if part.shape[-1] < each:
            part = torch.nn.functional.pad(part, (0, each - part.shape[-1]))
        return torch.cat(self._gathered(part), dim=-1)[..., :width]

    def from_first(self, values: Tensor) -> Tensor:
        values = values.clone()  # a copy that is writable outside of inference mode and not shared
        with collective():
            dist.broadcast(values, src=0)
        self.num_calls += 1
        return values

    def _gathered(self, part: Tensor) -> tuple[Tensor, ...]:
        """All ranks' tensors of one shape, in order."""
        parts = part.new_empty((self.size * part.shape[0], *part.shape[1:]))
        with collective():
            getattr(dist, ALL_GATHER)(parts, part.contiguous())
        self.num_calls += 1
        return parts.chunk(self.size)


ALONE = Alone()
