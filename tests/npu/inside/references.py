"""References on the CPU for torch_npu's operators, which check their arguments first (op-plugin's documentation).

Written from the documentation, independently of the tables that choose operators.
"""

# B rows, S query tokens, P key tokens, N heads, D head size

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.npu.inside import linear_references
from tests.npu.inside.linear_references import BRAIN, HALF, SINGLE, takes

ALL = (HALF, SINGLE, BRAIN)


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    takes([x, gamma], {"310P": (HALF, SINGLE), "A2": ALL, "A3": ALL})
    assert gamma.shape == x.shape[-1:]
    if linear_references.chip == "310P":
        assert x.dtype == gamma.dtype
        assert x.shape[-1] * x.itemsize >= 32
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Works in place, like the kernel, although the schema does not declare it."""
    takes([query], {"310P": (HALF, SINGLE), "A2": ALL, "A3": ALL, "950": ALL})
    assert {query.dtype} == {x.dtype for x in (key, cos, sin)}
    assert (layout, rotary_mode) == ("BSND", "half")
    batch, tokens, _, size = query.shape
    assert size in (64, 128), f"head size {size}"
    assert key.shape[:2] == (batch, tokens)
    assert key.shape[3] == size
    assert cos.shape == sin.shape == (batch, tokens, 1, size), f"{tuple(cos.shape)} for {tuple(query.shape)}"
    assert min(x.numel() for x in (query, key, cos, sin)) > 0
    assert all(x.is_contiguous() for x in (query, key, cos, sin)), "written in place"
    for x in (query, key):
        first, second = x.float().chunk(2, -1)
        x.copy_(x.float() * cos.float() + torch.cat([-second, first], -1) * sin.float())
    return query, key


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    takes([x], {"310P": (HALF,), "A2": ALL, "A3": ALL})
    assert x.is_contiguous()
    assert x.shape[dim] % (32 if linear_references.chip == "310P" else 2) == 0
    gate, up = x.float().chunk(2, dim)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def npu_fusion_attention_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    """The output, each row's largest score and sum, repeated 8 times like the kernel's, and what a backward pass reads.

    Scores are masked where the mask is True.
    """
    takes([query, key, value], {"A2": ALL, "A3": ALL})
    assert input_layout == "BNSD", input_layout
    assert head_num == query.shape[1]
    assert key.shape == value.shape
    assert query.shape[-1] <= 512
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if atten_mask is not None:
        batch, heads, tokens = query.shape[:3]
        assert atten_mask.dtype in (torch.bool, torch.uint8)
        shapes = [(a, b, tokens, key.shape[2]) for a in (1, batch) for b in (1, heads)]
        assert tuple(atten_mask.shape) in [*shapes, (tokens, key.shape[2])], tuple(atten_mask.shape)
        scores = scores.masked_fill(atten_mask.bool(), -1e30)
    largest = scores.amax(-1, keepdim=True)
    exponentials = (scores - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    out = ((exponentials / total) @ value.float()).to(query.dtype)
    largest, total = (each.expand(*each.shape[:-1], 8).clone() for each in (largest, total))
    return out, largest, total, query.new_empty(0), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def scatter_update_(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    takes([data, updates], {"910": (HALF, SINGLE), "A2": ALL, "A3": ALL, "950": ALL})
    assert indices.dtype in (torch.int32, torch.int64)
    assert indices.dim() in (1, 2)
    assert -data.dim() < axis < data.dim()
    assert axis != 0
    assert 2 <= data.dim() == updates.dim() <= 8
    assert len(updates) == len(indices) <= len(data)
    rest = [dim for dim in range(1, data.dim()) if dim != axis % data.dim()]
    assert [data.shape[dim] for dim in rest] == [updates.shape[dim] for dim in rest]
    assert min(data.numel(), updates.numel()) > 0
    for row, index in enumerate(indices.tolist()):
        data[row].narrow(axis if axis < 0 else axis - 1, index, updates.shape[axis]).copy_(updates[row])
    return data


def scatter_update(data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """The functional form that torch.compile makes of `scatter_update_`."""
    return scatter_update_(data.clone(), indices, updates, axis)


def npu_format_cast(x: Tensor, acl_format: int) -> Tensor:
    """The layout of device memory does not change the values."""
    assert acl_format in (2, 29)
    assert x.dim() == 2, "a weight"
    return x.clone()


REFERENCES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        npu_rms_norm,
        npu_apply_rotary_pos_emb,
        npu_swiglu,
        npu_fusion_attention_v3,
        scatter_update_,
        scatter_update,
        npu_format_cast,
    )
} | linear_references.REFERENCES
