"""A GPU's operators for a simulated GPU: the calls of Triton kernels and torch's product of 8-bit integers.

They compute with plain torch what tests/runtime/devices/test_triton.py shows that the kernels compute. `_int_mm` checks
its arguments as aten/src/ATen/native/cuda/Blas.cpp does.
"""

# R rows, K inputs, N outputs

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.runtime import operators
from llama_adapter.runtime.devices import triton_calls
from llama_adapter.runtime.devices.triton_calls import Weights
from llama_adapter.runtime.operators import Hidden
from llama_adapter.runtime.schemes.int4 import GROUP, MIDDLE


class LinearOps:
    """Counts calls by operator; `install` puts the fakes in place."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch, "_int_mm", self._int_mm)
        patch.setattr("llama_adapter.runtime.devices.cuda.has_integer_product", lambda: True)
        for name in ("linear", "widen", "rotate", "swiglu", "geglu"):
            patch.setattr(triton_calls, name, getattr(self, name))
        patch.setattr(triton_calls.Step, "embed", self.embed)
        patch.setattr(triton_calls.Step, "attend", self.attend)
        patch.setattr(triton_calls.Step, "_add_normed", self.add_normed)

    def linear(
        self,
        x_RK: Tensor,
        weights: Weights,
        *,
        norm: Tensor | None = None,
        sums_RB: Tensor | None = None,
        eps: float = 0.0,
        activation: str = "",
        residual_RN: Tensor | None = None,
        with_sums: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Hidden:
        self.calls[f"linear of {weights.bits} bits"] += 1
        assert x_RK.is_contiguous()
        assert x_RK.dtype in triton_calls.HALVES
        assert weights.weight.is_contiguous()
        assert residual_RN is None or residual_RN.is_contiguous()
        assert (norm is None) == (sums_RB is None)
        if norm is not None and sums_RB is not None:
            factors_R1 = torch.rsqrt(sums_RB.sum(1, keepdim=True) / x_RK.shape[1] + eps)
            x_RK = (x_RK.float() * factors_R1 * norm.float()).to(x_RK.dtype)
        bias_N = None if weights.bias is None else weights.bias.float()
        out_RN = F.linear(x_RK.float(), widened(weights), bias_N)
        out_RN = GATED[activation](out_RN)
        out_RN = out_RN if residual_RN is None else out_RN + residual_RN.float()
        out_RN = out_RN.to(dtype or x_RK.dtype)
        return Hidden(out_RN, out_RN.float().square().sum(1, keepdim=True) if with_sums else None)

    def widen(self, weights: Weights, dtype: torch.dtype) -> Tensor:
        self.calls[f"widen {weights.bits} bits"] += 1
        return widened(weights).to(dtype)

    def rotate(self, x_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> Tensor:
        assert x_BSNH.stride()[2:] == (x_BSNH.shape[-1], 1), "heads of a token are adjacent"
        return operators.rotate(x_BSNH, x_BSNH, cos_BS1H, sin_BS1H)[0].contiguous()

    def swiglu(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        return operators.swiglu(gate_up.float()).to(gate_up.dtype)

    def geglu(self, gate_up: Tensor) -> Tensor:
        assert gate_up.is_contiguous()
        return operators.geglu(gate_up.float()).to(gate_up.dtype)

    def embed(self, tokens_R: Tensor, table_VD: Tensor) -> Hidden:
        x_RD = table_VD[tokens_R]
        return Hidden(x_RD, x_RD.float().square().sum(1, keepdim=True))

    def add_normed(self, residual_RD: Tensor, x_RD: Tensor, norm: Tensor, eps: float) -> Hidden:
        out_RD = residual_RD + operators.rms_norm(x_RD, norm, eps)
        return Hidden(out_RD, out_RD.float().square().sum(1, keepdim=True))

    def attend(
        self,
        qkv: Tensor,
        table: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, Tensor],
        table_RT: Tensor | None,
        positions_R: Tensor,
        prefix: Any,
        **rules: Any,
    ) -> Tensor:
        self.calls["attend"] += 1
        if table_RT is not None:
            self.calls["attend to blocks"] += 1
            rows = tuple(whole[table_RT].transpose(1, 2).flatten(2, 3) for whole in cache)
            heads = self.attend(qkv, table, rows, None, positions_R, prefix, **rules)  # type: ignore[arg-type]
            block, rows_R = cache[0].shape[2], torch.arange(len(table_RT))
            blocks_R = table_RT[rows_R, positions_R // block]
            for whole, row in zip(cache, rows, strict=True):
                whole[blocks_R, :, positions_R % block] = row[rows_R, :, positions_R]
            return heads
        return attended(qkv, table, cache, positions_R, prefix, **rules)

    def _int_mm(self, first: Tensor, second: Tensor) -> Tensor:
        self.calls["_int_mm"] += 1
        assert first.dtype == second.dtype == torch.int8
        assert len(first) > 16
        assert first.shape[1] % 8 == 0
        assert second.shape[1] % 8 == 0
        return first.int() @ second.int()


GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "silu": operators.swiglu,
    "gelu_tanh": operators.geglu,
}


def attended(
    qkv: Tensor,
    table: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor],
    positions_R: Tensor,
    prefix: tuple[Tensor, Tensor] | None,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    cap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """As `StepOperators.attend`, of slots that have one block each."""
    num_rows, num_kv_heads, num_places, head_dim = cache[0].shape
    num_heads = [qkv.shape[1] // head_dim - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q, k, v = qkv.view(num_rows, 1, -1, head_dim).split(num_heads, dim=2)
    if norms is not None:
        q, k = (
            operators.rms_norm(x.reshape(num_rows, 1, -1, len(norm)), norm, eps).view(x.shape)
            for x, norm in zip((q, k), norms, strict=True)
        )
    if table is not None:
        q, k = operators.rotate(q, k, *(part[positions_R][:, None, None] for part in table))
    for whole, new in zip(cache, (k, v), strict=True):
        operators.store(whole, positions_R, new.transpose(1, 2))
    distance_RP = positions_R[:, None] - torch.arange(num_places, device=qkv.device)
    mask = ((distance_RP >= 0) & (distance_RP < (window or num_places)))[:, None, None]
    q = q.transpose(1, 2)
    heads = operators.capped_attention(q.float(), *(part.float() for part in cache), mask, cap=cap)
    if prefix is not None:
        heads += operators.capped_attention(q.float(), *(part.float() for part in prefix), None, cap=cap)
    return heads.transpose(1, 2).flatten(1).to(qkv.dtype)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> LinearOps:
    fake = LinearOps()
    fake.install(monkeypatch)
    return fake


def widened(weights: Weights) -> Tensor:
    """Weights as float32 (N, K)."""
    if weights.bits == 16:
        return weights.weight.float()
    assert weights.scale is not None
    if weights.bits == 8:
        return weights.weight.float() * weights.scale[:, None]
    codes_NK = torch.cat([weights.weight & 15, weights.weight >> 4], dim=1).float()
    return (codes_NK - MIDDLE) * weights.scale.float().repeat_interleave(GROUP, dim=1)
