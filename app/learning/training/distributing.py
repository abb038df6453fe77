"""The model on several ranks: whole on each rank (DDP), or divided among the ranks (FSDP).

Both come from torch: DistributedDataParallel (Li et al., 2020) and `fully_shard`, called FSDP2 (Zhao et al., 2023). If
the loss is multiplied by `loss_factor`, the gradients are the sum over all ranks.
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

from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.ranks import OneRank

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
