"""Triton kernels compute what plain torch does: on a GPU if there is one, else in Triton's interpreter."""

# R rows, K inputs, N outputs

import functools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from triton.runtime.interpreter import interpreter_builder

from llama_adapter.llm.rotary import Rotary
from llama_adapter.runtime import operators
from llama_adapter.runtime.devices import open_backend, triton_calls
from llama_adapter.runtime.devices.cuda_linear import build_linear
from llama_adapter.runtime.devices.triton_calls import TUNINGS, Blocks, Step, Tuning, Weights, linear, pack4, widen
from llama_adapter.runtime.operators import ATEN
from llama_adapter.runtime.schemes import int4, int8
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.scheme import find_scheme
from tests.bounds import difference, largest, unit
from tests.fakes.cuda_linear import GATED, attended
from tests.llm.toys import CONFIG, FAMILIES, eager, rounding, toy_decoder, toy_visual_queries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]  # the interpreter has no bfloat16 dot
EPS = 1e-6
# Triton finds kernels in it by their source, its own version and all options, so that a later run compiles only others.
# Nothing is removed from it until `make clean`, which empties it.
CACHE = Path(__file__).resolve().parents[3] / ".pytest_cache" / "triton"
# Rows, inputs and outputs of products. Each of them, and each number of bits, has every activation once: what is
# computed behind a product does not depend on the bits.
SHAPES = [(1, 192, 80), (16, 128, 48), (20, 192, 80), (3, 768, 80), (70, 256, 48)]
PRODUCTS = [
    (bits, ("", "silu", "gelu_tanh")[(place + number) % 3], *shape)
    for place, bits in enumerate((16, 8, 4))
    for number, shape in enumerate(SHAPES)
]
# Where a test chooses the blocks, tunings differ in how they pack 4 bits, and on a GPU in when their kernels start.
NAMES = list(TUNINGS) if DEVICE == "cuda" else ["measured", "proposed"]
PACKED = [
    (name, bits, "silu" if bits == 8 or name == "proposed" else "")
    for name in NAMES
    for bits in (16, 8, 4)
    if DEVICE == "cuda" or name == "measured" or bits == 4
]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def weights_of(bits: int, num_outputs: int, num_inputs: int, *, dtype: torch.dtype) -> tuple[Weights, Tensor]:
    """Weights with a bias, and their values in float32."""
    weight = normal(num_outputs, num_inputs).cpu() / num_inputs**0.5
    bias = normal(num_outputs, dtype=dtype, seed=1)
    if bits == 16:
        stored = weight.to(DEVICE, dtype)
        return Weights(16, stored, None, bias), stored.float()
    if bits == 8:
        parts = int8.SCHEME.quantise(weight)
        stored, scale = parts[""], parts[int8.SCALE]
        return Weights(8, stored.to(DEVICE), scale.to(DEVICE), bias), int8.SCHEME.dequantise(parts).to(DEVICE)
    parts = int4.SCHEME.quantise(weight)
    stored, scale = pack4(parts[""], parts[int4.SCALE])
    return Weights(4, stored.to(DEVICE), scale.to(DEVICE), bias), int4.SCHEME.dequantise(parts).to(DEVICE)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether the relative error is one of rounding the results, and for 4 bits the products' scales, to `dtype`."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return bool(error < unit(dtype))


@pytest.fixture(params=NAMES)
def tuning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tuning:
    """Each way of computing products, in turn."""
    monkeypatch.setattr(triton_calls, "tuning", TUNINGS[request.param])
    return TUNINGS[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "activation", "num_rows", "num_inputs", "num_outputs"), PRODUCTS)
