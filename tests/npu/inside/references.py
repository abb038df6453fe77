"""References on the CPU for torch_npu's operators, and the conditions on their arguments (op-plugin's documentation).

Written from the documentation, independently of the tables that choose operators.
"""

# B rows, S query tokens, P key tokens, N heads, D head size

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.inside import linear_references

HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
OLD_CHIPS, NEW_CHIPS = ("310P",), ("A2", "A3")


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Works in place, like the kernel, although the schema does not declare it."""
    for x in (query, key):
        first, second = x.float().chunk(2, -1)
        x.copy_(x.float() * cos.float() + torch.cat([-second, first], -1) * sin.float())
    return query, key


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, *, head_num: int, masked_out: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """In layout BNSD. Returns the output, and each row's largest score and sum, repeated 8 times like the kernel's."""
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if masked_out is not None:
        scores = scores.masked_fill(masked_out.bool(), -1e30)
    largest = scores.amax(-1, keepdim=True)
    exponentials = (scores - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    out = ((exponentials / total) @ value.float()).to(query.dtype)
    return out, largest.expand(*largest.shape[:-1], 8).clone(), total.expand(*total.shape[:-1], 8).clone()


def npu_fusion_attention_v3(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    query, key, value, head_num = args[:4]
    masked_out = kwargs.get("atten_mask", args[7] if len(args) > 7 else None)
    scale = kwargs.get("scale", args[8] if len(args) > 8 else 1.0)
    out, largest, total = fusion_attention(query, key, value, head_num=head_num, masked_out=masked_out, scale=scale)
    return out, largest, total, query.new_empty(0), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def scatter_update_(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    for row, index in enumerate(indices.tolist()):
        data[row].narrow(axis if axis < 0 else axis - 1, index, updates.shape[axis]).copy_(updates[row])
    return data


def scatter_update(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """The functional form that torch.compile makes of `scatter_update_`."""
    return scatter_update_(data.clone(), indices, updates, axis)


def npu_format_cast(x: Tensor, acl_format: int) -> Tensor:
    """The layout of device memory does not change the values."""
    return x.clone()


REFERENCES: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": npu_rms_norm,
    "npu_apply_rotary_pos_emb": npu_apply_rotary_pos_emb,
    "npu_swiglu": npu_swiglu,
    "npu_fusion_attention_v3": npu_fusion_attention_v3,
    "scatter_update_": scatter_update_,
    "scatter_update": scatter_update,
    "npu_format_cast": npu_format_cast,
    **linear_references.REFERENCES,
}


def _takes(family: str, tensors: list[Tensor], dtypes: dict[str, tuple[torch.dtype, ...]]) -> None:
    assert family in dtypes, f"not documented for {family}"
    for tensor in tensors:
        assert tensor.dtype in dtypes[family], f"{tensor.dtype} on {family}"


def check_rms_norm(family: str, x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> None:
    _takes(family, [x, gamma], {"310P": (HALF, SINGLE), "A2": (HALF, SINGLE, BRAIN), "A3": (HALF, SINGLE, BRAIN)})
    assert family != "310P" or x.dtype == gamma.dtype
    assert gamma.shape == x.shape[-1:]
    assert family != "310P" or x.shape[-1] * x.itemsize >= 32


def check_rotary(
    family: str, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> None:
    every = (HALF, SINGLE, BRAIN)
    _takes(family, [query], {"310P": (HALF, SINGLE), "A2": every, "A3": every, "950": every})
    assert {query.dtype} == {x.dtype for x in (key, cos, sin)}
    assert (layout, rotary_mode) == ("BSND", "half")
    batch, tokens, _, size = query.shape
    assert size in (64, 128), f"head size {size}"
    assert key.shape[:2] == (batch, tokens)
    assert key.shape[3] == size
    assert cos.shape == sin.shape == (batch, tokens, 1, size), f"{tuple(cos.shape)} for {tuple(query.shape)}"
    assert min(x.numel() for x in (query, key, cos, sin)) > 0
    assert all(x.is_contiguous() for x in (query, key, cos, sin)), "written in place"


def check_swiglu(family: str, x: Tensor, dim: int = -1) -> None:
    _takes(family, [x], {"310P": (HALF,), "A2": (HALF, SINGLE, BRAIN), "A3": (HALF, SINGLE, BRAIN)})
    assert x.is_contiguous()
    assert x.shape[dim] % 2 == 0
    assert family != "310P" or x.shape[dim] % 32 == 0


def check_fusion_attention(family: str, *args: Any, **kwargs: Any) -> None:
    query, key, value, head_num, layout = args[:5]
    _takes(family, [query, key, value], {"A2": (HALF, SINGLE, BRAIN), "A3": (HALF, SINGLE, BRAIN)})
    assert layout == "BNSD", layout
    assert head_num == query.shape[1]
    assert key.shape == value.shape
    assert query.shape[-1] <= 512
    mask = kwargs.get("atten_mask", args[7] if len(args) > 7 else None)
    if mask is not None:
        batch, heads, tokens = query.shape[:3]
        assert mask.dtype in (torch.bool, torch.uint8)
        shapes = [(a, b, tokens, key.shape[2]) for a in (1, batch) for b in (1, heads)]
        assert tuple(mask.shape) in [*shapes, (tokens, key.shape[2])], tuple(mask.shape)


def check_scatter(family: str, data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> None:
    every = (HALF, SINGLE, BRAIN)
    _takes(family, [data, updates], {"910": (HALF, SINGLE), "A2": every, "A3": every, "950": every})
    assert indices.dtype in (torch.int32, torch.int64)
    assert indices.dim() in (1, 2)
    assert -data.dim() < axis < data.dim()
    assert axis != 0
    assert 2 <= data.dim() == updates.dim() <= 8
    assert len(updates) == len(indices) <= len(data)
    rest = [dim for dim in range(1, data.dim()) if dim != axis % data.dim()]
    assert [data.shape[dim] for dim in rest] == [updates.shape[dim] for dim in rest]
    assert min(data.numel(), updates.numel()) > 0


def check_format_cast(family: str, x: Tensor, acl_format: int) -> None:
    assert acl_format in (2, 29)
    assert x.dim() == 2, "a weight"


CHECKS: dict[str, Callable[..., None]] = {
    "npu_rms_norm": check_rms_norm,
    "npu_apply_rotary_pos_emb": check_rotary,
    "npu_swiglu": check_swiglu,
    "npu_fusion_attention_v3": check_fusion_attention,
    "scatter_update_": check_scatter,
    "scatter_update": check_scatter,
    "npu_format_cast": check_format_cast,
    **linear_references.CHECKS,
}
