"""The table of schemes: what each scheme stores, how much int8 changes weights, and that nothing else changes."""

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llama_adapter.app.models.random_model import random_model
from llama_adapter.app.models.sketch import expected_forms, sketch
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import BUNDLE_VERSIONS, PRECISIONS, QUANTISED, Precision
from llama_adapter.runtime.schemes.int4 import GROUP
from llama_adapter.runtime.schemes.int8 import INPUT_SCALE, quantise_rows, quantise_weight
from llama_adapter.runtime.schemes.layers import dequantise_linears, replace_quantised, store_parts
from llama_adapter.runtime.schemes.scheme import TensorForm, find_scheme, scheme_of
from llama_adapter.runtime.schemes.state import (
    cast,
    convert_precision,
    dequantise,
    linear_weights,
    loaded_bytes,
    precision_of,
    quantise,
)
from llama_adapter.vision.encoder import encoder_from_state
from tests.llm.toys import CONFIG, toy_decoder

PARTS = ("attention.qkv", "attention.out", "feed_forward.gate_up", "feed_forward.down")


def weights(rows: int, columns: int = 40, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_scheme_stores_the_tensors_that_it_declares(precision: str) -> None:
    scheme, weight = find_scheme(precision), weights(6)

    parts, forms = scheme.quantise(weight), scheme.forms((6, 40), torch.float32)

    assert scheme.name == precision
    assert tuple(forms) == tuple(parts) == scheme.suffixes
    assert forms == {suffix: TensorForm(tuple(part.shape), part.dtype) for suffix, part in parts.items()}
    assert not any(scheme.fault(suffix, part) for suffix, part in parts.items())
    assert scheme.dequantise(parts).shape == weight.shape


def test_schemes_differ_in_bundle_version_and_stored_dtype() -> None:
    schemes = [find_scheme(precision) for precision in PRECISIONS]

    assert BUNDLE_VERSIONS == {"float": 1, "int8": 2, "int4": 3}  # existing bundles have these versions
    assert len({scheme.weight_dtype for scheme in schemes}) == len(schemes)
    assert scheme_of(torch.float16) is None
    assert scheme_of(torch.int8) is find_scheme("int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int8_moves_no_weight_by_more_than_half_a_step_of_its_row(dtype: torch.dtype) -> None:
    weight = (weights(2500) * torch.logspace(-3, 2, 2500)[:, None]).to(dtype)

    values, scales = quantise_weight(weight)

    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert values.abs().amax(dim=1).tolist() == [127] * 2500
    for part, whole in zip(quantise_weight(weight[2049:2050]), (values, scales), strict=True):
        assert torch.equal(part, whole[2049:2050])
    error = (values.float() * scales[:, None] - weight.float()).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_int4_moves_weights_by_less_than_rounding_to_the_largest(dtype: torch.dtype) -> None:
    weight = (weights(50, 96) * torch.logspace(-3, 2, 50)[:, None]).to(dtype)
    weight[3, :32] = 0

    parts = find_scheme("int4").quantise(weight)
    back = find_scheme("int4").dequantise(parts)

    assert (parts[""].dtype, parts["_scale"].dtype) == (torch.uint8, torch.float16)
    steps = parts["_scale"].float().abs().repeat_interleave(GROUP, dim=1)
    error = (back - weight.float()).abs()
    # The largest weights of a group may be clipped, at most by a sixth of the range.
    assert bool((error <= 2.5 * steps).all())
    assert float((error <= 0.501 * steps).float().mean()) > 0.97
    # llama.cpp's Q4_0 always takes the largest weight over 8 as scale.
    groups = weight.float().unflatten(1, (-1, GROUP))
    widest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    plain = (groups / widest.where(widest != 0, 1.0)).round().clamp(-8, 7) * widest
    relative = (back - weight.float()).square().sum(1) / (plain.flatten(1) - weight.float()).square().sum(1)
    assert float(relative.mean()) < 0.96
    assert torch.equal(back[3, :32], torch.zeros(32))


@pytest.mark.parametrize("value", [0.0, 1e-44], ids=["zeros", "numbers whose scale would be 0"])
def test_int8_keeps_rows_of_zeros_with_scale_1(value: float) -> None:
    values, scales = quantise_weight(torch.full((3, 8), value))

    assert not values.any()
    assert scales.tolist() == [1.0] * 3


def test_int8_of_int8_is_the_same() -> None:
    values, scales = quantise_weight(weights(64, 200))
    [(_, restored)] = dequantise({"a.weight": values, "a.weight_scale": scales}, dtype=torch.float32)

    again, again_scales = quantise_weight(restored)

    assert torch.equal(again, values)
    torch.testing.assert_close(again_scales, scales, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("precision", "num_inputs", "factor", "reason"),
    [
        ("int8", 8, float("inf"), "a number is infinite or NaN"),
        ("int8", 8, float("nan"), "a number is infinite or NaN"),
        ("int4", 33, 1.0, "its number of inputs, 33, is odd"),
        ("int4", 32, 1e7, "a number is too large for a scale in float16"),
    ],
)
def test_weights_that_a_scheme_cannot_hold_are_refused_with_the_reason(
    precision: Precision, num_inputs: int, factor: float, reason: str
) -> None:
    head = nn.ModuleDict({"head": nn.Linear(num_inputs, 4, bias=False)})
    stored = quantise(
        [("head.weight", weights(4, num_inputs) * factor)], head, dtype=torch.float32, precision=precision
    )
    with pytest.raises(CheckpointError) as caught:
        dict(stored)
    bits = precision.removeprefix("int")
    assert caught.value.message == f"`head.weight` cannot have {bits}-bit weights: {reason}"


def test_only_linear_layers_are_quantised() -> None:
    decoder = toy_decoder()
    names = linear_weights(decoder)

    state = dict(quantise(decoder.state_dict().items(), decoder, dtype=torch.bfloat16, precision="int8"))

    assert names == {"head.weight", *(f"layers.{layer}.{part}.weight" for layer in range(3) for part in PARTS)}
    assert {name for name, tensor in state.items() if tensor.dtype == torch.int8} == names
    assert {name for name, tensor in state.items() if tensor.dtype == torch.float32} == {f"{n}_scale" for n in names}
    assert {tensor.dtype for tensor in state.values()} == {torch.int8, torch.float32, torch.bfloat16}
    forms = expected_forms(CONFIG, dtype=torch.bfloat16, precision="int8")
    assert forms == {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}


def test_tensors_are_quantised_one_by_one() -> None:
    taken = []

    def source() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            taken.append(number)
            yield f"{number}.weight", weights(4)

    layers = nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(3))
    passed = quantise(source(), layers, dtype=torch.float32, precision="int8")
    assert [next(passed)[0] for _ in range(2)] == ["0.weight", "0.weight_scale"]
    assert taken == [0]


def test_tensors_that_need_no_conversion_are_shared() -> None:
    model = random_model("tiny", dtype=torch.bfloat16, precision="int8")
    module = sketch(model.decoder_config)

    same = convert_precision(model.decoder_state, module, dtype=torch.bfloat16, wanted="int8")
    wider = dict(cast(model.decoder_state, dtype=torch.float32))

    assert precision_of(same) == "int8"
    assert all(same[name] is tensor for name, tensor in model.decoder_state.items())
    assert wider["embedding.weight"].dtype == torch.float32
    assert wider["head.weight"] is model.decoder_state["head.weight"]
    assert wider["head.weight_scale"] is model.decoder_state["head.weight_scale"]


def test_a_random_model_in_int8_is_the_float_one_rounded() -> None:
    plain = random_model("tiny", dtype=torch.float32)
    rounded = random_model("tiny", dtype=torch.float32, precision="int8")

    assert (plain.precision, rounded.precision) == ("float", "int8")
    for config, one, other in (
        (plain.vision_config, plain.vision_state, rounded.vision_state),
        (plain.decoder_config, plain.decoder_state, rounded.decoder_state),
    ):
        expected = convert_precision(one, sketch(config), dtype=torch.float32, wanted="int8")
        different = [name for name in expected if not torch.equal(expected[name], other[name])]
        # The row of the end token is set to zero after rounding, so its scale differs.
        assert different in ([], ["head.weight_scale"])
        assert expected.keys() == other.keys()


def test_modules_share_the_stored_tensors_and_become_plain_when_dequantised() -> None:
    model = random_model("tiny", dtype=torch.bfloat16, precision="int8")

    decoder = decoder_from_state(model.decoder_config, model.decoder_state)
    encoder = encoder_from_state(model.vision_config, model.vision_state)

    for module, state in ((decoder, model.decoder_state), (encoder, model.vision_state)):
        linears = [(name, child) for name, child in module.named_modules() if isinstance(child, nn.Linear)]
        assert linears
        for name, child in linears:
            assert child.weight.data_ptr() == state[f"{name}.weight"].data_ptr()
            assert child.get_buffer("weight_scale") is state[f"{name}.weight_scale"]
        plain = dict(dequantise(state, dtype=torch.bfloat16))
        dequantise_linears(module)
        assert {name: bool(torch.equal(tensor, plain[name])) for name, tensor in module.state_dict().items()} == (
            dict.fromkeys(plain, True)
        )
    assert encoder.dtype == torch.bfloat16


def test_dequantised_weights_are_counted_in_the_float_type() -> None:
    forms = [TensorForm((4, 8), torch.int8), TensorForm((4,), torch.float32), TensorForm((3,), torch.float16)]

    assert [loaded_bytes(form, dtype=torch.float16, is_dequantised=False) for form in forms] == [32, 16, 6]
    assert [loaded_bytes(form, dtype=torch.float16, is_dequantised=True) for form in forms] == [64, 16, 6]


@pytest.mark.parametrize("missing", ["head.weight_scale", "layers.1.attention.out.weight_scale"])
def test_quantised_weights_need_their_scales(missing: str) -> None:
    state = convert_precision(toy_decoder().state_dict(), sketch(CONFIG), dtype=torch.float32, wanted="int8")
    del state[missing]
    with pytest.raises(RuntimeError, match=missing.replace(".", r"\.")):
        decoder_from_state(CONFIG, state)


@pytest.mark.parametrize("precision", QUANTISED)
def test_layers_are_replaced_one_by_one_and_release_their_weights(precision: Precision) -> None:
    module = nn.Sequential(*(nn.Linear(64, 8) for _ in range(4)), nn.ModuleDict({"kept": nn.Linear(64, 8)}))
    for linear in [*module[:4], module[4]["kept"]]:
        store_parts(linear, find_scheme(precision).quantise(linear.weight))
    stored: list[weakref.ref[Tensor]] = []

    def build(linear: nn.Linear, found: Precision) -> nn.Module | None:
        assert found == precision
        if linear is module[4]["kept"]:
            return None
        alive = sum(ref() is not None for ref in stored)
        assert alive <= 1, "the layer before this one may still be named by the loop"
        stored.append(weakref.ref(linear.weight))
        return nn.Identity()

    replace_quantised(module, build)
    assert [type(child) for child in module[:4]] == [nn.Identity] * 4
    assert not any(ref() is not None for ref in stored)
    dequantise_linears(module)
    assert module[4]["kept"].weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_a_scale_are_rounded_by_it_and_saturate(dtype: torch.dtype) -> None:
    scale = torch.tensor([0.01])
    x = torch.cat([weights(3), 1000 * weights(1, seed=1), torch.zeros(1, 40)]).to(dtype)

    values, scales = quantise_rows(x, scale)

    levels = np.clip(np.rint(x.float().numpy() / np.float32(0.01)), -127, 127)
    assert values.dtype == torch.int8
    assert values.numpy().tolist() == levels.astype(np.int8).tolist()
    assert values[3].abs().amax() == 127
    assert scales.tolist() == scale.expand(5, 1).tolist()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_no_scale_and_spoils_no_other(broken: float) -> None:
    x = weights(3)
    x[1, 7] = broken

    scales = quantise_rows(x, torch.tensor([0.01]))[1]

    assert scales.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize(("largest", "scale"), [(254.0, 2.0), (0.0, 1.0)])
def test_calibrated_8_bit_weights_are_the_nearest_and_know_the_largest_input(largest: float, scale: float) -> None:
    scheme, weight = find_scheme("int8"), weights(6)
    assert scheme.observe is not None
    assert scheme.calibrate is not None
    x = weights(5) / weights(5).abs().max() * largest

    parts = dict(scheme.calibrate(weight, scheme.observe(scheme.observe(None, x), x / 2)))

    assert parts.pop(INPUT_SCALE).tolist() == [scale]
    assert all(torch.equal(parts[suffix], part) for suffix, part in scheme.quantise(weight).items())
    with pytest.raises(ValueError, match="infinite or NaN"):
        scheme.calibrate(weight, torch.tensor([float("nan")]))


def test_rows_are_rounded_alone() -> None:
    x = torch.cat([weights(3), torch.zeros(1, 40), 1000 * weights(1, seed=1)])

    values, scales = quantise_rows(x.bfloat16())

    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (5, 1))
    assert (values.abs().amax(1) == torch.tensor([127, 127, 127, 0, 127])).all()
    assert ((values * scales - x.bfloat16().float()).abs() <= scales * 0.5001).all()
