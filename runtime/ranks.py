"""Ranks: the processes that compute one decoder together, and what passes between their devices in a step.

`ALONE` is a decoder in one process; its collectives are identities. `Ranks` are those of `torch.distributed`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from llama_adapter.runtime.devices.base import Collectives
from llama_adapter.runtime.problems import is_out_of_memory

# Its name since torch 2.13, and before.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class CollectiveError(RuntimeError):
    """A collective that failed: another rank ended, or did not come within the time limit."""


@contextmanager
def collective() -> Iterator[None]:
    """Raises CollectiveError for what `torch.distributed` raises inside: RuntimeError of many texts."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise CollectiveError(str(error)) from None


class Alone:
    """One process with the whole decoder."""

    rank = 0
    size = 1

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape, on each of them. May overwrite its argument."""
        return partial

    def join(self, part: Tensor, *, width: int) -> Tensor:
        """All ranks' last dimensions side by side, `width` in all: equal ones, but for the last ranks'."""
        return part

    def from_first(self, values: Tensor) -> Tensor:
        """The first rank's tensor, on each of them; others give one of the same shape and type."""
        return values


class Ranks(Alone):
    """Ranks of a process group. Collectives raise CollectiveError; after that none can be used any more.

    Where the device has a queue they return before they are computed, as its operators do: what the host reads waits.

    Sums are taken in the order of the ranks where the device's library leaves the order to us, so that a row's numbers
    do not depend on the other rows of a batch: gloo's ring adds each part of a tensor in another order. For two ranks
    it is also faster: one exchange in place of two, with the same bytes.
    """

    def __init__(self, *, rank: int, size: int, collectives: Collectives) -> None:
        """`torch.distributed` has a default process group of this size."""
        self.rank, self.size = rank, size
        self.num_calls = 0  # collectives that were handed over: another thread sees by it that work goes on
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
        values = values.clone()  # writable outside of inference mode, and nobody else's
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
