"""The model of several ranks: whole on each of them (DDP), or divided among them (FSDP).

Both are torch's: DistributedDataParallel (Li et al., 2020) and `fully_shard`, the second FSDP (Zhao et al., 2023). A
loss that is multiplied by `loss_factor` gives the sum of the gradients of all ranks.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from llama_adapter.app.training.model import TrainableModel
from llama_adapter.app.training.ranks import OneRank

Kind = Literal["one", "ddp", "fsdp"]
# Its name since torch 2.13, and before.
_SYNC_BUFFERS: Final = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
_NO_BUFFERS: Final[dict[str, Any]] = {_SYNC_BUFFERS: False}
_BARE: Final = "bare"  # a second forward method of linear layers, for the adapter's keys and values


class Distributed:
    """A model as all ranks compute it."""

    def __init__(self, model: TrainableModel, *, kind: Kind, ranks: OneRank) -> None:
        """With FSDP, `model` keeps its part of each parameter alone, and its forward method computes as before."""
        self.model, self.kind, self._ranks = model, kind, ranks
        self.forward: Callable[..., Any] = model
        self.loss_factor = 1.0 if kind == "one" else float(ranks.size)  # torch averages over ranks
        self._ddp: DistributedDataParallel | None = None
        if kind == "ddp":
            self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False, **_NO_BUFFERS)
            self.forward = self._ddp
        elif kind == "fsdp":
            # Nothing here changes an output of a module in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            _shard(model, num_ranks=ranks.size)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Around the forward and backward pass of a part of a step; gradients meet in the last one."""
        if self._ddp is not None and not is_last:
            return self._ddp.no_sync()
        if self.kind == "fsdp":
            self.model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters or moments as whole tensors; all ranks have to call it."""
        return {name: _full(tensor.detach()) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set trained parameters to whole tensors."""
        for name, parameter in self.model.trained().items():
            parameter.copy_(like(tensors[name], parameter))


def like(whole: Tensor, own: Tensor) -> Tensor:
    """A whole tensor as `own` is: on its device, and divided as it is."""
    moved = whole.to(device=own.device, dtype=own.dtype)
    if not _is_divided(own):
        return moved
    from torch.distributed.tensor import distribute_tensor

    divided: Tensor = distribute_tensor(moved, own.device_mesh, own.placements)  # type: ignore[attr-defined]
    return divided


def norm_of(gradients: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, of all ranks if they are divided."""
    norms = [_full(torch.linalg.vector_norm(one, dtype=torch.float32)) for one in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _is_divided(tensor) else tensor  # type: ignore[attr-defined]


def _shard(model: nn.Module, *, num_ranks: int) -> None:
    """Divide parameters: large ones come together for each pass of their module, and leave again."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    assert isinstance(model, TrainableModel)
    mesh = init_device_mesh(model.device.type, (num_ranks,))
    for layer in model.decoder.decoder.layers:
        attention: Any = layer.attention
        for part in (attention.qkv, attention.out, layer.feed_forward):  # the modules that are called
            fully_shard(part, mesh=mesh)
        register_fsdp_forward_method(attention.qkv, _BARE)
    fully_shard(model, mesh=mesh)
