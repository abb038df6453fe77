"""Bounds are wide enough for roundings in any order, and too narrow for faults."""

import pytest
import torch
from torch import Tensor, nn

from tests.bounds import FACTOR, Float64, difference, jittered, largest, rounding_module, spread, sums, unit
from tests.llm.toys import CONFIG, forward, rounding, toy_decoder, toy_visual_queries


def orders_of(x: Tensor, weight: Tensor) -> list[Tensor]:
    """Products summed by torch, one term after the other, and with the terms in reversed order."""
    terms = x[:, None] * weight
    return [x @ weight.T, terms.cumsum(-1)[..., -1], terms.flip(-1).cumsum(-1)[..., -1], terms.sum(-1)]


@pytest.mark.parametrize("num_terms", [1, 40, 3000])
@pytest.mark.parametrize("is_positive", [False, True], ids=["both signs", "positive"])
def test_sums_in_any_order_are_within_the_bound_and_a_dropped_term_is_not(num_terms: int, is_positive: bool) -> None:
    x, weight = (torch.rand(20, num_terms, generator=torch.Generator().manual_seed(seed)) + 0.1 for seed in (0, 1))
    if not is_positive:
        x *= torch.randint(2, x.shape, generator=torch.Generator().manual_seed(2)) * 2 - 1
    exact, limit = x.double() @ weight.double().T, sums(x, weight)

    assert all(bool(((found - exact).abs() <= limit).all()) for found in orders_of(x, weight))
    assert bool(((x[:, 1:] @ weight[:, 1:].T - exact).abs() > limit).all())


def logits(decoder: nn.Module, *, exact: bool = False) -> Tensor:
    queries = toy_visual_queries(3)
    ids = torch.randint(CONFIG.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    if exact:
        with Float64():
            decoder = decoder.double()
            return decoder.logits(forward(decoder, ids, decoder.project_prefix(queries.double())))
    return decoder.logits(forward(decoder, ids, decoder.project_prefix(queries)))


def test_a_model_whose_sums_round_differently_is_within_its_spread_and_a_small_fault_is_not() -> None:
    plain = logits(toy_decoder())

    for seed in range(5):
        assert 0 < difference(logits(jittered(toy_decoder(), seed=seed)), plain) <= rounding()
    wrong = toy_decoder()
    wrong.layers[1].attention.out.weight.data *= 1.0001
    assert difference(logits(wrong), plain) > rounding()


def test_a_fault_does_not_widen_its_own_bound() -> None:
    wrong, exact = toy_decoder(), toy_decoder()
    for decoder in (wrong, exact):
        decoder.adapter.gates.zero_()

    assert spread(logits(wrong), logits(exact, exact=True)) < 2 * rounding()
    assert difference(logits(wrong), logits(toy_decoder())) > 1000 * rounding()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_parts_of_a_model_is_as_far_from_it_as_computing_in_the_type(dtype: torch.dtype) -> None:
    queries = toy_visual_queries(3).to(dtype)
    ids = torch.randint(CONFIG.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))
    half, exact = toy_decoder().to(dtype), logits(toy_decoder(), exact=True)
    computed = half.logits(forward(half, ids, half.project_prefix(queries)))
    measured = difference(logits(rounding_module(toy_decoder(), dtype)), exact)

    assert measured / FACTOR < difference(computed, exact) < FACTOR * measured


def test_rounding_once_is_within_the_unit() -> None:
    numbers = torch.linspace(1.0, 2.0, 5000, dtype=torch.float64)

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert 0.9 * unit(dtype) < largest((numbers.to(dtype).double() - numbers) / numbers) <= unit(dtype)
