"""Weights of 8 and 4 bits on Ascend: the operators that each chip uses, and answers compared with widened weights.

Chips are tried with the real wheel and kernels run on the host (test_chips.py). Operators are compared with references
written from their documentation. The choice itself needs no torch_npu.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from llama_adapter.runtime.devices.npu_linear import (
    LINEAR,
    RoundedLinear310P,
    WeightOnlyLinear,
    build_linear,
    choose_linear,
)
from llama_adapter.runtime.devices.npu_operators import FAMILIES, UNKNOWN
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.scheme import find_scheme
from tests.llm.toys import rounding
from tests.npu.inside import linear_references
from tests.npu.inside.few_bits import CONFIG
from tests.npu.wheel import CHIPS, WHOLE_MODEL, FakeNpu

BY_NAME = {family.name: family for family in (*FAMILIES, UNKNOWN)}
FULL = SimpleNamespace(**linear_references.REFERENCES)
# Largest allowed difference of a log-probability from widened weights: in float16, and with inputs rounded to 8 bits.
TOLERANCE, ROUNDED_TOLERANCE = 0.05, 0.3
WEIGHT_ONLY, ROUNDED = "npu_weight_quant_batchmatmul", "npu_quant_matmul"
# For each chip, the operator that multiplies in float16, by precision and wanted operators. Refused combinations are
# missing.
ALLOWED = {
    "Ascend310P3": {"int8 auto": WEIGHT_ONLY, "int8 w8a8": ROUNDED},
    "Ascend910B3": {"int8 auto": WEIGHT_ONLY, "int8 w8a8": ROUNDED, "int4 auto": WEIGHT_ONLY},
    "Ascend910A": {},
    "Ascend310B1": {},
    "Ascend910_9391": {"int8 auto": WEIGHT_ONLY, "int8 w8a8": ROUNDED, "int4 auto": WEIGHT_ONLY},
    "Ascend950PR_9599": {"int8 auto": WEIGHT_ONLY, "int4 auto": WEIGHT_ONLY},
}
on_the_wheel = pytest.mark.npu_contract


def stored_linear(precision: Any, num_inputs: int, num_outputs: int) -> tuple[nn.Linear, torch.Tensor]:
    """A quantised layer, and its weight as defined by the scheme."""
    torch.manual_seed(0)
    linear = nn.Linear(num_inputs, num_outputs).half().requires_grad_(False)
    scheme = find_scheme(precision)
    parts = scheme.quantise(torch.randn(num_outputs, num_inputs))
    store_parts(linear, parts)
    return linear, scheme.dequantise(parts)


def built(linear: nn.Linear, precision: Any, family: str, *, wanted: Any = "auto", dtype: Any = torch.float16) -> Any:
    """The layer for a chip of this family, whose operators check their arguments for it."""
    linear_references.chip = family
    return build_linear(linear, dtype, precision=precision, family=BY_NAME[family], torch_npu=FULL, wanted=wanted)


@pytest.mark.parametrize("missing", sorted({name for one in LINEAR for name in one.needs}))
def test_an_older_torch_npu_without_an_operator_widens(missing: str) -> None:
    older = SimpleNamespace(**{name: value for name, value in vars(FULL).items() if name != missing})
    reasons = {
        choose_linear(BY_NAME["A2"], precision, torch.float16, torch_npu=older, wanted=wanted).reason
        for precision, wanted in (("int8", "auto"), ("int4", "auto"), ("int8", "w8a8"))
    }

    assert f"this torch_npu has no {missing}" in reasons


@pytest.mark.parametrize("family", BY_NAME)
def test_plain_operators_widen_on_every_chip(family: str) -> None:
    for precision in ("int8", "int4"):
        choice = choose_linear(BY_NAME[family], precision, torch.float16, torch_npu=FULL, wanted="aten")
        assert not choice.is_own
        assert choice.reason == "plain torch was asked for"


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "fits"), [(64, 8, True), (32, 8, False), (80, 8, False), (64, 12, False)]
)
def test_groups_of_4_bits_need_whole_groups_and_eight_outputs(num_inputs: int, num_outputs: int, fits: bool) -> None:
    linear, _ = stored_linear("int4", num_inputs, num_outputs)

    assert isinstance(built(linear, "int4", "A2"), WeightOnlyLinear) == fits


def test_a_layer_beyond_the_largest_sizes_or_with_scales_that_float16_cannot_hold_is_left() -> None:
    for num_outputs, fits in ((65535, True), (65536, False)):
        linear, _ = stored_linear("int8", 2, num_outputs)
        linear.weight_scale.fill_(0.01)
        assert isinstance(built(linear, "int8", "A2"), WeightOnlyLinear) == fits
    linear, _ = stored_linear("int8", 64, 8)
    linear.weight_scale[3] = 1e-5
    assert built(linear, "int8", "A2") is None
    assert isinstance(built(linear, "int8", "A2", dtype=torch.bfloat16), WeightOnlyLinear)
    assert built(linear, "int8", "A2", wanted="w8a8") is not None  # w8a8 keeps the scales in float32


@pytest.mark.parametrize("num_inputs", [64, 256, 320])
def test_4_bit_weights_keep_their_values_when_packed(num_inputs: int) -> None:
    linear, weight = stored_linear("int4", num_inputs, 24)

    layer = built(linear, "int4", "A3")

    levels = linear_references.unpacked(layer.weight)
    assert torch.equal((levels * layer.scale.float().repeat_interleave(32, 0)).T, weight)


@pytest.mark.parametrize("level", [127, -128])  # our files have no -128, those of other programs may
@pytest.mark.parametrize("size", [1.0, 3000.0])
def test_products_of_large_inputs_fit_into_float16_on_a_310p(size: float, level: int) -> None:
    linear, weight = stored_linear("int8", 512, 48)
    linear.weight[0] = level  # gives the largest sum
    weight[0] = level * linear.weight_scale[0]
    x = (torch.rand(5, 512) * size / 512).half()
    x[0] = 0.0
    x[1] = size / 512  # all inputs are rounded to the largest level

    layer = built(linear, "int8", "310P", wanted="w8a8")
    out = layer(x)

    assert isinstance(layer, RoundedLinear310P)
    assert out.isfinite().all()
    expected = x.float() @ weight.T + linear.bias.float()
    torch.testing.assert_close(out.float(), expected, atol=0.01 * float(expected.abs().max()), rtol=0.01)


@pytest.mark.parametrize("family", ["310P", "A2", "A3"])
def test_a_calibrated_layer_computes_with_its_scale_of_inputs(family: str) -> None:
    linear, _ = stored_linear("int8", 64, 48)
    linear.register_buffer("weight_input_scale", torch.tensor([0.01]))  # many inputs are above 1.27
    x = torch.randn(2, 5, 64).half()

    out = built(linear, "int8", family, wanted="w8a8")(x)

    levels = (x.float() / 0.01).round().clamp(-127, 127)
    expected = (levels @ linear.weight.float().T) * 0.01 * linear.weight_scale + linear.bias.float()
    assert levels.abs().max() == 127
    torch.testing.assert_close(out.float(), expected, rtol=2e-3, atol=2e-3)
    assert float((out - built(stored_linear("int8", 64, 48)[0], "int8", family, wanted="w8a8")(x)).abs().max()) > 0.1


@pytest.mark.slow
@on_the_wheel
@pytest.mark.parametrize("soc", CHIPS)
def test_a_chip_computes_with_what_is_documented_for_it(npu: FakeNpu, soc: str) -> None:
    report = npu.reports()[soc]["bits"]

    for way, entry in report.items():
        choice = entry["choices"]["float16"]
        allowed = ALLOWED[soc].get(way)
        assert choice["implementation"] == (allowed or "aten"), way
        assert (entry["refusal"] == "") == (allowed is not None), way
        assert allowed or choice["reason"] == entry["refusal"]
        assert entry["choices"]["float32"]["implementation"] == "aten"


@pytest.mark.slow
@on_the_wheel
@pytest.mark.parametrize("soc", WHOLE_MODEL)
@pytest.mark.proves("int8 weights", "NPU")
@pytest.mark.proves("int4 weights", "NPU")
def test_answers_are_those_of_widened_weights_or_the_chip_refuses(npu: FakeNpu, soc: str) -> None:
    for way, outcome in npu.reports()[soc]["few bits"].items():
        given, expected = outcome["embedded"]["given"], outcome["embedded"]["expected"]
        if way not in ALLOWED[soc]:
            assert f"does not compute with `--precision {way.split()[0]}`" in given["error"]
            assert "`--precision float`; `--operators aten` widens" in given["hint"]
            assert ("`--precision int8`" in given["hint"]) == (way == "int4 auto" and soc == "Ascend310P3")
            continue
        assert given["captions"] == expected["captions"], way
        assert len(given["captions"]) == 4
        tolerance = ROUNDED_TOLERANCE if "w8a8" in way else TOLERANCE
        for ours, theirs in zip(given["scores"], expected["scores"], strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance), way
        assert not any("widened" in note for note in given["notes"])
        assert "widened" in expected["notes"][-1]
        assert outcome["embedded"]["calls"][f"npu::{ALLOWED[soc][way]}"] > 0


@pytest.mark.slow
@on_the_wheel
@pytest.mark.parametrize("soc", WHOLE_MODEL)
def test_toy_decoders_give_the_scores_of_widened_weights(npu: FakeNpu, soc: str) -> None:
    for way, outcome in npu.reports()[soc]["few bits"].items():
        assert bool(outcome["toys"]) == (way in ALLOWED[soc])
        for toy in outcome["toys"]:
            rounded = rounding(CONFIG, dtype=getattr(torch, toy["dtype"]))
            tolerance = ROUNDED_TOLERANCE if "w8a8" in way else rounded
            assert toy["given"]["scores"] == pytest.approx(toy["expected"]["scores"], abs=tolerance), way
            assert toy["calls"][f"npu::{ALLOWED[soc][way]}"] > 0
    if soc == "Ascend910B3":
        # Weights are packed at load, and not in each step: three layers in each of two blocks. `down` is widened,
        # because it has no whole groups, and the head has 8 bits.
        toy = npu.reports()[soc]["few bits"]["int4 auto"]["toys"][0]
        assert toy["calls"]["npu::npu_convert_weight_to_int4pack"] == 6
