"""Linear layers for the CPU with weights packed once for oneDNN.

`torch.nn.functional.linear` repacks the weight at every call, or uses a library without the machine's widest
instructions. torch's own compiler uses the same packed weights when it freezes a model.
"""

import functools

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """An `nn.Linear` for inference, in the dtype of its weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # An opaque tensor: it can be neither moved nor saved, so it is no parameter or buffer.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> int:
    """Replace the linear layers inside `module` whose dtype oneDNN supports; returns how many.

    The plain weights are released.
    """
    num_packed = 0
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear):
            num_packed += pack_linears(child)
        elif can_pack(child.weight.dtype):
            setattr(module, name, PackedLinear(child))
            num_packed += 1
    return num_packed


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
