"""The CPU as a device, and its linear layers."""

import ctypes
import functools
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from llama_adapter.runtime.devices.base import Backend, Capabilities, Program, require_mode
from llama_adapter.runtime.devices.cpu_linear import can_take, install_kernels, takes_types
from llama_adapter.runtime.devices.tracing import torch_trace
from llama_adapter.runtime.host_memory import free_host_bytes
from llama_adapter.runtime.kernels.instruction_sets import large_dtype
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.kernels.library import Library, find_library
from llama_adapter.runtime.operators import ATEN, DecoderSizes, Operators
from llama_adapter.runtime.schemes import OperatorChoice, Precision
from llama_adapter.runtime.schemes.layers import dequantise_linears, float_type, replace_layers
from llama_adapter.runtime.schemes.scheme import find_scheme

_MAPS = Path("/proc/self/maps")


class CpuBackend(Backend):
    """The cores of the host. Every operation is synchronous."""

    name = "cpu"
    device = torch.device("cpu")
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16", "float16"),
        large_dtype=large_dtype(),
        copies_weights=True,
        most_rows=16,  # on two cores, 1, 5 and 16 rows answered 165, 199 and 247 pictures/s
    )

    def synchronise(self) -> None:
        return

    def profiler(self, folder: Path) -> AbstractContextManager[object]:
        return torch_trace(folder, (ProfilerActivity.CPU,))

    def free_bytes(self) -> int | None:
        return free_host_bytes()

    def empty_caches(self) -> None:
        """Return free memory that the C library keeps; after a load, this is a tenth of the weights' size."""
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # only glibc has it
            trim(0)

    def choose_operators(
        self, sizes: DecoderSizes, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        return ATEN

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        self.kernels = _kernels(wanted)
        if self.kernels is not None:
            dequantise_linears(module, keep=partial(can_take, activations=float_type(module)))
            install_kernels(module, library=self.kernels, release=self.empty_caches)
        dequantise_linears(module)
        pack_linears(module)

    def computes_in(self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        stored = find_scheme(precision).weight_dtype
        if stored is None:
            return True
        kernels = _kernels(wanted)
        return kernels is not None and takes_types(stored, activations)

    def packed_layout(
        self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto"
    ) -> PackedLayout | None:
        kernels = _kernels(wanted)
        weights = find_scheme(precision).weight_dtype or activations
        return kernels.layout if kernels is not None and takes_types(weights, activations) else None

    def compile(self, program: Program, *, mode: str) -> Program:
        require_mode(mode, backend=self)
        return program


def _kernels(wanted: OperatorChoice) -> Library | None:
    return find_library().library if wanted != "aten" else None


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference, in the dtype of its weight, which is packed for oneDNN once.

    `torch.nn.functional.linear` packs the weight at every call, or uses a library without the widest instructions.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # An opaque tensor, which can be neither moved nor saved. Therefore it is not a parameter or buffer.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers inside `module` whose dtype oneDNN supports. Their plain weights are released."""

    def build(layer: nn.Module) -> nn.Module | None:
        return PackedLinear(layer) if isinstance(layer, nn.Linear) and can_pack(layer.weight.dtype) else None

    replace_layers(module, build)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of oneDNN and this processor compute with packed weights of `dtype`."""
    if not torch._C._has_mkldnn or dtype not in _CHECKS:
        return False
    try:
        check = _CHECKS[dtype]
        if check is not None and not getattr(torch.ops.mkldnn, check)():
            return False
        PackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):  # this build of torch lacks the operator
        return False
    return True


_CHECKS = {torch.float32: None, torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def is_file_backed(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor on the host: whether its memory is a mapped file, which the kernel can drop and read again.

    True for all tensors if /proc/self/maps cannot be read.
    """
    try:
        lines = [line.split(maxsplit=5) for line in _MAPS.read_text().splitlines()]
    except OSError:
        return [True] * len(tensors)
    starts, ends = ([int(line[0].split("-")[at], 16) for line in lines] for at in (0, 1))

    def is_mapped(address: int) -> bool:
        index = bisect_right(starts, address) - 1
        return index >= 0 and address < ends[index] and lines[index][4] != "0"  # the file's inode

    return [is_mapped(tensor.data_ptr()) for tensor in tensors]
