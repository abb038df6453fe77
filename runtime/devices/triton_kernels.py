"""Triton kernels for NVIDIA GPUs: decode steps of few rows, products with 8-bit and 4-bit weights, and small operators.

triton_calls.py calls them and documents what they compute. This module imports triton, which comes with torch's CUDA
builds, so it is imported inside functions.
"""

# R rows, K inputs, N outputs, B blocks of outputs, P places of a cache, H head size

import triton
import triton.language as tl

from llama_adapter.runtime.schemes import int4

GROUP = tl.constexpr(int4.GROUP)  # inputs that share a scale of 4-bit weights

# Numbers of few bits become exact numbers of the 16-bit type without conversions: a code behind the bits of a power of
# two is that power plus the code, and the power is subtracted. fma is the subtraction that GPUs before Hopper have.
_TYPES = {
    tl.bfloat16: {
        "TYPE": "bf16x2",
        "ONE": "0x3F803F80",
        "MAGIC": "0x43434343",
        "BASE": "0x43004300",
        "MIDDLE": "0xC308C308",
    },
    tl.float16: {
        "TYPE": "f16x2",
        "ONE": "0x3C003C00",
        "MAGIC": "0x64646464",
        "BASE": "0x64006400",
        "MIDDLE": "0xE408E408",
    },
}


def _assembly(text: str, dtype: tl.dtype) -> tl.constexpr:
    for name, value in _TYPES[dtype].items():
        text = text.replace(name, value)
    return tl.constexpr("{\n" + text + "}\n")


# Four bytes of two codes each -> their low and high codes minus 8.
_LEVELS = """
    .reg .b32 low, high, one, middle;
    mov.b32 one, ONE;
    mov.b32 middle, MIDDLE;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, MAGIC, 0x4140;
    prmt.b32 $1, low, MAGIC, 0x4342;
    prmt.b32 $2, high, MAGIC, 0x4140;
    prmt.b32 $3, high, MAGIC, 0x4342;
""" + "".join(f"    fma.rn.TYPE ${number}, ${number}, one, middle;\n" for number in range(4))
# A pair of words of eight codes each, and a place -> the pair of codes at this place, minus 8. The place is a constant,
# so one shift remains of the first five instructions.
_EIGHTH = """
    .reg .b32 word, place, one, middle;
    .reg .pred is_second;
    setp.ge.u32 is_second, $3, 4;
    selp.b32 word, $2, $1, is_second;
    and.b32 place, $3, 3;
    shl.b32 place, place, 2;
    shr.u32 word, word, place;
    lop3.b32 word, word, 0x000F000F, BASE, 0xEA;
    mov.b32 one, ONE;
    mov.b32 middle, MIDDLE;
    fma.rn.TYPE $0, word, one, middle;
"""
_LEVELS_BF16, _LEVELS_F16 = (_assembly(_LEVELS, dtype) for dtype in _TYPES)
_EIGHTH_BF16, _EIGHTH_F16 = (_assembly(_EIGHTH, dtype) for dtype in _TYPES)
_LINES = tl.constexpr(8)  # of 128 bytes of each output's weights, fetched while the kernel before still runs
_FETCH = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def _follow(DEPENDENT: tl.constexpr):
    """Wait for the kernel before, if this one was launched while it ran, and let the next one be launched.

    The next one starts after this wait, so before its own wait it may read what came before this kernel.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _norm_factors(sums, rows_R, num_rows, num_sums, num_inputs, eps, BLOCK_ROWS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each row, from partial sums of squares (R, num_sums)."""
    CHUNK: tl.constexpr = 4096 // BLOCK_ROWS
    total_R = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, num_sums, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        mask = (rows_R < num_rows)[:, None] & (columns < num_sums)[None, :]
        total_R += tl.sum(tl.load(sums + rows_R[:, None] * num_sums + columns[None, :], mask=mask, other=0.0), axis=1)
    return tl.rsqrt(total_R / num_inputs + eps)


