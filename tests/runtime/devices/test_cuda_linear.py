"""Layers of 8 and 4 bits on a simulated NVIDIA GPU: which kind of layer computes, and products of 8-bit integers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llama_adapter.runtime.devices.cuda import FUSED
from llama_adapter.runtime.devices.cuda_linear import RoundedLinear, build_linear
from llama_adapter.runtime.devices.triton_calls import PackedLinear
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.scheme import find_scheme
from tests.bounds import FACTOR, sums, unit
from tests.fakes import cuda_graphs, cuda_linear
from tests.fakes.cuda_graphs import FakeCuda, HostCuda
from tests.fakes.cuda_linear import LinearOps
from tests.llm.toys import CONFIG

NUM_INPUTS, NUM_OUTPUTS = 192, 80
cuda, ops = cuda_graphs.cuda, cuda_linear.ops  # fixtures


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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (40,), (200,)])
def test_a_layer_of_rounded_inputs_computes_what_its_scheme_says(
    shape: tuple[int, ...], bias: bool, ops: LinearOps
) -> None:
    linear, weight = stored_linear("int8", bias=bias)
    x = torch.randn(*shape, NUM_INPUTS).bfloat16()

    layer = build_linear(linear, "int8", wanted="w8a8")

    assert type(layer) is RoundedLinear
    out = layer(x)
    expected = x.float() @ weight.T + (0 if linear.bias is None else linear.bias.float())
    assert (out.dtype, out.shape) == (torch.bfloat16, (*shape, NUM_OUTPUTS))
    # Each product has the error of its input, which is rounded in even steps.
    errors = (x.double().abs().amax(-1, keepdim=True) / 127 / 12**0.5).expand(x.shape)
    of_products = 2 * FACTOR * (errors.square() @ weight.double().square().T).sqrt()
    limit = sums(x, weight, linear.bias) + unit(torch.bfloat16) * expected.double().abs() + of_products
    assert bool(((out.double() - expected.double()).abs() <= limit).all())


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_many_rows_and_floats_are_multiplied_by_widened_weights(precision: Any, bits: int, ops: LinearOps) -> None:
    layer = build_linear(stored_linear(precision, bias=False)[0], precision, wanted="auto")
    assert layer is not None
    for num_rows in (1, 192, 193):
        layer(torch.randn(num_rows, NUM_INPUTS).bfloat16())
    layer(torch.randn(1, NUM_INPUTS))

    assert ops.calls == {f"linear of {bits} bits": 2, f"widen {bits} bits": 2}


def test_a_row_of_rounded_inputs_does_not_depend_on_others(ops: LinearOps) -> None:
    layer = RoundedLinear(stored_linear("int8")[0])
    x = torch.randn(40, NUM_INPUTS).bfloat16()
    x[3:5] = 0.0
    x[6] *= 1000

    assert torch.equal(layer(x[:1]), layer(x)[:1])
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("shape", [(1,), (3, 7), (40,)])
def test_a_calibrated_layer_computes_with_its_scale_of_inputs(shape: tuple[int, ...], ops: LinearOps) -> None:
    linear, _ = stored_linear("int8")
    x = torch.randn(*shape, NUM_INPUTS)
    linear.register_buffer("weight_input_scale", torch.tensor([0.01]))  # many inputs are above 1.27

    out = RoundedLinear(linear)(x)

    levels = np.clip(np.rint(x.numpy() / np.float32(0.01)), -127, 127).astype(np.int64)
    sums = levels @ linear.weight.numpy().astype(np.int64).T
    expected = sums * np.float64(0.01) * linear.weight_scale.numpy() + linear.bias.float().numpy()
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(levels).max() == 127
    assert (out - RoundedLinear(stored_linear("int8")[0])(x)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("precision", "wanted", "num_inputs", "num_outputs"),
    [("int4", "auto", 96, 80), ("int8", "w8a8", 12, 80), ("int8", "w8a8", 64, 20)],
)
def test_sizes_that_no_operator_takes_are_left(
    precision: Any, wanted: Any, num_inputs: int, num_outputs: int, ops: LinearOps
) -> None:
    linear, _ = stored_linear(precision, num_inputs=num_inputs, num_outputs=num_outputs)

    assert build_linear(linear, precision, wanted=wanted) is None


@pytest.mark.parametrize(
    ("precision", "wanted", "capability", "expected"),
    [
        ("float", "auto", (7, 0), True),
        ("int8", "auto", (7, 5), False),
        ("int8", "auto", (8, 0), True),
        ("int8", "aten", (9, 0), False),
        ("int8", "w8a8", (7, 5), True),
        ("int8", "w8a8", (7, 0), False),
        ("int4", "auto", (8, 0), True),
        ("int4", "auto", (7, 5), False),
    ],
)
def test_a_gpu_computes_with_the_weights_that_its_operators_take(
    precision: Any, wanted: Any, capability: tuple[int, int], expected: bool, cuda: FakeCuda, ops: LinearOps
) -> None:
    cuda.capability = capability

    for dtype in (torch.float32, torch.bfloat16):
        assert HostCuda().computes_in(precision, dtype, wanted=wanted) == expected
    assert HostCuda().refusal(precision, wanted=wanted) == ""


def broken(gate_up: Tensor) -> Tensor:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ("importlib.util.find_spec", lambda name: None, "triton is not installed"),
        ("torch.version.hip", "6.4", "they are written for NVIDIA GPUs"),
        (
            "llama_adapter.runtime.devices.triton_calls.swiglu",
            broken,
            "Failed to find C compiler. Please specify via CC environment variable.",
        ),
    ],
)
def test_without_kernels_torch_computes_with_widened_weights(
    place: str, value: Any, fault: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, value)
    gpu = HostCuda()

    assert gpu.triton_fault == fault
    assert not any(gpu.computes_in(precision, torch.bfloat16) for precision in ("int8", "int4"))
    operators = gpu.choose_operators(CONFIG, dtype=torch.bfloat16, wanted="auto", mode="eager")
    assert operators == replace(FUSED, note=operators.note)
    assert operators.note == f"torch computes in place of the Triton kernels, which cannot run here: {fault}"


def test_layers_are_replaced_one_by_one_and_others_widened(cuda: FakeCuda, ops: LinearOps) -> None:
    fitting, other = stored_linear("int4")[0], stored_linear("int4", num_inputs=96)[0]
    module = nn.ModuleDict({"fitting": fitting, "other": other, "plain": nn.LayerNorm(4).bfloat16()})

    HostCuda().prepare(module)

    assert isinstance(module["fitting"], PackedLinear)
    assert isinstance(module["other"], nn.Linear)
    assert module["other"].weight.dtype == torch.bfloat16
