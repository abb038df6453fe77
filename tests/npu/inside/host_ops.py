"""Runs every operator of the fake NPU on the host. The device's memory is host memory, so only kernels are missing.

Views, allocations and the routing of attention are torch_npu's own. Mixing devices is refused.
"""

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llama_adapter.runtime.devices.npu_operators import family_of
from tests.npu.inside import linear_references
from tests.npu.inside.references import REFERENCES

DEVICE_KEY = torch._C.DispatchKey.PrivateUse1
MAY_MIX = ("aten::_to_copy", "aten::copy_")
# These operators use only shapes and addresses, and torch_npu implements them itself.
NATIVE = (
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::set_",
    "aten::resize_",
    "aten::lift_fresh",
    "aten::detach_",
    "npu::get_npu_format",
)
# In these operators torch_npu decides which operator to call; the mode sees that operator.
ROUTED = ("aten::scaled_dot_product_attention",)
COLLECTIVES = "c10d::"  # torch_npu passes these to HCCL itself
MAY_COPY = ("aten::contiguous",)  # it looks like a view


class MixedDevicesError(AssertionError):
    """An operator was given tensors of both the host and the device."""


@functools.cache
def _has_kernel(func: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments. Like pytree's leaves, which take most of an operator's time."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Arguments or results of an operator with changed leaves. Like `pytree.tree_map`, for the plain containers."""
    if type(value) in (list, tuple):
        return type(value)(_mapped(change, one) for one in value)
    if type(value) is dict:
        return {name: _mapped(change, one) for name, one in value.items()}
    return pytree.tree_map(change, value) if isinstance(value, tuple) else change(value)


class HostOps(TorchDispatchMode):
    """`calls` counts the operators that would have been kernels; `sequence` has their names in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence: list[str] = []
        linear_references.chip = family_of(torch.npu.get_soc_version()).name

    @property
    def calls(self) -> Counter[str]:
        return Counter(self.sequence)

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        wanted_device = kwargs.get("device")
        on_device = any(tensor.device.type == "npu" for tensor in tensors)
        if not on_device and (wanted_device is None or torch.device(wanted_device).type != "npu"):
            return func(*args, **kwargs)
        if on_device and name not in MAY_MIX:
            _refuse_mixing(name, tensors)
        if _has_kernel(func, "CompositeImplicitAutograd"):
            if name in ROUTED:
                with self:
                    return func._op_dk(DEVICE_KEY, *args, **kwargs)
            if not _has_kernel(func, DEVICE_KEY.name):
                with self:
                    return func.decompose(*args, **kwargs)
        if (func.is_view and name not in MAY_COPY) or name in NATIVE:
            return func(*args, **kwargs)
        if name.startswith(COLLECTIVES):
            self.sequence.append(name)
            return func(*args, **kwargs)
        self.sequence.append(name)
        return self._compute(func, name, args, kwargs)

    def _compute(self, func: OpOverload, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        target = torch.device(kwargs.get("device") or "npu")
        originals: dict[int, Tensor] = {}

        def to_host(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.device.type == "npu":
                seen = host_view(leaf)
                originals[id(seen)] = leaf
                return seen
            return leaf

        host_args, host_kwargs = _mapped(to_host, (args, kwargs))
        if "device" in host_kwargs:
            host_kwargs["device"] = torch.device("cpu")
        short = name.partition("::")[2]
        assert short in REFERENCES or not name.startswith("npu::"), f"{name} has no reference on the host"
        compute = REFERENCES.get(short, func)
        result = self._run(func, lambda: compute(*host_args, **host_kwargs), host_args, host_kwargs)

        def to_device(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or target.type != "npu":
                return leaf
            return originals[id(leaf)] if id(leaf) in originals else place(leaf)

        return self._placed(_mapped(to_device, result))

    def _run(self, func: OpOverload, compute: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """The operator's result, computed on the host."""
        return compute()

    def _placed(self, result: Any) -> Any:
        """Called with the result on the device."""
        return result


def _refuse_mixing(name: str, tensors: list[Tensor]) -> None:
    # Numbers are passed as tensors without dimensions.
    hosts = [tensor for tensor in tensors if tensor.device.type != "npu" and tensor.dim() > 0]
    if hosts:
        raise MixedDevicesError(f"{name} was given tensors of the host and of the device")


def host_view(tensor: Tensor) -> Tensor:
    """The device memory of `tensor` as a host tensor; both share the same memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return view


def place(tensor: Tensor) -> Tensor:
    """A copy of the tensor on the device, with the same strides."""
    tensor = tensor.contiguous() if 0 in tensor.stride() else tensor
    placed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
    if tensor.numel():
        host_view(placed).copy_(tensor)
    return placed
