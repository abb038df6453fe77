"""The ranks of a training run, which are processes started by `torchrun`, and the model on them.

The model is whole on each rank (DDP), or divided among the ranks (FSDP). Both come from torch: DistributedDataParallel
(Li et al., 2020) and `fully_shard`, called FSDP2 (Zhao et al., 2023). If the loss is multiplied by `loss_factor`, the
gradients are the sum over all ranks.
"""

import gc
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel

from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.models.parallel.errors import RankError
from llama_adapter.app.models.parallel.launch import Launched, launched
from llama_adapter.app.models.parallel.rendezvous import device_of, environment_store
from llama_adapter.app.models.spec import AUTO
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
            # Not `rendezvous.join`, which switches off the watchdog that ends a rank of a queued device in time.
            dist.init_process_group(
                backend.capabilities.collectives,
                store=PrefixStore("training", store),
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=timeout_s),
            )

    def sum(self, values: Tensor) -> Tensor:
        moved = values if self._device.type == "cpu" else values.float().to(self._device)  # HCCL adds no float64
        with self.failing():
            dist.all_reduce(moved)
        return moved.to(values)

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
    if place is None or ":" in wanted:
        return wanted
    return device_of(place, str(open_backend(wanted).device) if wanted == AUTO else wanted)


def num_ranks_here() -> int:
    """The number of ranks on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched() is not None else 1


def meet(*, backend: Backend, timeout_s: float) -> OneRank:
    """The ranks of this run: those started by `torchrun`, or this process alone. Raises RankError."""
    place = launched()
    return OneRank() if place is None else TrainingRanks(place, backend=backend, timeout_s=timeout_s)


Kind = Literal["one", "ddp", "fsdp"]
# The parameter's name since torch 2.13, and before.
_SYNC_BUFFERS: Final = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
_NO_BUFFERS: Final[dict[str, Any]] = {_SYNC_BUFFERS: False}
_BARE: Final = "bare"  # a second forward method of linear layers, for the adapter's keys and values


class Distributed:
    """A model that all ranks train together."""

    def __init__(self, model: TrainableModel, *, kind: Kind, ranks: OneRank) -> None:
        """With FSDP, `model` afterwards holds only this rank's part of each parameter; its results stay the same."""
        self.model, self.kind, self._ranks = model, kind, ranks
        self.forward: Callable[..., Any] = model
        self.loss_factor = 1.0 if kind == "one" else float(ranks.size)  # torch averages over ranks
        self._ddp: DistributedDataParallel | None = None
        if kind == "ddp":
            self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False, **_NO_BUFFERS)
            self.forward = self._ddp
        elif kind == "fsdp":
            # The warning is about outputs that are changed in place, which this model never does.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            _shard(model, num_ranks=ranks.size)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Context for the forward and backward pass of one part of a step. The last part sums gradients over ranks."""
        if self._ddp is not None and not is_last:
            return self._ddp.no_sync()
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters or moments as whole tensors. All ranks must call it together."""
        return {name: _full(tensor.detach()) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the trained parameters from whole tensors."""
        for name, parameter in self.model.trained().items():
            parameter.copy_(like(tensors[name], parameter))


def like(whole: Tensor, own: Tensor) -> Tensor:
    """A whole tensor in the dtype of `own`, on its device, and divided among ranks in the same way."""
    moved = whole.to(device=own.device, dtype=own.dtype)
    if not _is_divided(own):
        return moved
    from torch.distributed.tensor import distribute_tensor

    divided: Tensor = distribute_tensor(moved, own.device_mesh, own.placements)  # type: ignore[attr-defined]
    return divided


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together. If they are divided, it includes the parts of all ranks."""
    norms = [_full(torch.linalg.vector_norm(one, dtype=torch.float32)) for one in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _is_divided(tensor) else tensor  # type: ignore[attr-defined]


def _shard(model: nn.Module, *, num_ranks: int) -> None:
    """Divide parameters among ranks. Large ones are gathered for each pass of their module, and freed after it."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    assert isinstance(model, TrainableModel)
    mesh = init_device_mesh(model.device.type, (num_ranks,))
    for layer in model.decoder.decoder.layers:
        attention: Any = layer.attention
        for part in (attention.qkv, attention.out, layer.feed_forward):  # the modules that are called
            fully_shard(part, mesh=mesh)
        register_fsdp_forward_method(attention.qkv, _BARE)
    fully_shard(model, mesh=mesh)
