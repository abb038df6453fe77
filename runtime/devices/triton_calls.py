"""Calls of the Triton kernels: products with float, 8-bit and 4-bit weights, and decode steps of few rows.

With up to 16 rows, a layer of a step is five kernels: the q, k, v projection with the norm before it; attention, with
norms and rotary positions of q and k, the write into the cache and the adapter; the output projection plus the
residual; gate and up projection with norm and activation; and the down projection plus the residual. Where a norm is
behind a projection, the addition is a kernel of its own. What a decoder does not have is left out when its kernels are
compiled. A kernel that writes hidden states also writes sums of their squares for each block of outputs, so the next
kernel normalises without another pass. Every row is computed in the same order in a batch of up to 16 rows. With more
rows, norms and products in floats are torch's.

This module imports triton through triton_kernels.py, so it is imported inside functions.
"""

# R rows, K inputs, N outputs, B blocks of outputs, G groups, A adapter queries, H head size

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F

from llama_adapter.runtime.devices import triton_kernels as kernels
from llama_adapter.runtime.operators import Hidden
from llama_adapter.runtime.schemes.int4 import GROUP, unpacked

HALVES = (torch.bfloat16, torch.float16)
_FUSED_ROWS = 16  # for which norm and residual are parts of products; with more, each block would repeat much of it
_FLOAT = 16  # bits of weights in the type of the activations
_ELEMENTS = 1024  # of an element-wise kernel's block


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a linear layer as the kernels read them.

    8 bits: int8 (N, K), scale float32 (N,). 4 bits: see `pack4`. Floats: (N, K) in the type of the activations.
    """

    bits: int
    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    @property
    def num_outputs(self) -> int:
        return len(self.weight)

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[1] * self.weight.itemsize * 8 // self.bits

    @property
    def in_eighths(self) -> bool:
        """Whether 4-bit weights are words of eight codes."""
        return self.weight.dtype == torch.int32


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes of a product's blocks; for 4 bits, inputs of either half, or words."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    programs: int = 1  # wanted; with fewer blocks, several programs share the inputs of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """How products and attention are computed.

    It does not depend on the rows beside a row, so a row's bits do not either.
    """

    blocks: Mapping[int, tuple[Blocks, ...]]  # by bits; the smallest that holds all rows is used, else the last one
    few_rows: int = 192  # of 8-bit and 4-bit layers; with more, a plain product with widened weights is faster
    in_eighths: bool = False  # 4-bit weights are packed as words of eight codes, if 256 divides the inputs
    is_dependent: bool = False  # a step's kernels start while the one before ends, from compute capability 9.0 on
    part_places: int = 0  # in attention; each part of a longer context has a program; a multiple of _BLOCK_PLACES


MEASURED = Tuning(  # the fastest on an H100 with the layers of a 7B
    blocks={
        _FLOAT: (Blocks(16, 16, 256, 2, 4),),
        8: (Blocks(16, 32, 128, 4, 5, 192), Blocks(32, 32, 128, 4, 5, 192), Blocks(64, 64, 128, 4, 4)),
        4: (Blocks(16, 64, 128, 4, 3, 192), Blocks(32, 64, 128, 4, 3, 192), Blocks(64, 64, 64, 4, 3)),
    }
)
# Not measured. A warp for each 16 outputs, since with more of them each weight is converted twice. Parts of 256 places,
# since a single row of 3,000 then has three programs for each multiprocessor of an H100 in a 7B; captions stay whole.
PROPOSED = Tuning(
    blocks={
        _FLOAT: (Blocks(16, 16, 256, 2, 4, 256),),
        8: (Blocks(16, 32, 128, 2, 5, 512), Blocks(32, 32, 128, 2, 5, 512), Blocks(64, 64, 128, 4, 4)),
        4: (Blocks(16, 32, 32, 2, 4, 512), Blocks(32, 32, 32, 2, 4, 512), Blocks(64, 64, 32, 4, 3)),
    },
    in_eighths=True,
    part_places=256,
)
# Not measured. Blocks so large that a prefill widens few weights twice, in registers, and writes none to memory.
LARGE = Tuning(
    blocks={
        _FLOAT: MEASURED.blocks[_FLOAT],
        8: (*MEASURED.blocks[8], Blocks(128, 128, 64, 8, 4)),
        4: (*MEASURED.blocks[4], Blocks(128, 128, 64, 8, 3)),
    },
    few_rows=4096,
)
TUNINGS = {
    "measured": MEASURED,
    "proposed": PROPOSED,
    "dependent": replace(MEASURED, is_dependent=True),
    "proposed-dependent": replace(PROPOSED, is_dependent=True),
    "large": LARGE,
}
tuning = MEASURED  # of all products and attention; `scripts.bench_peers` sets the others, see runtime/decisions.md
_LEAST_STEPS = 4  # of a program's loop over its inputs
_MOST_SPLITS = 8
_MOST_SHARED = 1 << 12  # blocks of products, or heads of 16 rows, that programs share
_BLOCK_PLACES = 64  # of a cache, in a step of attention's loop


@functools.cache
def _is_dependent(device: torch.device) -> bool:
    """Whether the GPU can start a kernel while the one before ends: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def linear(
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
    """x W^T + bias, and with `with_sums` the sums of its squares. x is bfloat16 or float16, and contiguous.

    With `norm`, x is normalised first; `sums_RB` are the sums of its squares. With `activation`, silu or
    gelu_tanh, the outputs are gate and up rows, and the result is activation(gate) * up. `residual_RN` is added.
    """
    num_rows, num_inputs = len(x_RK), weights.num_inputs
    num_outputs = weights.num_outputs // 2 if activation else weights.num_outputs
    blocks = choose_blocks(weights.bits, num_rows)
    block_in = blocks.inputs
    if weights.bits == 4 and not weights.in_eighths:
        while num_inputs // 2 % block_in:
            block_in //= 2
    num_blocks = triton.cdiv(num_outputs, blocks.outputs)
    out_RN = x_RK.new_empty(num_rows, num_outputs, dtype=dtype or x_RK.dtype)
    out_sums_RB = x_RK.new_empty(num_rows, num_blocks, dtype=torch.float32) if with_sums else None
    row_blocks = triton.cdiv(num_rows, blocks.rows)
    num_steps = triton.cdiv(weights.weight.shape[1], block_in)
    splits = _choose_splits(num_blocks * row_blocks, num_steps, programs=blocks.programs)
    parts = tickets = None
    if splits > 1:
        num_parts = num_blocks * row_blocks * splits * 2 * blocks.outputs * blocks.rows
        parts, tickets = x_RK.new_empty(num_parts, dtype=torch.float32), _tickets(x_RK.device)
    _run(
        kernels.linear,
        (num_blocks, row_blocks, splits),
        x_RK,
        _or(norm, x_RK),
        _or(sums_RB, x_RK),
        weights.weight,
        _or(weights.scale, x_RK),
        _or(weights.bias, x_RK),
        _or(residual_RN, x_RK),
        out_RN,
        _or(out_sums_RB, out_RN),
        _or(parts, out_RN),
        _or(tickets, out_RN),
        num_rows,
        num_outputs,
        num_inputs,
        0 if sums_RB is None else sums_RB.shape[1],
        eps,
        BITS=weights.bits,
        IN_EIGHTHS=weights.in_eighths,
        NORM=norm is not None,
        GATED=bool(activation),
        GELU=activation == "gelu_tanh",
        BIAS=weights.bias is not None,
        RESIDUAL=residual_RN is not None,
        SUMS=with_sums,
        EVEN=num_inputs % block_in == 0,
        ASSEMBLY=x_RK.is_cuda,
        SPLITS=splits,
        BLOCK_ROWS=blocks.rows,
        BLOCK_OUT=blocks.outputs,
        BLOCK_IN=block_in,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        in_step=True,
    )
    return Hidden(out_RN, out_sums_RB)


def _run(
    kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, in_step: bool = False, **sizes: Any
) -> None:
    """Launch a kernel on the device of its first argument; by itself, Triton launches on the current device.

    The kernels of a step may start before the one before has ended.
    """
    if in_step:
        sizes["DEPENDENT"] = tuning.is_dependent and _is_dependent(first.device)
        if sizes["DEPENDENT"]:
            sizes["launch_pdl"] = True
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[grid](first, *arguments, **sizes)


def choose_blocks(bits: int, num_rows: int) -> Blocks:
    """The blocks of a product with so many rows."""
    *smaller, largest = tuning.blocks[bits]
    return next((blocks for blocks in smaller if num_rows <= blocks.rows), largest)


def _choose_splits(num_blocks: int, num_steps: int, *, programs: int) -> int:
    """Programs for each block: a power of two, so that there are enough programs and each has enough steps."""
    splits = 1
    while splits < _MOST_SPLITS and num_blocks * splits < programs and num_steps >= 2 * splits * _LEAST_STEPS:
        splits *= 2
    return splits


def _choose_parts(num_rows: int, num_heads: int, most_places: int) -> int:
    """Programs for each row and head of attention, by the places that a cache or window has. More rows have enough.

    Parts begin at fixed distances, so a row's sums have the same order with any rows and blocks beside it. For the same
    reason, the heads of 16 rows must have counters, even if there are fewer rows.
    """
    assert tuning.part_places % _BLOCK_PLACES == 0, "parts are whole blocks of places"
    if not tuning.part_places or num_rows > _FUSED_ROWS or _FUSED_ROWS * num_heads > _MOST_SHARED:
        return 1
    return int(triton.cdiv(most_places, tuning.part_places))


def _tickets(device: torch.device) -> Tensor:
    """Counters of the programs that have finished their part of a block or head; 0 between kernels.

    They are shared by the kernels of a stream, which run one after the other: while one model's step is recorded in a
    stream of its own, another model may compute.
    """
    return _new_tickets(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)


@functools.cache
def _new_tickets(device: torch.device, stream: torch.cuda.Stream | None) -> Tensor:
    return torch.zeros(_MOST_SHARED, dtype=torch.int32, device=device)


def _or(value: Tensor | None, other: Tensor) -> Tensor:
    return other if value is None else value


class PackedLinear(nn.Module):
    """A linear layer with 8-bit or 4-bit weights: (..., K) to (..., N) in the type of the inputs.

    Inputs in float32, and many rows, are multiplied by weights that are widened for the call.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, bits: int, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._bits = bits
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    @property
    def weights(self) -> Weights:
        return Weights(self._bits, self.weight, self.scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows_RK = x.reshape(-1, x.shape[-1]).contiguous()
        if x.dtype in HALVES and len(rows_RK) <= tuning.few_rows:
            out_RN = linear(rows_RK, self.weights).x
        else:
            out_RN = F.linear(rows_RK, widen(self.weights, x.dtype), self.bias)
        return out_RN.view(*x.shape[:-1], len(self.weight))


class Step:
    """The operators of a decode step; see `StepOperators`."""

    most_rows = 64

    def weights(self, linear: nn.Module) -> Weights | None:
        if isinstance(linear, PackedLinear):
            return linear.weights
        if isinstance(linear, nn.Linear) and linear.weight.dtype in HALVES:
            return Weights(_FLOAT, linear.weight, None, linear.bias)
        return None

    def embed(self, tokens_R: Tensor, table_VD: Tensor) -> Hidden:
        num_rows, width = len(tokens_R), table_VD.shape[1]
        out_RD = table_VD.new_empty(num_rows, width)
        sums_R1 = table_VD.new_empty(num_rows, 1, dtype=torch.float32)
        _run(kernels.embed, (num_rows,), tokens_R, table_VD, out_RD, sums_R1, width, BLOCK=_ELEMENTS, in_step=True)
        return Hidden(out_RD, sums_R1)

    def project(
        self,
        hidden: Hidden,
        weights: Weights,
        *,
        norm: Tensor | None,
        eps: float,
        activation: str = "",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        x_RK = hidden.x
        if len(x_RK) <= _FUSED_ROWS:
            assert norm is None or hidden.sums is not None, "they are written for so few rows"
            return linear(x_RK, weights, norm=norm, sums_RB=hidden.sums, eps=eps, activation=activation, dtype=dtype).x
        if norm is not None:
            x_RK = F.rms_norm(x_RK, norm.shape, norm, eps)
        if weights.bits < _FLOAT and not (weights.in_eighths and activation):
            return linear(x_RK, weights, activation=activation, dtype=dtype).x
        # In eighths, products of gate and up at once would need too many registers.
        is_float = weights.bits == _FLOAT
        out_RN = F.linear(x_RK, weights.weight, weights.bias) if is_float else linear(x_RK, weights, dtype=dtype).x
        if activation:
            out_RN = geglu(out_RN) if activation == "gelu_tanh" else swiglu(out_RN)
        return out_RN.to(dtype or x_RK.dtype)

    def add(
        self, residual_RD: Tensor, x_RK: Tensor, weights: Weights, *, norm: Tensor | None = None, eps: float = 0.0
    ) -> Hidden:
        if norm is not None:
            return self._add_normed(
                residual_RD, self.project(Hidden(x_RK, None), weights, norm=None, eps=eps), norm, eps
            )
        is_fused = len(x_RK) <= _FUSED_ROWS
        if is_fused or weights.bits < _FLOAT:
            return linear(x_RK, weights, residual_RN=residual_RD, with_sums=is_fused)
        return Hidden(residual_RD + F.linear(x_RK, weights.weight, weights.bias), None)

    def _add_normed(self, residual_RD: Tensor, x_RD: Tensor, norm: Tensor, eps: float) -> Hidden:
        (num_rows, width), out_RD = x_RD.shape, torch.empty_like(residual_RD)
        sums_R1 = x_RD.new_empty(num_rows, 1, dtype=torch.float32)
        tensors = x_RD, residual_RD, norm, out_RD, sums_R1
        _run(kernels.add_normed, (num_rows,), *tensors, width, eps, BLOCK=_ELEMENTS, in_step=True)
        return Hidden(out_RD, sums_R1)

    def attend(
        self,
        qkv: Tensor,
        table: tuple[Tensor, Tensor] | None,
        cache: tuple[Tensor, Tensor],
        table_RT: Tensor | None,
        positions_R: Tensor,
        prefix: tuple[Tensor, Tensor] | None,
        *,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        cap: float = 0.0,
        window: int = 0,
    ) -> Tensor:
        k_cache, v_cache = cache
        (num_rows,), (_, num_kv_heads, num_places, head_dim) = positions_R.shape, k_cache.shape
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        out = qkv.new_empty(num_rows, num_heads * head_dim)
        adapter_k, adapter_v = (k_cache, v_cache) if prefix is None else prefix
        num_queries = 0 if prefix is None else adapter_k.shape[-2]
        half, block_half = head_dim // 2, triton.next_power_of_2(head_dim // 2)
        most_places = num_places if table_RT is None else num_places * table_RT.shape[1]
        num_parts = _choose_parts(num_rows, num_heads, min(most_places, (window or most_places) + _BLOCK_PLACES))
        parts = tickets = None
        if num_parts > 1:
            parts = qkv.new_empty(num_rows, num_heads, num_parts, 2 * block_half + 2, dtype=torch.float32)
            tickets = _tickets(qkv.device)
        _run(
            kernels.attention,
            (num_rows, num_heads, num_parts),
            qkv,
            *(table or (out, out)),
            *(norms or (out, out)),
            k_cache,
            v_cache,
            _or(table_RT, positions_R),
            positions_R,
            adapter_k,
            adapter_v,
            out,
            _or(parts, out),
            _or(tickets, out),
            0 if table_RT is None else table_RT.stride(0),
            k_cache.stride(0),
            k_cache.stride(1),
            adapter_k.stride(0),
            head_dim**-0.5,
            num_queries,
            eps,
            cap,
            HALF=half,
            BLOCK_HALF=block_half,
            GROUP=num_heads // num_kv_heads,
            NORM="none" if norms is None else "head" if len(norms[0]) == head_dim else "all",
            ROTARY=table is not None,
            CAPPED=cap > 0,
            WINDOW=window,
            QUERIES=triton.next_power_of_2(max(num_queries, 1)),
            PLACES=0 if table_RT is None else num_places,
            BLOCK_PLACES=_BLOCK_PLACES,
            PART=0 if parts is None else tuning.part_places,
            in_step=True,
        )
        return out


def widen(weights: Weights, dtype: torch.dtype) -> Tensor:
    """The weights of 8 or 4 bits as floats (N, K)."""
    num_outputs, num_inputs = weights.num_outputs, weights.num_inputs
    out_NK = weights.weight.new_empty(num_outputs, num_inputs, dtype=dtype)
    arguments = weights.weight, weights.scale
    if weights.bits == 8:
        kernel, num_columns = kernels.widen8, num_inputs
    elif weights.in_eighths:
        assert weights.scale is not None
        kernel, num_columns = kernels.widen_eighths, num_inputs
        arguments = weights.weight.view(torch.int16), weights.scale.view(torch.float16)
    else:
        kernel, num_columns = kernels.widen4, num_inputs // 2
    grid = num_outputs, triton.cdiv(num_columns, _ELEMENTS)
    _run(kernel, grid, *arguments, out_NK, num_inputs, BLOCK=_ELEMENTS)
    return out_NK


def rotate(x_BSNH: Tensor, cos_BS1H: Tensor, sin_BS1H: Tensor) -> Tensor:
    """As `operators.rotate`, for q or k alone. Heads of a token are adjacent in memory."""
    num_rows, num_tokens, num_heads, head_dim = x_BSNH.shape
    out_BSNH = torch.empty(x_BSNH.shape, dtype=x_BSNH.dtype, device=x_BSNH.device)
    block = min(triton.next_power_of_2(num_heads), 16)
    _run(
        kernels.rotate,
        (num_rows * num_tokens, triton.cdiv(num_heads, block)),
        x_BSNH,
        cos_BS1H,
        sin_BS1H,
        out_BSNH,
        num_heads,
        num_tokens,
        len(cos_BS1H),
        x_BSNH.stride(0),
        x_BSNH.stride(1),
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=block,
    )
    return out_BSNH


def swiglu(gate_up: Tensor) -> Tensor:
    """As `operators.swiglu`, for contiguous inputs."""
    return _activated(gate_up, gelu=False)


def geglu(gate_up: Tensor) -> Tensor:
    """As `operators.geglu`, for contiguous inputs."""
    return _activated(gate_up, gelu=True)


def _activated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    grid = out.numel() // width, triton.cdiv(width, _ELEMENTS)
    _run(kernels.activate, grid, gate_up, out, width, GELU=gelu, BLOCK=_ELEMENTS)
    return out


def pack4(stored: Tensor, scale_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and scales of `int4` -> those of `Weights`, for a number of inputs that 64 divides.

    In halves: bytes (N, K / 2), uint8, with the code of input k in the low half of byte k and that of input K / 2 + k
    in its high half; scales float16 (N, G).

    In eighths, codes are words (N, K / 8), int32, of eight codes each. 32 words hold the 256 inputs of eight groups.
    Words 2 i and 2 i + 1 hold inputs 2 i in their lower 16 bits, and inputs 2 i + 1 in their upper ones. The first word
    is for groups 0 to 3, from the lowest bits on, and the second for groups 4 to 7. A tensor core takes such inputs as
    neighbours. Scales are int64 (G / 4, N), four float16 of adjacent groups each.
    """
    num_outputs, num_groups = scale_NG.shape
    assert stored.shape[1] * 2 % (2 * GROUP) == 0
    codes_NK = unpacked(stored)
    if not tuning.in_eighths or num_groups % 8:
        first, second = codes_NK.chunk(2, dim=1)
        return first | (second << 4), scale_NG.contiguous()
    codes = codes_NK.view(num_outputs, num_groups // 8, 2, 4, GROUP // 2, 2)  # word, place, i, half
    words = sum(codes[:, :, :, place].int() << 4 * place for place in range(4)).transpose(2, 3)  # type: ignore[union-attr]
    words = words[..., 0] | (words[..., 1] << 16)
    scales = scale_NG.view(num_outputs, num_groups // 4, 4).transpose(0, 1).contiguous()
    return words.reshape(num_outputs, -1), scales.view(torch.int64)[..., 0]
