"""Linear layers with 8-bit and 4-bit weights on NVIDIA GPUs: Triton kernels, and torch's product of 8-bit integers.

This module does not import triton, which older GPUs do without.
"""

# R rows, K inputs, N outputs

import importlib.util
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.runtime.schemes import OperatorChoice, Precision, int4, int8
from llama_adapter.runtime.schemes.layers import WEIGHT, StoredInt8
from llama_adapter.runtime.user_cache import working_cache

_LEAST_ROWS = 32  # `_int_mm` needs at least 17


def find_triton_fault(device: torch.device, capability: tuple[int, int]) -> str:
    """Why the Triton kernels cannot run on a GPU; empty if they can.

    One of them is run, because Triton needs a C compiler and Python's headers. Triton loads libraries from its cache,
    so that is in the user's cache folder, which only this user can write.
    """
    if torch.version.hip is not None:
        return "they are written for NVIDIA GPUs"
    if capability < (8, 0):
        return f"compute capability {'.'.join(map(str, capability))} is below 8.0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        os.environ.setdefault("TRITON_CACHE_DIR", str(working_cache() / "triton"))
        from llama_adapter.runtime.devices.triton_calls import swiglu

        swiglu(torch.zeros(1, 2, dtype=torch.float16, device=device))
    except Exception as error:  # compilers raise errors of any class
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def has_integer_product() -> bool:
    """Whether this build of torch has the product of 8-bit integers that `RoundedLinear` needs."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_int_mm", "CUDA"))


def build_linear(linear: nn.Linear, precision: Precision, *, wanted: OperatorChoice) -> nn.Module | None:
    """The layer that computes with these stored weights; None if no operator supports its sizes."""
    num_inputs, num_outputs = linear.in_features, linear.out_features
    if wanted == "w8a8" and precision == "int8":
        return RoundedLinear(linear) if num_inputs % 8 == num_outputs % 8 == 0 else None
    from llama_adapter.runtime.devices.triton_calls import PackedLinear, pack4

    bias = None if linear.bias is None else linear.bias.detach()
    if precision == "int8":
        scale = getattr(linear, WEIGHT + int8.SCALE).float()
        return PackedLinear(8, linear.weight.detach().contiguous(), scale, bias)
    if num_inputs % (2 * int4.GROUP):
        return None
    return PackedLinear(4, *pack4(linear.weight.detach(), getattr(linear, WEIGHT + int4.SCALE)), bias)


class RoundedLinear(StoredInt8):
    """8-bit weights, and inputs rounded to 8 bits with a scale for each row, or one if calibrated. Sums are exact.

    The limits of its operator follow torch's aten/src/ATen/native/cuda/Blas.cpp.
    """

    def forward(self, x: Tensor) -> Tensor:
        values_RK, steps_R1 = int8.quantise_rows(x.reshape(-1, x.shape[-1]), self.input_scale)
        num_rows = len(values_RK)
        padded = F.pad(values_RK, (0, 0, 0, max(_LEAST_ROWS - num_rows, 0)))
        out_RN = torch._int_mm(padded, self.weight.T)[:num_rows].float() * steps_R1 * self.scale
        out_RN = out_RN if self.bias is None else out_RN + self.bias
        return out_RN.to(x.dtype).view(*x.shape[:-1], len(self.weight))
