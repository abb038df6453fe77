"""Layers of 8 and 4 bits on NVIDIA GPUs, with simulated torch operators, compute the results defined by the scheme."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.cuda_linear import Int4Linear, Int8Linear, RoundedLinear, build_linear
from llama_adapter.runtime.schemes import Precision, int4
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.scheme import find_scheme
from tests.fakes.cuda_graphs import FakeCuda, HostCuda
from tests.fakes.cuda_linear import LinearOps, codes_of

NUM_INPUTS, NUM_OUTPUTS = 192, 80


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> LinearOps:
    ops = LinearOps()
    ops.install(monkeypatch)
    return ops


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def stored_linear(
    precision: Precision, *, num_inputs: int = NUM_INPUTS, num_outputs: int = NUM_OUTPUTS, bias: bool = True
) -> tuple[nn.Linear, Tensor]:
    """A quantised layer for bfloat16 activations, and its weight as defined by the scheme."""
    torch.manual_seed(0)
    linear = nn.Linear(num_inputs, num_outputs, bias=bias).bfloat16().requires_grad_(False)
    scheme = find_scheme(precision)
    parts = scheme.quantise(torch.randn(num_outputs, num_inputs) / num_inputs**0.5)
    store_parts(linear, parts)
    return linear, scheme.dequantise(parts)


def expected(x: Tensor, weight: Tensor, linear: nn.Linear) -> Tensor:
    out = x.float() @ weight.T
    return out if linear.bias is None else out + linear.bias.float()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (40,)])
@pytest.mark.parametrize(
    ("precision", "wanted", "made"),
    [("int8", "auto", Int8Linear), ("int8", "w8a8", RoundedLinear), ("int4", "auto", Int4Linear)],
)
def test_a_layer_computes_what_its_scheme_says(
    precision: Any, wanted: Any, made: type, shape: tuple[int, ...], bias: bool, ops: LinearOps
) -> None:
    linear, weight = stored_linear(precision, bias=bias)
    x = torch.randn(*shape, NUM_INPUTS).bfloat16()

    layer = build_linear(linear, precision, wanted=wanted)

    assert type(layer) is made
    out = layer(x)
    assert (out.dtype, out.shape) == (torch.bfloat16, (*shape, NUM_OUTPUTS))
    torch.testing.assert_close(out.float(), expected(x, weight, linear), atol=0.05, rtol=0.02)


def test_many_rows_are_multiplied_by_widened_weights(ops: LinearOps) -> None:
    layer = Int8Linear(stored_linear("int8")[0])
    for num_rows in (16, 17):
        layer(torch.randn(num_rows, NUM_INPUTS).bfloat16())

    assert ops.calls["_weight_int8pack_mm"] == 1


def test_8_bit_products_are_exact_in_float32(ops: LinearOps) -> None:
    linear, weight = stored_linear("int8")
    x = torch.randn(16, NUM_INPUTS)

    torch.testing.assert_close(Int8Linear(linear)(x), expected(x, weight, linear), atol=1e-5, rtol=1e-5)


def test_a_row_of_rounded_inputs_does_not_depend_on_others(ops: LinearOps) -> None:
    layer = RoundedLinear(stored_linear("int8")[0])
    x = torch.randn(40, NUM_INPUTS).bfloat16()
    x[3:5] = 0.0
    x[6] *= 1000

    assert torch.equal(layer(x[:1]), layer(x)[:1])
    assert layer(x).isfinite().all()


@pytest.mark.parametrize(("num_inputs", "tiles"), [(256, 8), (192, 4), (96, 2)])
def test_codes_of_4_bits_reach_their_place_in_the_tiles(num_inputs: int, tiles: int, ops: LinearOps) -> None:
    linear, weight = stored_linear("int4", num_inputs=num_inputs)
    stored = linear.weight.clone()

    layer = Int4Linear(linear)

    assert layer.packed.shape == (NUM_OUTPUTS // 8, num_inputs // 16 // tiles, 32, tiles // 2)
    assert torch.equal(codes_of(layer.packed), int4.unpacked(stored).long())
    scale, zero = layer.scales_and_zeros.float().repeat_interleave(32, 0).unbind(-1)
    widened = (codes_of(layer.packed) - 8) * scale.T + zero.T
    torch.testing.assert_close(widened, weight, atol=0, rtol=2**-8)  # the scales are bfloat16


def test_a_word_of_the_tiles_is_that_of_the_kernel(ops: LinearOps) -> None:
    stored = torch.randint(0, 256, (16, 64), dtype=torch.uint8)
    packed = torch._convert_weight_to_int4pack(stored, 4)
    n_tile, k_tile, lane, pair = 1, 1, 13, 1
    base = (k_tile * 4 + 2 * pair) * 8 + lane % 4
    v = [int(stored[n_tile * 8 + lane // 4, base + step]) for step in (0, 4, 8, 12)]

    word = sum((byte >> 4) << 4 * i | (byte & 15) << 4 * i + 16 for i, byte in enumerate(v))

    assert int(packed[n_tile, k_tile, lane, pair]) & 0xFFFFFFFF == word


def test_torchs_own_operator_for_the_cpu_agrees(ops: LinearOps) -> None:
    linear, _ = stored_linear("int4", bias=False)
    codes = int4.unpacked(linear.weight).int()
    layer, x = Int4Linear(linear), torch.randn(5, NUM_INPUTS).bfloat16()

    theirs = torch._weight_int4pack_mm_for_cpu(
        x, torch._convert_weight_to_int4pack_for_cpu(codes, 1), int4.GROUP, layer.scales_and_zeros
    )

    torch.testing.assert_close(layer(x).float(), theirs.float(), atol=0.03, rtol=0.02)


@pytest.mark.parametrize(
    ("precision", "wanted", "num_inputs", "num_outputs"),
    [("int4", "auto", 80, 80), ("int4", "auto", 64, 20), ("int8", "w8a8", 12, 80), ("int8", "w8a8", 64, 20)],
)
def test_sizes_that_no_operator_takes_are_left(
    precision: Any, wanted: Any, num_inputs: int, num_outputs: int, ops: LinearOps
) -> None:
    linear, _ = stored_linear(precision, num_inputs=num_inputs, num_outputs=num_outputs)

    assert build_linear(linear, precision, wanted=wanted) is None


@pytest.mark.parametrize(
    ("precision", "dtype", "wanted", "capability", "expected"),
    [
        ("float", torch.float16, "auto", (7, 0), True),
        ("int8", torch.float16, "auto", (7, 0), True),
        ("int8", torch.float32, "auto", (8, 0), True),
        ("int8", torch.bfloat16, "aten", (9, 0), False),
        ("int8", torch.bfloat16, "w8a8", (7, 5), True),
        ("int8", torch.float16, "w8a8", (7, 0), False),
        ("int4", torch.bfloat16, "auto", (8, 0), True),
        ("int4", torch.float16, "auto", (8, 0), False),
        ("int4", torch.bfloat16, "auto", (7, 5), False),
    ],
)
def test_a_gpu_computes_with_the_weights_that_its_operators_take(
    precision: Any, dtype: torch.dtype, wanted: Any, capability: tuple[int, int], expected: bool, cuda: Any, ops: Any
) -> None:
    cuda.capability = capability

    assert HostCuda().computes_in(precision, dtype, wanted=wanted) == expected
    assert HostCuda().refusal(precision, wanted=wanted) == ""


def test_a_torch_without_the_operators_widens(cuda: FakeCuda) -> None:
    for precision in ("int8", "int4"):
        assert not HostCuda().computes_in(precision, torch.bfloat16)


def test_layers_are_replaced_one_by_one_and_others_widened(cuda: FakeCuda, ops: LinearOps) -> None:
    fitting, other = stored_linear("int4")[0], stored_linear("int4", num_outputs=20)[0]
    module = nn.ModuleDict({"fitting": fitting, "other": other, "plain": nn.LayerNorm(4).bfloat16()})

    HostCuda().prepare(module)

    assert isinstance(module["fitting"], Int4Linear)
    assert isinstance(module["other"], nn.Linear)
    assert module["other"].weight.dtype == torch.bfloat16
