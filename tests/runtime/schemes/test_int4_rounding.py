"""The kernels round weights to 4 bits in exactly the same way as numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_adapter.runtime.kernels.library import Finding, Library
from llama_adapter.runtime.schemes import arrays, int4
from llama_adapter.runtime.schemes.int4 import GROUP, quantise_groups
from llama_adapter.runtime.schemes.scheme import find_scheme

Rounded = tuple[Tensor, Tensor]


@pytest.fixture(name="by_numpy")
def by_numpy_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Rounded]:
    def round_groups(weight: Tensor) -> Rounded:
        with monkeypatch.context() as patch:
            patch.setattr(int4, "find_library", lambda: Finding(library=None, reason="no compiler"))
            return quantise_groups(weight)

    return round_groups


@pytest.fixture(name="asked_again")
def asked_again_fixture(library: Library, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the library; returns a list of the numbers of groups that are rounded again in numpy's order from now on."""
    monkeypatch.setattr(int4, "find_library", lambda: Finding(library=library))
    own, asked = arrays._round_groups, list[int]()

    def counted(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        asked.append(len(weight))
        return own(weight)

    monkeypatch.setattr(arrays, "_round_groups", counted)
    return asked


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def powers(smallest: int, largest: int) -> Tensor:
    """Rows of random numbers with magnitudes from 2^smallest to 2^largest."""
    return normal(400, 96, seed=1) * torch.logspace(smallest, largest, 400, base=2.0)[:, None]


def with_zeros() -> Tensor:
    weight = normal(300, 128, seed=2) * (normal(300, 128, seed=3) > 1.0)
    weight[::3] = 0.0
    weight[1::3] *= -0.0
    return weight


def opposite() -> Tensor:
    """The largest number of each group also occurs negated, in both orders."""
    weight = normal(200, 64, seed=4).clamp_(-2.0, 2.0)
    weight[:, 3], weight[:, 17] = 2.5, -2.5
    weight[100:, [3, 17]] *= -1.0
    return weight


WEIGHTS: dict[str, Callable[[], Tensor]] = {
    "random": lambda: normal(500, 256),
    "rows that end within a group": lambda: normal(70, 130),
    "one narrow row": lambda: normal(1, 2),
    "tiny": lambda: powers(-45, -10),
    "small enough for subnormal scales": lambda: powers(-24, -16),
    "large": lambda: powers(5, 13),
    "zeros": with_zeros,
    "constant": lambda: torch.full((3, 64), 0.37) * torch.tensor([1.0, -1.0, 1e-3])[:, None],
    "opposite": opposite,
    "few values": lambda: normal(300, 96, seed=5).mul_(3).round_(),
    "subnormal": lambda: torch.full((2, 64), 1e-41),
}

TIED = ("small enough for subnormal scales", "constant")  # scales of both signs are often equally good


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_codes_and_scales_are_those_of_numpy(
    name: str, dtype: torch.dtype, asked_again: list[int], by_numpy: Callable[[Tensor], Rounded]
) -> None:
    weight = WEIGHTS[name]().to(dtype)

    codes, scales = quantise_groups(weight)

    asked = sum(asked_again)
    expected_codes, expected_scales = by_numpy(weight)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)
    assert asked <= 0.1 * scales.numel() or name in TIED


def test_views_and_parts_are_rounded_alike(
    asked_again: list[int], by_numpy: Callable[[Tensor], Rounded], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = normal(256, 40).T[:, 7:]
    monkeypatch.setattr(int4, "_NUMBERS_FOR_KERNELS", 3 * weight.shape[1])

    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        ours = quantise_groups(weight)
        torch.set_num_threads(before)

        assert all(map(torch.equal, ours, by_numpy(weight)))


def test_two_scales_that_are_equally_good_are_rounded_again(
    asked_again: list[int], by_numpy: Callable[[Tensor], Rounded]
) -> None:
    weight = normal(800, GROUP, seed=6)
    weight[:, 0], weight[:, 1] = 4.0, 0.0
    first, clipped, opposite = (-0.5 * factor for factor in arrays.FACTORS)
    is_first_better = squared_errors(weight, first) < squared_errors(weight, opposite)
    # Move one weight, by bisection, until two scales have the same error.
    low, high = torch.zeros(800), torch.full((800,), 3.9)
    for _ in range(40):
        weight[:, 1] = (low + high) / 2
        is_same_side = (squared_errors(weight, first) < squared_errors(weight, opposite)) == is_first_better
        low, high = torch.where(is_same_side, weight[:, 1], low), torch.where(is_same_side, high, weight[:, 1])
    weight = torch.cat([weight, weight])
    weight[:800, 1], weight[800:, 1] = low, high
    least = squared_errors(weight, first)
    is_tied = ((squared_errors(weight, opposite) / least - 1).abs() < 1e-6) & (squared_errors(weight, clipped) > least)
    asked_again.clear()

    ours = quantise_groups(weight)

    assert sum(asked_again) >= int(is_tied.sum()) >= 20
    assert all(map(torch.equal, ours, by_numpy(weight)))


def squared_errors(weight: Tensor, step: float) -> Tensor:
    """The squared errors of rows rounded with this step, weighted for a largest weight of 4, and summed by torch."""
    steps = torch.tensor(step).half().float()
    rounded = (weight / steps).round().clamp(-8, 7) * steps
    return ((rounded - weight).square() * (1 + 2 * (weight / 4).square())).sum(-1)


@pytest.mark.parametrize("damaged", [float("nan"), float("inf"), -float("inf"), 524_160.0, -1e30])
def test_the_kernels_refuse_what_numpy_refuses(damaged: float, asked_again: list[int]) -> None:
    weight = normal(4, 64)
    weight[2, 5] = damaged

    with pytest.raises(ValueError, match=r"infinite|large"):
        find_scheme("int4").quantise(weight)

    assert asked_again == [1]


def test_the_largest_weights_that_float16_scales(asked_again: list[int], by_numpy: Callable[[Tensor], Rounded]) -> None:
    weight = torch.zeros(2, GROUP)
    weight[0, 4], weight[1, 9] = 524_159.0, -524_159.0

    ours = quantise_groups(weight)

    assert not asked_again
    assert ours[1].abs().tolist() == [[65504.0]] * 2
    assert all(map(torch.equal, ours, by_numpy(weight)))
