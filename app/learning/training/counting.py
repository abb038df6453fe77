"""Counts the memory and the operations of a computation on torch's meta device, which computes shapes only."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry


class MetaCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made inside the context, as long as they live.

    `live_bytes` is the present sum and `peak_bytes` its maximum. `flops` are the floating-point operations of matrix
    products, and `frozen_flops` those of products with `frozen` weights. `traffic` is the number of bytes that all
    other operations read and write. If an operation mixes CPU tensors, such as indices, with meta tensors, the CPU
    tensors are treated as meta tensors.
    """

    def __init__(self, frozen: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = self.flops = self.frozen_flops = self.traffic = 0
        self._frozen = {id(one.untyped_storage()): one for one in frozen}
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(args), kwargs or {}
        given = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        if any(one.is_meta for one in given) and not all(one.is_meta for one in given):
            args, kwargs = tree_map_only(Tensor, lambda one: one.to("meta"), (args, kwargs))
        for one in given:
            self._count(one, num_bytes=0)  # no effect on known tensors; the others were made outside
        packet = func._overloadpacket
        out = func(*args, **kwargs)
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            self.flops += flops
            if any(id(one.untyped_storage()) in self._frozen for one in given):
                self.frozen_flops += flops
        elif not func.is_view:
            self.traffic += sum(
                one.numel() * one.itemsize for one in tree_iter((args, kwargs, out)) if isinstance(one, Tensor)
            )
        for one in tree_iter(out):
            if isinstance(one, Tensor):
                self._count(one, num_bytes=one.untyped_storage().nbytes())
        return out

    def _count(self, tensor: Tensor, *, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen and self._seen[key]() is storage:
            return
        self._seen[key] = weakref.ref(storage, self._forgetting(key, num_bytes))
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forgetting(self, key: int, num_bytes: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            self.live_bytes -= num_bytes
            if self._seen.get(key) is reference:
                del self._seen[key]

        return forget