@pytest.mark.usefixtures("tuning")
def test_a_product_with_norm_activation_and_residual(
    bits: int, activation: str, num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> None:
    weights, wide_NK = weights_of(bits, num_outputs, num_inputs, dtype=dtype)
    x_RK, norm = normal(num_rows, num_inputs, dtype=dtype, seed=2), normal(num_inputs, dtype=dtype, seed=3)
    residual = normal(num_rows, num_outputs // (2 if activation else 1), dtype=dtype, seed=4)
    sums = x_RK.float().square().unflatten(1, (2, -1)).sum(-1).contiguous()

    found = linear(
        x_RK, weights, norm=norm, sums_RB=sums, eps=EPS, activation=activation, residual_RN=residual, with_sums=True
    )

    assert weights.bias is not None
    expected = operators.rms_norm(x_RK, norm, EPS).float() @ wide_NK.T + weights.bias.float()
    expected = GATED[activation](expected)
    assert near(found.x, expected + residual.float(), dtype)
    assert found.sums is not None
    torch.testing.assert_close(found.sums.sum(1), found.x.float().square().sum(1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "bits", "activation"),
    [(5, 16, ""), (40, 16, "silu"), (5, 8, "silu"), (40, 8, ""), (5, 4, ""), (40, 4, "gelu_tanh")],
)
@pytest.mark.usefixtures("tuning")
def test_steps_of_few_and_of_more_rows(num_rows: int, bits: int, activation: str) -> None:
    step, dtype = Step(), torch.float16
    out, out_NK = weights_of(bits, 256, 192, dtype=dtype)
    units, units_NK = weights_of(bits, 80, 256, dtype=dtype)
    residual, heads = normal(num_rows, 256, dtype=dtype, seed=2), normal(num_rows, 192, dtype=dtype, seed=3)
    norm = normal(256, dtype=dtype, seed=4)
    is_normed = bool(activation)  # behind the first layer

    hidden = step.add(residual, heads, out, norm=norm if is_normed else None, eps=EPS)
    found = step.project(hidden, units, norm=norm, eps=EPS, activation=activation, dtype=torch.float32)

    assert out.bias is not None
    assert units.bias is not None
    expected = F.linear(heads.float(), out_NK, out.bias.float())
    expected = residual.float() + (operators.rms_norm(expected, norm, EPS) if is_normed else expected)
    assert near(hidden.x, expected, dtype)
    expected = F.linear(operators.rms_norm(hidden.x.float(), norm, EPS), units_NK, units.bias.float())
    expected = GATED[activation](expected)
    assert found.dtype == torch.float32
    assert ((found - expected).norm() / expected.norm()).item() < 1e-3


@pytest.mark.parametrize(("tuning", "bits", "activation"), PACKED, indirect=["tuning"])
def test_programs_that_share_a_block_give_the_same_product_each_time(
    bits: int, activation: str, tuning: Tuning, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.float16
    weights, wide_NK = weights_of(bits, 80, 768, dtype=dtype)
    x_RK = normal(5, 768, dtype=dtype, seed=2)

    monkeypatch.setattr(triton_calls, "_LEAST_STEPS", 1)
    found = []
    for programs in (1, 9, 9, 5):
        blocks = Blocks(16, 32, 32 if weights.in_eighths else 64, 4, 2, programs)
        monkeypatch.setattr(triton_calls, "choose_blocks", lambda bits, num_rows, blocks=blocks: blocks)
        found.append(linear(x_RK, weights, activation=activation).x)

    assert weights.bias is not None
    expected = x_RK.float() @ wide_NK.T + weights.bias.float()
    assert all(near(each, GATED[activation](expected), dtype) for each in found)
    assert torch.equal(found[1], found[2])
    assert not bool(triton_calls._tickets(x_RK.device).any())


def test_each_stream_has_its_own_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = iter("aba")
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: next(streams))
    monkeypatch.setattr("torch.zeros", lambda *shape, **options: [shape])
    first, other, again = (triton_calls._tickets(torch.device("cuda", 99)) for _ in range(3))

    assert first is again is not other


@pytest.mark.parametrize(
    ("num_blocks", "num_steps", "splits"),
    [(400, 99, 1), (192, 99, 1), (96, 99, 2), (24, 99, 8), (24, 16, 4), (2, 3, 1)],
)
def test_few_blocks_are_shared_if_each_program_keeps_some_steps(num_blocks: int, num_steps: int, splits: int) -> None:
    assert triton_calls._choose_splits(num_blocks, num_steps, programs=192) == splits


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.usefixtures("tuning")
def test_a_row_is_the_same_alone_and_in_a_batch(bits: int) -> None:
    weights, _ = weights_of(bits, 80, 512, dtype=torch.float16)
    x_RK = normal(16, 512, dtype=torch.float16, seed=2)
    whole = linear(x_RK, weights).x

    assert all(torch.equal(linear(x_RK[:count], weights).x, whole[:count]) for count in (1, 5))


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_inputs", [192, 768])
@pytest.mark.usefixtures("tuning")
def test_widened_weights_are_those_of_the_scheme(num_inputs: int, bits: int, dtype: torch.dtype) -> None:
    weights, wide_NK = weights_of(bits, 40, num_inputs, dtype=dtype)

    assert torch.equal(widen(weights, dtype), wide_NK.to(dtype))


# Query heads, heads of keys, their size, and what attention does beside that of the first LLaMA.
ATTENTIONS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama": (3, 3, 32, {}),
    "no prefix": (3, 3, 32, {"num_queries": 0}),
    "blocks": (3, 3, 32, {"in_blocks": True}),
    "groups": (6, 2, 20, {"norm": "head"}),
    "all heads": (4, 2, 12, {"norm": "all", "in_blocks": True}),
    "window": (2, 1, 40, {"window": 40, "cap": 2.0, "in_blocks": True}),
    "one place": (2, 2, 16, {"window": 1, "is_rotated": False}),
    "large": (2, 1, 256, {"cap": 1.0, "num_queries": 0}),
}


def attention_of(
    case: tuple[int, int, int, dict[str, Any]],
    positions: list[int],
    *,
    num_places: int,
    dtype: torch.dtype,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The answer of the kernel, or of plain torch, and keys and values of the cache afterwards."""
    num_heads, num_kv_heads, head_dim, switches = case
    num_rows, num_queries = len(positions), switches.get("num_queries", 5)
    positions_R = torch.tensor(positions, device=DEVICE)
    qkv = normal(num_rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    shape = num_rows, num_kv_heads, num_places, head_dim
    k, v = (normal(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    own = qkv.unflatten(1, (-1, 1, head_dim))[:, num_heads : num_heads + num_kv_heads]
    for name, rows, places, factor in switches.get("times", ()):
        {"k": k, "v": v, "own": own}[name][rows, :, places] *= factor
    shape = num_rows, num_heads, num_queries, head_dim
    first, second = (normal(*shape, dtype=dtype, seed=seed) for seed in (3, 4))
    prefix = (first, second) if num_queries else None
    cos, sin = (torch.from_numpy(part).to(DEVICE) for part in Rotary().table(head_dim, context=num_places))
    table = (cos, sin) if switches.get("is_rotated", True) else None
    rules: dict[str, Any] = {name: switches[name] for name in ("cap", "window") if name in switches}
    if norm := switches.get("norm"):
        counts = (1, 1) if norm == "head" else (num_heads, num_kv_heads)
        rules |= {"norms": tuple(normal(count * head_dim, dtype=dtype, seed=5) for count in counts), "eps": EPS}
    if not fused:
        return attended(qkv, table, (k, v), positions_R, prefix, **rules), k, v
    if "in_blocks" not in switches:
        return Step().attend(qkv, table, (k, v), None, positions_R, prefix, **rules), k, v
    # Blocks of 64 places, in any order; the first is of no row.
    num_blocks = num_rows * num_places // 64
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(6)) + 1
    blocks = order.view(num_rows, -1).to(DEVICE)
    own_k, own_v = (x.new_zeros(1 + num_blocks, num_kv_heads, 64, head_dim) for x in (k, v))
    for whole, x in ((own_k, k), (own_v, v)):
        whole[blocks] = x.unflatten(2, (-1, 64)).transpose(1, 2)
    found = Step().attend(qkv, table, (own_k, own_v), blocks, positions_R, prefix, **rules)
    k, v = (whole[blocks].transpose(1, 2).flatten(2, 3) for whole in (own_k, own_v))
    return found, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_of_a_step(case: str, dtype: torch.dtype) -> None:
    (found, k, v), (expected, expected_k, expected_v) = (
        attention_of(ATTENTIONS[case], [5, 0, 97], num_places=128, dtype=dtype, fused=fused) for fused in (True, False)
    )

    assert near(found, expected, dtype)
    assert difference(k, expected_k) <= 2 * unit(dtype) * largest(expected_k)
    assert torch.equal(v, expected_v)


ALL = slice(None)
# Query heads, heads of keys, their size, positions, and switches; then the places of a part.
WINDOW = 3, 1, 40, [65, 540, 256], {"window": 190, "cap": 2.0, "in_blocks": True}
LONG: dict[str, tuple[tuple[int, int, int, list[int], dict[str, Any]], int]] = {
    "short rows": ((3, 3, 32, [0, 1, 63], {}), 64),
    "blocks": ((3, 3, 20, [64, 65, 540], {"in_blocks": True}), 256),
    "groups": ((3, 1, 12, [540], {"norm": "head", "num_queries": 0, "in_blocks": True}), 64),
    "all heads": ((4, 2, 32, [540, 0, 64], {"norm": "all", "cap": 2.0}), 256),
    "window over small parts": (WINDOW, 64),
    "window over large parts": (WINDOW, 256),
    "one place": ((2, 2, 16, [540, 64, 1], {"window": 1, "is_rotated": False}), 64),
    "highest first": ((1, 1, 32, [540, 400], {"times": [("k", ALL, slice(64), 80.0)]}), 256),
    "highest in the middle": ((1, 1, 32, [540, 400], {"times": [("k", ALL, slice(320, 384), 80.0)]}), 64),
}


@pytest.mark.parametrize("case", LONG)
def test_attention_in_parts_depends_on_no_order_of_programs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (*sizes, positions, switches), size = LONG[case]
    run = functools.partial(
        attention_of, (*sizes, switches), positions, num_places=576, dtype=torch.float32, fused=True
    )
    whole = run()
    monkeypatch.setattr(triton_calls, "tuning", replace(triton_calls.MEASURED, part_places=size))
    found = run()
    begin = interpreter_builder.set_grid_idx

    def begin_another(x: int, y: int, z: int) -> None:
        """The last parts of all rows and heads first, where the interpreter ends one row and head after another."""
        num_rows, num_heads, num_parts = interpreter_builder.grid_dim
        number = (x * num_heads + y) * num_parts + z
        part, head = divmod(number // num_rows, num_heads)
        begin(number % num_rows, head, num_parts - 1 - part)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", begin_another)
    again = run()

    expected = attention_of((*sizes, switches), positions, num_places=576, dtype=torch.float32, fused=False)
    for one in (found, again):
        torch.testing.assert_close(one[0], whole[0], atol=4e-6, rtol=4e-6)
        torch.testing.assert_close(one[0], expected[0], atol=1e-5, rtol=1e-5)
        assert all(torch.equal(*both) for both in zip(one[1:], whole[1:], strict=True))
    assert torch.equal(found[0], again[0])
    assert not bool(triton_calls._tickets(found[0].device).any())
    is_one_part = [min(position, switches.get("window", 576) + 63) <= size for position in positions]
    assert torch.equal(found[0][is_one_part], whole[0][is_one_part])


@pytest.mark.parametrize("changed", [("k", 1, 400), ("v", 1, 400), ("own", 1, ALL)])
def test_nan_in_a_part_gives_nan_in_exactly_its_row(changed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_calls, "tuning", replace(triton_calls.MEASURED, part_places=256))
    nan, empty = float("nan"), torch.Tensor.new_empty

    def filled(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        """Memory for parts too, so that none is read that nothing was written to."""
        return empty(x, *shape, **options).fill_(nan if x.is_floating_point() else 0)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)
    case = 2, 1, 16, {"times": [(*changed, nan)]}

    found, *_ = attention_of(case, [540, 420, 100], num_places=576, dtype=torch.float32, fused=True)

    assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False, True, False]


def test_attention_in_parts_has_the_same_bits_in_every_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """With split products between, which use the same counters. On a CPU, a small step is repeated."""
    num_rows, num_heads, num_places, times = (16, 32, 3000, 200) if DEVICE == "cuda" else (2, 4, 300, 1)
    monkeypatch.setattr(triton_calls, "tuning", TUNINGS["proposed"])
    monkeypatch.setattr(triton_calls, "_choose_splits", lambda *sizes, programs: 2)
    dtype, width = torch.float16, num_heads * 128
    qkv = normal(num_rows, 3 * width, dtype=dtype)
    cache = tuple(normal(1, num_heads, num_places, 128, dtype=dtype, seed=seed) for seed in (1, 2))
    k, v = (one.repeat(num_rows, 1, 1, 1) for one in cache)
    positions = torch.arange(num_rows, device=DEVICE) * 190 + 100  # of one part to as many as there are
    weights, _ = weights_of(16, 64, width, dtype=dtype)

    def steps() -> Tensor:
        heads = [Step().attend(qkv, None, (k, v), None, positions, None)]
        products = [linear(heads[0], weights).x]
        heads.append(Step().attend(qkv, None, (k, v), None, positions, None))
        products.append(linear(heads[1], weights).x)
        return torch.cat((*heads, *products), 1)

    expected = steps()  # compiles what a graph records
    graph = torch.cuda.CUDAGraph() if DEVICE == "cuda" else None
    if graph:
        with torch.cuda.graph(graph):
            found = steps()
    are_equal = []
    for _ in range(times):
        if graph:
            graph.replay()
        else:
            found = steps()
        are_equal.append(torch.equal(found, expected))

    assert all(are_equal)
    assert not bool(triton_calls._tickets(found.device).any())


@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_places", "window", "part_places", "num_parts"),
    [
        (1, 2, 256, 0, 256, 1),
        (16, 2, 4096, 0, 256, 16),
        (2, 2, 4096, 512, 256, 3),
        (2, 2, 4096, 192, 256, 1),
        (1, 2, 4096, 0, 0, 1),
        (17, 2, 4096, 0, 256, 1),
        (1, 256, 4096, 0, 256, 16),
        (1, 257, 4096, 0, 256, 1),  # 16 rows of it would have more heads than there are counters
    ],
)
def test_a_head_has_as_many_programs_as_the_context_of_its_cache_needs(
    num_rows: int,
    num_heads: int,
    num_places: int,
    window: int,
    part_places: int,
    num_parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(triton_calls, "_run", lambda kernel, grid, *arguments, **sizes: grids.append(grid))
    monkeypatch.setattr(triton_calls, "tuning", replace(triton_calls.MEASURED, part_places=part_places))
    qkv, positions = torch.zeros(num_rows, (num_heads + 2) * 8), torch.zeros(num_rows, dtype=torch.int64)

    for blocks, places in ((None, num_places), (torch.zeros(num_rows, 2, dtype=torch.int64), num_places // 2)):
        cache = torch.zeros(1, 1, places, 8), torch.zeros(1, 1, places, 8)
        Step().attend(qkv, None, cache, blocks, positions, None, window=window)

    assert grids == [(num_rows, num_heads, num_parts)] * 2


@pytest.mark.parametrize(("family", "part_places"), [*((family, 0) for family in (None, *FAMILIES)), (None, 64)])
@pytest.mark.proves("fused decode steps of other bases than LLaMA", "CUDA")
def test_a_whole_step_computes_what_the_modules_do(
    family: str | None, part_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_calls, "tuning", replace(triton_calls.tuning, part_places=part_places))
    config = replace(FAMILIES[family] if family else CONFIG, context=128, vocab_size=67)
    decoder, backend = toy_decoder(config).to(DEVICE, torch.float16), open_backend(DEVICE)
    plain, fused = (
        eager(decoder, num_slots=2, backend=backend, operators=operators, block=64, spare_blocks=1)
        for operators in (ATEN, replace(ATEN, step=Step()))
    )
    assert fused._fused is not None
    prompts = [range(1, 67), range(20, 29)]  # the first in two blocks, the second in one
    for runner in (plain, fused):
        prefixes = runner.project_prefix(toy_visual_queries(2, config=config))
        runner.prefill(prompts, prefixes, first_slot=0)
    expected, found = (runner.decode([7, 8], [66, 9]).logits_RV for runner in (plain, fused))

    assert difference(found, expected) <= rounding(config, dtype=torch.float16)
    alone = fused.decode([7], [66]).logits_RV  # a row does not depend on those beside it
    assert torch.equal(alone, found[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("table_rows", "head_dim"), [(1, 32), (2, 20)])
def test_rotary_positions_and_activations(table_rows: int, head_dim: int, dtype: torch.dtype) -> None:
    qkv = normal(2, 5, 9 * head_dim, dtype=dtype).unflatten(-1, (3, 3, head_dim))
    q_BSNH, k_BSNH, _ = qkv.unbind(2)
    cos, sin = map(torch.from_numpy, Rotary().table(head_dim, context=9))
    cos, sin = (
        torch.stack([part[row : row + 5] for row in range(table_rows)])[:, :, None].to(DEVICE) for part in (cos, sin)
    )
    expected = operators.rotate(q_BSNH, k_BSNH, cos, sin)

    for x, each in zip((q_BSNH, k_BSNH), expected, strict=True):
        # Ours rounds the result; torch also rounds the products before, which may be as large as the largest.
        assert difference(triton_calls.rotate(x, cos, sin), each) <= 4 * unit(dtype) * largest(each)
    gate_up = normal(2, 3, 80, dtype=dtype)
    for name in ("swiglu", "geglu"):
        wanted = getattr(operators, name)(gate_up.float()).to(dtype)
        assert difference(getattr(triton_calls, name)(gate_up), wanted) <= 2 * unit(dtype) * largest(wanted)


def test_embeddings_and_the_sums_of_their_squares() -> None:
    table, tokens = normal(7, 1100, dtype=torch.float16), torch.tensor([3, 0, 3], device=DEVICE)
    hidden = Step().embed(tokens, table)

    assert torch.equal(hidden.x, table[tokens])
    assert hidden.sums is not None
    torch.testing.assert_close(hidden.sums[:, 0], table[tokens].float().square().sum(1), atol=0.01, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "bias"), [((0,), True), ((1,), False), ((3, 7), True), ((100,), True), ((200,), False)]
)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_layer_computes_what_its_scheme_says(precision: str, shape: tuple[int, ...], bias: bool) -> None:
    scheme = find_scheme(precision)  # type: ignore[arg-type]
    layer = nn.Linear(192, 80, bias=bias).half().requires_grad_(False)
    parts = scheme.quantise(normal(80, 192).cpu() / 14)
    store_parts(layer, parts)
    built = build_linear(layer.to(DEVICE), precision, wanted="auto")  # type: ignore[arg-type]
    for dtype in (torch.float16, torch.float32):
        x = normal(*shape, 192, dtype=dtype, seed=2)
        assert built is not None
        if built.bias is not None:
            built.bias = built.bias.to(dtype)
        out = built(x)

        wide = scheme.dequantise(parts).to(DEVICE)
        bias_N = None if built.bias is None else built.bias.float()
        assert (out.dtype, out.shape) == (dtype, (*shape, 80))
        assert not len(x) or near(out, F.linear(x.float(), wide, bias_N), torch.float16)


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("bits", [8, 4])
def test_large_blocks_multiply_many_rows(bits: int, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_calls, "tuning", triton_calls.LARGE)
    weights, wide_NK = weights_of(bits, 144, 192, dtype=torch.float16)
    x_RK = normal(200, 192, dtype=torch.float16, seed=2)

    found = linear(x_RK, weights, activation=activation).x

    assert weights.bias is not None
    expected = GATED[activation](x_RK.float() @ wide_NK.T + weights.bias.float())
    assert near(found, expected, torch.float16)
    monkeypatch.setattr(triton_calls, "widen", lambda *_: pytest.fail("no weight is widened in memory"))
    assert weights.scale is not None
    if not activation:
        layer = triton_calls.PackedLinear(bits, weights.weight, weights.scale, weights.bias)
        assert torch.equal(layer(x_RK), found)


# Compute capabilities, the type of activations that is compiled for, and the bytes of shared memory that a program may
# use. What is compiled for an A100 also runs on GeForce RTX 30 and 40, which have less. Then an H100.
SHARED = {"80": ("fp16", 99 << 10), "90": ("bf16", 227 << 10)}


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # lines for debuggers take a tenth of the time
    arguments = [word for capability, (half, _) in SHARED.items() for word in (capability, half)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.devices.compile_triton", *arguments],
        env={**environment, "TRITON_CACHE_DIR": str(CACHE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    assert {capability: len(sizes) for capability, sizes in found.items()} == {"80": 17, "90": 30}
    for capability, sizes in found.items():
        assert {name: size for name, size in sizes.items() if size > SHARED[capability][1]} == {}
