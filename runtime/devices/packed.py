"""Linear layers for the CPU, their weights laid out once as oneDNN computes with them. A pass over a module.

`torch.nn.functional.linear` lays the weight out anew, or goes through a library that does not use the machine's widest
instructions, at every call. oneDNN's packed weights are what torch's own compiler uses when it freezes a model.
"""

import functools

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """As the `nn.Linear` it is made of, for inference; in the number type that its weight had."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Opaque tensors: as a parameter or buffer they could be neither moved nor saved.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> int:
    """Replace the linear layers inside `module` by packed ones, where oneDNN computes in their type; returns how many.

    The plain weights are let go of. Where this machine's oneDNN lacks a type, layers stay as they are.
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
    """Whether packed weights of this type can be computed with here: oneDNN and the processor decide."""
    if not torch._C._has_mkldnn or dtype not in _CHECKS:
        return False
    try:
        check = _CHECKS[dtype]
        if check is not None and not getattr(torch.ops.mkldnn, check)():
            return False
        PackedLinear(nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 16, dtype=dtype))
    except (AttributeError, RuntimeError):  # an operator that this torch does not have, or was built without
        return False
    return True


_CHECKS = {torch.float32: None, torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
