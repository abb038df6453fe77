"""Rounding calibrated with inputs keeps the outputs of a layer closer than nearest rounding."""

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_adapter.runtime.schemes import arrays, gptq
from llama_adapter.runtime.schemes.gptq import round_columns
from llama_adapter.runtime.schemes.int4 import GROUP, unpacked
from llama_adapter.runtime.schemes.scheme import Parts, TensorForm, find_scheme

INT4 = find_scheme("int4")
LEVELS = (-8, 7)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(num_rows: int, num_inputs: int) -> Tensor:
    """Inputs like those of real layers: most of their magnitude is in a few directions."""
    sizes = torch.logspace(0, -2, num_inputs)
    return (numbers(num_rows, num_inputs, seed=1) * sizes) @ numbers(num_inputs, num_inputs, seed=2)


def calibrate(weight: Tensor, x: Tensor) -> Parts:
    assert INT4.calibrate is not None
    return INT4.calibrate(weight, x.T @ x)


def nearest(weight: Tensor) -> Parts:
    """Rounded to nearest, with scales for which the errors of all weights count alike."""
    groups = weight.reshape(-1, GROUP)
    steps = torch.from_numpy(arrays.choose_scales(groups.numpy(), np.ones(GROUP, np.float32)))
    levels = (groups / steps).round().clamp(*LEVELS).reshape(weight.shape)
    return {"": torch.from_numpy(arrays.in_pairs(levels.numpy())), "_scale": steps.reshape(len(weight), -1).half()}


def output_error(weight: Tensor, parts: Parts, x: Tensor) -> float:
    expected = x @ weight.T
    return float((x @ INT4.dequantise(parts).T - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_inputs", [64, 96, 70])  # the last one ends inside a group
@pytest.mark.parametrize("num_rows", [3, 40, 1000])  # with fewer rows than inputs, H does not have full rank
def test_outputs_are_closer_than_with_nearest_rounding(num_inputs: int, num_rows: int) -> None:
    weight, x = numbers(48, num_inputs), correlated(num_rows, num_inputs)

    parts = calibrate(weight, x)

    forms = INT4.forms((48, num_inputs), torch.float32)
    assert forms == {suffix: TensorForm(tuple(part.shape), part.dtype) for suffix, part in parts.items()}
    assert not any(INT4.fault(suffix, part) for suffix, part in parts.items())
    assert output_error(weight, parts, x) < 0.75 * output_error(weight, INT4.quantise(weight), x)


def test_outliers_in_a_few_channels_take_nothing_from_the_others() -> None:
    weight, x = numbers(48, 96), correlated(1000, 96)
    plain = output_error(weight, calibrate(weight, x), x)
    x[:, ::31] *= 100
    weight[:, ::31] /= 100  # as after a norm with outliers in its weights; the outputs stay the same

    parts, expected = calibrate(weight, x), nearest(weight)

    assert output_error(weight, parts, x) < 2 * plain
    assert output_error(weight, parts, x) < 0.5 * output_error(weight, expected, x)


def test_inputs_without_correlation_give_nearest_rounding() -> None:
    weight = numbers(48, 96)
    assert INT4.calibrate is not None

    parts, expected = INT4.calibrate(weight, 3.0 * torch.eye(96)), nearest(weight)

    assert all(torch.equal(parts[suffix], expected[suffix]) for suffix in INT4.suffixes)


@pytest.mark.parametrize("dead", [slice(32, 64), slice(0, 96)])
def test_weights_of_inputs_that_are_always_0_are_rounded_to_nearest(dead: slice) -> None:
    weight, x = numbers(48, 96), correlated(500, 96)
    x[:, dead] = 0

    parts, expected = calibrate(weight, x), nearest(weight)

    assert torch.equal(unpacked(parts[""])[:, dead], unpacked(expected[""])[:, dead])
    assert torch.equal(parts["_scale"][:, dead.start // GROUP], expected["_scale"][:, dead.start // GROUP])
    if dead.stop < 96:
        assert output_error(weight, parts, x) < 0.75 * output_error(weight, expected, x)


def test_levels_are_those_of_the_papers_formulas() -> None:
    """Compares with the slow float64 form, which computes the inverse and eliminates the inputs from it one by one."""
    weight, x = numbers(5, 64), correlated(200, 64)
    hessian = x.T @ x
    scale = 0.4

    levels, scales = round_columns(
        weight, hessian, group=GROUP, choose_scales=lambda part, cost: torch.full((len(part), 1), scale), levels=LEVELS
    )

    diagonal = hessian.diagonal()
    groups = sorted(range(2), key=lambda number: -float(diagonal[number * GROUP :][:GROUP].sum()))
    order = [
        index
        for number in groups
        for index in sorted(range(number * GROUP, (number + 1) * GROUP), key=lambda index: -float(diagonal[index]))
    ]
    damped = hessian.double() + 0.01 * float(diagonal.median()) * torch.eye(64)
    inverse, rest = torch.linalg.inv(damped), weight.double().clone()
    expected = torch.zeros(5, 64, dtype=torch.float64)
    for index in order:
        expected[:, index] = (rest[:, index] / scale).round().clamp(*LEVELS)
        error = (rest[:, index] - expected[:, index] * scale) / inverse[index, index]
        rest -= error[:, None] * inverse[index]
        inverse -= inverse[:, index, None] * inverse[index] / inverse[index, index]
    assert torch.equal(levels, expected.float())
    assert torch.equal(scales, torch.full((5, 2), scale))


def test_outputs_are_rounded_alike_alone_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = numbers(10, 64), correlated(200, 64)
    whole = calibrate(weight, x)

    monkeypatch.setattr(gptq, "_OUTPUTS_AT_ONCE", 4)

    parts = calibrate(weight, x)
    assert all(torch.equal(parts[suffix], whole[suffix]) for suffix in INT4.suffixes)


def test_without_a_cholesky_factor_scales_are_chosen_by_the_size_of_inputs() -> None:
    weight = numbers(48, 64)
    diagonal = torch.logspace(3, -3, 64)
    hessian = torch.full((64, 64), 1e6).fill_diagonal_(0) + diagonal.diag()  # no damping makes this positive definite
    assert INT4.calibrate is not None

    parts, expected = INT4.calibrate(weight, hessian), nearest(weight)

    ours, theirs = (((INT4.dequantise(one) - weight).square() * diagonal).sum(1) for one in (parts, expected))
    assert bool((ours <= theirs * 1.03).all())  # fitted scales are nearly the best ones
    assert float(ours.sum()) < 0.9 * float(theirs.sum())
    assert float((unpacked(parts[""]) != unpacked(expected[""])).float().mean()) < 0.5


@pytest.mark.parametrize("damaged", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_and_scales_beyond_float16_are_refused(damaged: float) -> None:
    weight, x, at = numbers(4, 64), numbers(8, 64), (torch.tensor(2), torch.tensor(5))
    wrong = torch.tensor(damaged)
    for pair in ((weight.index_put(at, wrong), x), (weight, x.index_put(at, wrong))):
        with pytest.raises(ValueError, match="infinite"):
            calibrate(*pair)
    with pytest.raises(ValueError, match="large"):
        calibrate(1e8 * weight, correlated(50, 64))