@triton.jit
def _inputs(x, norm, factors_R, rows_R, num_rows, columns_K, num_inputs, NORM: tl.constexpr, EVEN: tl.constexpr):
    """Inputs (K, R), normalised if `NORM`."""
    mask = (rows_R < num_rows)[None, :]
    if not EVEN:
        mask = mask & (columns_K < num_inputs)[:, None]
    tile_KR = tl.load(x + rows_R[None, :] * num_inputs + columns_K[:, None], mask=mask, other=0.0)
    if NORM:
        if EVEN:
            weight_K = tl.load(norm + columns_K)
        else:
            weight_K = tl.load(norm + columns_K, mask=columns_K < num_inputs, other=0.0)
        exact_KR = tile_KR.to(tl.float32) * factors_R[None, :] * weight_K.to(tl.float32)[:, None]
        tile_KR = exact_KR.to(tile_KR.dtype)
    return tile_KR


@triton.jit
def _weights(weight, outs_N, columns_K, num_inputs, EVEN: tl.constexpr):
    """Stored weights, or pairs or words of them (N, K)."""
    place = weight + outs_N[:, None].to(tl.int64) * num_inputs + columns_K[None, :]
    if EVEN:
        return tl.load(place, eviction_policy="evict_first")
    return tl.load(place, mask=(columns_K < num_inputs)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _levels(pairs, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Bytes of two codes -> the low and the high codes minus 8, exact in `dtype`."""
    if not ASSEMBLY:
        return ((pairs & 15).to(tl.int8) - 8).to(dtype), ((pairs >> 4).to(tl.int8) - 8).to(dtype)
    text: tl.constexpr = _LEVELS_BF16 if dtype == tl.bfloat16 else _LEVELS_F16
    return tl.inline_asm_elementwise(
        text, "=r,=r,=r,=r,r", [pairs], dtype=(dtype.value, dtype.value), is_pure=True, pack=4
    )


@triton.jit
def _scales(scale, outs_N, first, num_groups, dtype: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr):
    """The scales of `BLOCK_IN` inputs from group `first` on, one for each weight (N, K)."""
    GROUPS: tl.constexpr = BLOCK_IN // GROUP
    places = scale + outs_N[:, None] * num_groups + first + tl.arange(0, GROUPS)[None, :]
    scale_NG = tl.load(places).to(dtype)
    return tl.broadcast_to(scale_NG[:, :, None], (BLOCK_OUT, GROUPS, GROUP)).reshape(BLOCK_OUT, BLOCK_IN)


@triton.jit
def _add_halves(
    acc_NR,
    weight,
    scale,
    outs_N,
    columns_K,
    first,
    low_KR,
    high_KR,
    num_inputs,
    ASSEMBLY: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """acc plus the products of inputs of the first half, and of inputs of the second half."""
    half, num_groups = num_inputs // 2, num_inputs // GROUP
    dtype = low_KR.dtype
    low_NK, high_NK = _levels(_weights(weight, outs_N, columns_K, half, True), dtype, ASSEMBLY)
    low_NK *= _scales(scale, outs_N, first, num_groups, dtype, BLOCK_OUT, BLOCK_IN)
    high_NK *= _scales(scale, outs_N, first + num_groups // 2, num_groups, dtype, BLOCK_OUT, BLOCK_IN)
    return tl.dot(high_NK, high_KR, tl.dot(low_NK, low_KR, acc_NR))


@triton.jit
def _eighth(words, dtype: tl.constexpr, PLACE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Words -> the levels of one of their eight groups of inputs, exact in `dtype`."""
    if ASSEMBLY:
        text: tl.constexpr = _EIGHTH_BF16 if dtype == tl.bfloat16 else _EIGHTH_F16
        place = tl.full(words.shape, PLACE, tl.int32)
        return tl.inline_asm_elementwise(text, "=r,r,r,r,r", [words, place], dtype=dtype.value, is_pure=True, pack=2)
    half = tl.split(words.reshape(words.shape[0], words.shape[1] // 2, 2))[PLACE // 4] >> 4 * (PLACE % 4)
    return (tl.join(half & 15, half >> 16 & 15).reshape(words.shape) - 8).to(dtype)


@triton.jit
def _add_eighths(
    acc_NR,
    up_NR,
    x,
    norm,
    factors_R,
    weight,
    scales,
    ups,
    outs_N,
    rows_R,
    num_rows,
    num_outputs,
    num_inputs,
    chunk,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """acc plus the products of 256 inputs, scaled once for each output and group; the same for `up_NR`.

    `scales` are two numbers of four float16 scales for each output, and `ups` those of up.
    """
    dtype = x.dtype.element_ty
    words_K = chunk * GROUP + tl.arange(0, GROUP)
    words = _weights(weight, outs_N, words_K, num_inputs // 8, True)
    if GATED:
        up_words = _weights(weight, outs_N + num_outputs, words_K, num_inputs // 8, True)
    for group in tl.static_range(8):
        columns_K = (chunk * 8 + group) * GROUP + tl.arange(0, GROUP)
        tile_KR = _inputs(x, norm, factors_R, rows_R, num_rows, columns_K, num_inputs, NORM, True)
        acc_NR += tl.dot(_eighth(words, dtype, group, ASSEMBLY), tile_KR) * _scale_of(scales, group)
        if GATED:
            up_NR += tl.dot(_eighth(up_words, dtype, group, ASSEMBLY), tile_KR) * _scale_of(ups, group)
    return acc_NR, up_NR


@triton.jit
def _scale_of(scales, GROUP_NUMBER: tl.constexpr):
    """The scale of one of eight groups, float32 (N, 1)."""
    bits = (scales[GROUP_NUMBER // 4] >> 16 * (GROUP_NUMBER % 4)).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)[:, None]


@triton.jit
def _scales_of_chunk(scale, outs_N, chunk, num_stored):
    place = scale + chunk * 2 * num_stored + outs_N
    return tl.load(place), tl.load(place + num_stored)


@triton.jit
def _activated(gate, GELU: tl.constexpr):
    """silu, or the tanh approximation of GELU: 1 + tanh(z) is 2 sigmoid(2 z)."""
    z = gate
    if GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate / (1.0 + tl.exp(-z))


@triton.jit(do_not_specialize=["num_rows", "num_sums"])
def linear(
    x,
    norm,
    sums,
    weight,
    scale,
    bias,
    residual,
    out,
    out_sums,
    parts,
    tickets,
    num_rows,
    num_outputs,
    num_inputs,
    num_sums,
    eps,
    BITS: tl.constexpr,
    IN_EIGHTHS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SUMS: tl.constexpr,
    EVEN: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    block, split = tl.program_id(0), tl.program_id(2)
    outs_N = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out_N = outs_N < num_outputs
    outs_N = tl.minimum(outs_N, num_outputs - 1)
    rows_R = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    if DEPENDENT:
        row_bytes = num_inputs.to(tl.int64) * BITS // 8
        lines = (split * _LINES + tl.arange(0, _LINES)) * 128 % row_bytes
        places = weight.to(tl.int64) + outs_N[:, None] * row_bytes + lines[None, :]
        tl.inline_asm_elementwise(_FETCH, "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)
        if GATED:
            places += num_outputs * row_bytes
            tl.inline_asm_elementwise(_FETCH, "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)
    _follow(DEPENDENT)
    factors_R = tl.zeros((BLOCK_ROWS,), tl.float32)
    if NORM:
        factors_R = _norm_factors(sums, rows_R, num_rows, num_sums, num_inputs, eps, BLOCK_ROWS)
    acc_NR = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    up_NR = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    if IN_EIGHTHS:
        num_chunks = num_inputs // (8 * GROUP)
        num_stored = num_outputs * 2 if GATED else num_outputs
        scales = _scales_of_chunk(scale, outs_N, split, num_stored)
        ups = _scales_of_chunk(scale, outs_N + (num_stored - num_outputs), split, num_stored)
        for chunk in range(split, num_chunks, SPLITS):
            own, own_ups = scales, ups
            later = tl.minimum(chunk + SPLITS, num_chunks - 1)  # so that their loads are not waited for
            scales = _scales_of_chunk(scale, outs_N, later, num_stored)
            if GATED:
                ups = _scales_of_chunk(scale, outs_N + num_outputs, later, num_stored)
            acc_NR, up_NR = _add_eighths(
                acc_NR,
                up_NR,
                x,
                norm,
                factors_R,
                weight,
                own,
                own_ups,
                outs_N,
                rows_R,
                num_rows,
                num_outputs,
                num_inputs,
                chunk,
                NORM,
                GATED,
                ASSEMBLY,
            )
    elif BITS == 4:
        half = num_inputs // 2
        for start in range(split * BLOCK_IN, half, SPLITS * BLOCK_IN):
            columns_K, group = start + tl.arange(0, BLOCK_IN), start // GROUP
            low = _inputs(x, norm, factors_R, rows_R, num_rows, columns_K, num_inputs, NORM, True)
            high = _inputs(x, norm, factors_R, rows_R, num_rows, columns_K + half, num_inputs, NORM, True)
            acc_NR = _add_halves(
                acc_NR, weight, scale, outs_N, columns_K, group, low, high, num_inputs, ASSEMBLY, BLOCK_OUT, BLOCK_IN
            )
            if GATED:
                ups_N = outs_N + num_outputs
                up_NR = _add_halves(
                    up_NR, weight, scale, ups_N, columns_K, group, low, high, num_inputs, ASSEMBLY, BLOCK_OUT, BLOCK_IN
                )
    else:
        for start in range(split * BLOCK_IN, num_inputs, SPLITS * BLOCK_IN):
            columns_K = start + tl.arange(0, BLOCK_IN)
            tile = _inputs(x, norm, factors_R, rows_R, num_rows, columns_K, num_inputs, NORM, EVEN)
            acc_NR = tl.dot(_weights(weight, outs_N, columns_K, num_inputs, EVEN).to(tile.dtype), tile, acc_NR)
            if GATED:
                ups = _weights(weight, outs_N + num_outputs, columns_K, num_inputs, EVEN)
                up_NR = tl.dot(ups.to(tile.dtype), tile, up_NR)
    if SPLITS > 1:
        # The programs of a block store their parts, and the last one to do so adds them up in a fixed order.
        tile = tl.arange(0, BLOCK_OUT)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        place = tl.program_id(1) * tl.num_programs(0) + block
        own = parts + place.to(tl.int64) * SPLITS * 2 * BLOCK_OUT * BLOCK_ROWS + tile
        tl.store(own + split * 2 * BLOCK_OUT * BLOCK_ROWS, acc_NR)
        if GATED:
            tl.store(own + (split * 2 + 1) * BLOCK_OUT * BLOCK_ROWS, up_NR)
        tl.debug_barrier()
        if tl.atomic_add(tickets + place, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(tickets + place, 0)  # for the next product
        acc_NR = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
        up_NR = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
        for part in tl.static_range(SPLITS):
            acc_NR += tl.load(own + part * 2 * BLOCK_OUT * BLOCK_ROWS, cache_modifier=".cg")
            if GATED:
                up_NR += tl.load(own + (part * 2 + 1) * BLOCK_OUT * BLOCK_ROWS, cache_modifier=".cg")
    if BITS == 8:
        acc_NR = acc_NR * tl.load(scale + outs_N)[:, None]
        if GATED:
            up_NR = up_NR * tl.load(scale + num_outputs + outs_N)[:, None]
    if BIAS:
        acc_NR += tl.load(bias + outs_N).to(tl.float32)[:, None]
        if GATED:
            up_NR += tl.load(bias + num_outputs + outs_N).to(tl.float32)[:, None]
    if GATED:
        acc_NR = _activated(acc_NR, GELU) * up_NR
    mask = is_out_N[:, None] & (rows_R < num_rows)[None, :]
    places = rows_R[None, :] * num_outputs + outs_N[:, None]
    if RESIDUAL:
        acc_NR += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    result = acc_NR.to(out.dtype.element_ty)
    tl.store(out + places, result, mask=mask)
    if SUMS:
        exact = result.to(tl.float32)
        sums_R = tl.sum(tl.where(mask, exact * exact, 0.0), axis=0)
        tl.store(out_sums + rows_R * tl.num_programs(0) + block, sums_R, mask=rows_R < num_rows)


@triton.jit
def _tile_mask(is_row, half_H, HALF: tl.constexpr):
    """The mask of a tile: of its rows, and of its coordinates if half a head is no power of two."""
    mask = is_row[:, None]
    if half_H.shape[0] != HALF:
        mask = mask & (half_H < HALF)[None, :]
    return mask


@triton.jit
def _halves(pointer, tile, mask, HALF: tl.constexpr):
    """Both halves of heads, in float32."""
    first = tl.load(pointer + tile, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(pointer + tile + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _slot(table, row, place, table_stride, slot_stride, PLACES: tl.constexpr, HALF: tl.constexpr):
    """Where place 0 of a row would be if all its places followed those of the block that holds `place`."""
    if PLACES == 0:
        return row.to(tl.int64) * slot_stride
    number = place // PLACES
    return tl.load(table + row * table_stride + number) * slot_stride - number * (PLACES * 2 * HALF)


@triton.jit
def _normed(first, second, heads, head, num_heads, norm, eps, half_H, dtype, HALF: tl.constexpr, NORM: tl.constexpr):
    """Halves of one of the heads, normalised over this head, or over all heads; as `operators.rms_norm`."""
    if NORM == "none":
        return first, second
    mask, width, own = half_H < HALF, 2 * HALF, half_H
    total = tl.sum(first * first + second * second, axis=0)
    if NORM == "all":
        width, own = num_heads * 2 * HALF, head * 2 * HALF + half_H
        squares = tl.zeros((1024,), tl.float32)
        for start in range(0, width, 1024):
            columns = start + tl.arange(0, 1024)
            part = tl.load(heads + columns, mask=columns < width, other=0.0).to(tl.float32)
            squares += part * part
        total = tl.sum(squares, axis=0)
    factor = tl.rsqrt(total / width + eps)
    weight1, weight2 = _halves(norm, own, mask, HALF)
    return (first * factor * weight1).to(dtype).to(tl.float32), (second * factor * weight2).to(dtype).to(tl.float32)


@triton.jit
def _rotated(first, second, c_H, s_H, dtype, ROTARY: tl.constexpr):
    """Halves of a head after the rotation, if there is one, in `dtype`."""
    if ROTARY:
        first, second = first * c_H - second * s_H, second * c_H + first * s_H
    return first.to(dtype), second.to(dtype)


@triton.jit
def _capped(scores, cap, CAPPED: tl.constexpr):
    """As `operators.capped`. tanh(z) is 1 - 2 / (exp(2 z) + 1)."""
    if CAPPED:
        scores = cap - 2.0 * cap / (tl.exp(2.0 * scores / cap) + 1.0)
    return scores


@triton.jit
def _store_part(own, highest, total, sum1, sum2, half_H, BLOCK_HALF: tl.constexpr):
    """Keep a softmax over some places: its highest score, its total, and both halves of its sum."""
    tl.store(own + half_H, sum1)
    tl.store(own + BLOCK_HALF + half_H, sum2)
    tl.store(own + 2 * BLOCK_HALF, highest)
    tl.store(own + 2 * BLOCK_HALF + 1, total)


@triton.jit
def _joined(parts, num_parts, half_H, BLOCK_HALF: tl.constexpr):
    """The total and both halves of the sum of the softmax over all parts. They are added in the order of places."""
    SIZE: tl.constexpr = 2 * BLOCK_HALF + 2
    highest, total = float("-inf"), 0.0
    sum1, sum2 = tl.zeros((BLOCK_HALF,), tl.float32), tl.zeros((BLOCK_HALF,), tl.float32)
    for first in range(0, num_parts, 8):
        for number in tl.static_range(8):  # so that their loads do not wait for each other
            is_there = first + number < num_parts
            part = parts + (first + number) * SIZE
            own = tl.load(part + 2 * BLOCK_HALF, mask=is_there, other=float("-inf"), cache_modifier=".cg")
            newest = tl.maximum(highest, own)
            kept, share = tl.exp(highest - newest), tl.exp(own - newest)
            own = tl.load(part + 2 * BLOCK_HALF + 1, mask=is_there, other=0.0, cache_modifier=".cg")
            total = total * kept + own * share
            sum1 = sum1 * kept + tl.load(part + half_H, mask=is_there, other=0.0, cache_modifier=".cg") * share
            part += BLOCK_HALF
            sum2 = sum2 * kept + tl.load(part + half_H, mask=is_there, other=0.0, cache_modifier=".cg") * share
            highest = newest
    return total, sum1, sum2


@triton.jit
def attention(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    k_cache,
    v_cache,
    table,
    positions,
    adapter_k,
    adapter_v,
    out,
    parts,
    tickets,
    table_stride,
    slot_stride,
    head_stride,
    adapter_stride,
    softmax_scale,
    num_queries,
    eps,
    cap,
    DEPENDENT: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    PART: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads = tl.num_programs(1)
    kv_head, num_kv_heads = head // GROUP, num_heads // GROUP
    half_H = tl.arange(0, BLOCK_HALF)
    is_H = half_H < HALF
    position = tl.load(positions + row)
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0)
    begin, end = first // BLOCK_PLACES * BLOCK_PLACES, position
    if PART:
        num_parts = tl.minimum(tl.maximum(tl.cdiv(position - begin, PART), 1), tl.num_programs(2))
        if part >= num_parts:  # before `_follow`, as the first part waits for all
            return
        begin += part * PART
        end = tl.minimum(begin + PART, position)
    c_H, s_H = 0.0, 0.0
    if ROTARY:
        c_H = tl.load(cos + position * 2 * HALF + half_H, mask=is_H, other=0.0)
        s_H = tl.load(sin + position * 2 * HALF + half_H, mask=is_H, other=0.0)
    queries = tl.arange(0, QUERIES)
    is_query = queries < num_queries
    prefix = row.to(tl.int64) * adapter_stride + (head * num_queries + queries)[:, None] * 2 * HALF + half_H[None, :]
    is_prefix = _tile_mask(is_query, half_H, HALF)
    if not PART:
        adapter_k1, adapter_k2 = _halves(adapter_k, prefix, is_prefix, HALF)
        adapter_v1, adapter_v2 = _halves(adapter_v, prefix, is_prefix, HALF)
    _follow(DEPENDENT)  # all above is older than the projection of q, k and v
    width = num_heads * 2 * HALF
    kv_width = num_kv_heads * 2 * HALF
    dtype = out.dtype.element_ty
    all_q = qkv + row * (width + 2 * kv_width)
    all_k = all_q + width
    q1, q2 = _halves(all_q, head * 2 * HALF + half_H, is_H, HALF)
    k1, k2 = _halves(all_k, kv_head * 2 * HALF + half_H, is_H, HALF)
    v1, v2 = _halves(all_k + kv_width, kv_head * 2 * HALF + half_H, is_H, HALF)
    q1, q2 = _normed(q1, q2, all_q, head, num_heads, q_norm, eps, half_H, dtype, HALF, NORM)
    k1, k2 = _normed(k1, k2, all_k, kv_head, num_kv_heads, k_norm, eps, half_H, dtype, HALF, NORM)
    q1, q2 = _rotated(q1, q2, c_H, s_H, dtype, ROTARY)
    k1, k2 = _rotated(k1, k2, c_H, s_H, dtype, ROTARY)
    is_first = head % GROUP == 0
    if PART:
        is_first = is_first & (part == 0)
    if is_first:  # of the programs that read this key
        slot = _slot(table, row, position, table_stride, slot_stride, PLACES, HALF) + kv_head * head_stride
        place = slot + position * 2 * HALF + half_H
        tl.store(k_cache + place, k1, mask=is_H)
        tl.store(k_cache + place + HALF, k2, mask=is_H)
        tl.store(v_cache + place, v1.to(dtype), mask=is_H)
        tl.store(v_cache + place + HALF, v2.to(dtype), mask=is_H)
    q1, q2 = q1.to(tl.float32) * softmax_scale, q2.to(tl.float32) * softmax_scale
    # The softmax over its own place, then over earlier ones in blocks (Milakov & Gimelshein, 2018).
    highest = _capped(tl.sum(q1 * k1.to(tl.float32) + q2 * k2.to(tl.float32), axis=0), cap, CAPPED)
    total = highest * 0.0 + 1.0
    sum1, sum2 = v1, v2
    if PART:  # its own place is of the first part; the others only start with its score, which is finite
        total = tl.where(part == 0, total, 0.0)
        sum1, sum2 = tl.where(part == 0, v1, 0.0), tl.where(part == 0, v2, 0.0)
    for start in range(begin, end, BLOCK_PLACES):
        places = start + tl.arange(0, BLOCK_PLACES)
        is_past = places < position
        if WINDOW:
            is_past = is_past & (places >= first)
        slot = _slot(table, row, start, table_stride, slot_stride, PLACES, HALF) + kv_head * head_stride
        tile = slot + places[:, None] * 2 * HALF + half_H[None, :]
        is_seen = _tile_mask(is_past, half_H, HALF)
        old_k1, old_k2 = _halves(k_cache, tile, is_seen, HALF)
        old_v1, old_v2 = _halves(v_cache, tile, is_seen, HALF)
        scores = _capped(tl.sum(old_k1 * q1[None, :] + old_k2 * q2[None, :], axis=1), cap, CAPPED)
        scores = tl.where(is_past, scores, float("-inf"))
        newest = tl.maximum(highest, tl.max(scores, axis=0))
        kept, shares = tl.exp(highest - newest), tl.exp(scores - newest)
        total = total * kept + tl.sum(shares, axis=0)
        sum1 = sum1 * kept + tl.sum(shares[:, None] * old_v1, axis=0)
        sum2 = sum2 * kept + tl.sum(shares[:, None] * old_v2, axis=0)
        highest = newest
    if PART:
        if num_parts > 1:
            # The programs of a row and head store their parts, and the last one to do so adds them up in a fixed order.
            place = row * num_heads + head
            own = parts + place.to(tl.int64) * tl.num_programs(2) * (2 * BLOCK_HALF + 2)
            _store_part(own + part * (2 * BLOCK_HALF + 2), highest, total, sum1, sum2, half_H, BLOCK_HALF)
            tl.debug_barrier()
            if tl.atomic_add(tickets + place, 1, sem="acq_rel") != num_parts - 1:
                return
            tl.store(tickets + place, 0)  # for the next kernel
            total, sum1, sum2 = _joined(own, num_parts, half_H, BLOCK_HALF)
        adapter_k1, adapter_k2 = _halves(adapter_k, prefix, is_prefix, HALF)
        adapter_v1, adapter_v2 = _halves(adapter_v, prefix, is_prefix, HALF)
    sum1, sum2 = sum1 / total, sum2 / total
    if num_queries > 0:
        scores = _capped(tl.sum(adapter_k1 * q1[None, :] + adapter_k2 * q2[None, :], axis=1), cap, CAPPED)
        scores = tl.where(is_query, scores, float("-inf"))
        shares = tl.exp(scores - tl.max(scores, axis=0))
        shares = shares / tl.sum(shares, axis=0)
        sum1 += tl.sum(shares[:, None] * adapter_v1, axis=0)
        sum2 += tl.sum(shares[:, None] * adapter_v2, axis=0)
    answer = out + row * width + head * 2 * HALF + half_H
    tl.store(answer, sum1.to(dtype), mask=is_H)
    tl.store(answer + HALF, sum2.to(dtype), mask=is_H)


@triton.jit
def add_normed(x, residual, norm, out, sums, width, eps, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    _follow(DEPENDENT)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        squares += values * values
    factor = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        values = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
        normed = (values * factor * weight).to(out.dtype.element_ty).to(tl.float32)
        result = tl.load(residual + row * width + columns, mask=mask, other=0.0).to(tl.float32) + normed
        result = result.to(out.dtype.element_ty)
        tl.store(out + row * width + columns, result, mask=mask)
        squares += result.to(tl.float32) * result.to(tl.float32)
    tl.store(sums + row, tl.sum(squares, axis=0))


@triton.jit
def embed(tokens, table, out, sums, width, DEPENDENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    _follow(DEPENDENT)
    token = tl.load(tokens + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(table + token * width + columns, mask=columns < width, other=0.0)
        tl.store(out + row * width + columns, values, mask=columns < width)
        total += values.to(tl.float32) * values.to(tl.float32)
    tl.store(sums + row, tl.sum(total, axis=0))


@triton.jit
def widen8(weight, scale, out, num_inputs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_inputs
    values = tl.load(weight + row * num_inputs + columns, mask=mask, other=0).to(tl.float32) * tl.load(scale + row)
    tl.store(out + row * num_inputs + columns, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def widen4(weight, scale, out, num_inputs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    half = num_inputs // 2
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < half
    pairs = tl.load(weight + row * half + columns, mask=mask, other=0)
    groups = columns // GROUP
    own = scale + row * (num_inputs // GROUP) + groups
    low = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(own + half // GROUP, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    first = out + row * num_inputs + columns
    tl.store(first, (((pairs & 15).to(tl.float32) - 8.0) * low).to(dtype), mask=mask)
    tl.store(first + half, (((pairs >> 4).to(tl.float32) - 8.0) * high).to(dtype), mask=mask)


@triton.jit
def widen_eighths(weight, scale, out, num_inputs, BLOCK: tl.constexpr):
    """Weights as int16, scales as float16; see `pack4`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_inputs
    chunk, group, place = columns // (8 * GROUP), columns // GROUP % 8, columns % GROUP
    word = chunk * 64 + place // 2 * 4 + group // 4 * 2 + place % 2
    codes = tl.load(weight + row * (num_inputs // 4) + word, mask=mask, other=0) >> group % 4 * 4 & 15
    four = (chunk * 2 + group // 4) * tl.num_programs(0) + row
    factor = tl.load(scale + four * 4 + group % 4, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out + row * num_inputs + columns, ((codes - 8).to(tl.float32) * factor).to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def rotate(
    x,
    cos,
    sin,
    out,
    num_heads,
    num_tokens,
    table_rows,
    row_stride,
    token_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, place = token // num_tokens, token % num_tokens
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half_H = tl.arange(0, BLOCK_HALF)
    table, is_H = ((row % table_rows) * num_tokens + place) * 2 * HALF + half_H, half_H < HALF
    c_H = tl.load(cos + table, mask=is_H, other=0.0)[None, :]
    s_H = tl.load(sin + table, mask=is_H, other=0.0)[None, :]
    mask = _tile_mask(heads < num_heads, half_H, HALF)
    own = row * row_stride + place * token_stride + heads[:, None] * 2 * HALF + half_H[None, :]
    first, second = _halves(x, own, mask, HALF)
    dtype = out.dtype.element_ty
    target = out + token * num_heads * 2 * HALF + heads[:, None] * 2 * HALF + half_H[None, :]
    first, second = _rotated(first, second, c_H, s_H, dtype, True)
    tl.store(target, first, mask=mask)
    tl.store(target + HALF, second, mask=mask)


@triton.jit
def activate(x, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (_activated(gate, GELU) * up).to(out.dtype.element_ty), mask=mask)
