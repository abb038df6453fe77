"""The sampling distribution equals the reference's, and draws follow it."""

import itertools
import json
from collections import Counter, abc
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.engine.sequence import Sequence
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.draw import NO_TOKEN, Draw, Rules
from llama_adapter.llm.runners.numpy_sampler import choose as choose_on_host
from llama_adapter.llm.runners.numpy_sampler import log_softmax
from llama_adapter.llm.runners.sampler import choose, predict
from tests.llm.toys import Alternating, kept_distribution

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "cases.json").read_text())["sampling"]


def sample_by_both(logits: torch.Tensor, draws: abc.Sequence[Draw | None]) -> list[int]:
    """The token of each row, which torch and the host choose alike."""
    ids: list[int] = choose(predict(logits), draws, upload=torch.tensor).tolist()
    assert choose_on_host(logits.numpy(), draws) == ids
    return ids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_distribution_equals_the_reference(case: dict[str, object]) -> None:
    tensors = load_file(GOLDEN / "data/sampling.safetensors")
    name, temperature = case["name"], case["temperature"]
    if temperature is None:
        probabilities = tensors[f"{name}/probs_in"]
    else:
        probabilities = (tensors[f"{name}/logits"] / temperature).softmax(-1)
    kept = kept_distribution(probabilities, top_p=case["top_p"])
    assert (kept > 0).sum(-1).tolist() == case["kept"]
    torch.testing.assert_close(kept, tensors[f"{name}/probs"], atol=1e-6, rtol=0)


def test_draws_fall_on_tokens_in_proportion_to_the_kept_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5]])
    expected = kept_distribution((logits / 0.8).softmax(-1), top_p=0.8)[0]
    count = 4000
    draws = [Draw(0.8, 0.8, 0, (index + 0.5) / count) for index in range(count)]
    frequencies = Counter(sample_by_both(logits.expand(count, -1), draws))
    measured = torch.tensor([frequencies[token] / count for token in range(5)])
    torch.testing.assert_close(measured, expected, atol=2e-3, rtol=0)


def test_top_k_keeps_k_tokens_and_top_p_counts_what_is_left() -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    torch.testing.assert_close(
        kept_distribution(probabilities, top_p=1.0, top_k=2), torch.tensor([[4 / 7, 3 / 7, 0, 0]])
    )
    # The first token has 0.4 of the remaining 0.7, which is more than half, so the second token is dropped as well.
    torch.testing.assert_close(kept_distribution(probabilities, top_p=0.5, top_k=2), torch.tensor([[1.0, 0, 0, 0]]))


@pytest.mark.parametrize("top_p", [0.1, 0.75, 0.95, 0.9999, 1.0])
def test_the_host_draws_as_torch_from_a_large_vocabulary(top_p: float) -> None:
    """The host sorts only likely tokens where they are enough."""
    logits = torch.randn(60, 5000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[3.0], [8.0]]).tile(
        30, 1
    )
    logits[:, ::30] = 1.0  # ties
    sample_by_both(logits, [Draw(temperature=0.7, top_p=top_p, top_k=0, uniform=(row + 0.5) / 60) for row in range(60)])


def test_rows_of_a_batch_are_drawn_each_in_its_own_way() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(300, 40, generator=generator) * 6
    uniforms = torch.rand(300, generator=generator).tolist()
    draws = [
        None if row % 5 == 0 else Draw(0.3 + row % 7, (row % 11) / 10, row % 4 * 3, uniforms[row]) for row in range(300)
    ]
    draws[11] = Draw(1.2, 0.9, 0, 0.7, 0.2, Rules(answer=(4,), constraint=Alternating()))

    assert sample_by_both(logits, draws)[11] % 2 == 1


def test_a_draw_between_two_tokens_does_not_depend_on_the_top_k_of_another_row() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(17)) * 2
    cumulative = logits.softmax(-1).sort(descending=True)[0].cumsum(-1)[0]
    for border in (cumulative / cumulative[-1]).tolist():
        draws = [Draw(1.0, 1.0, 0, border), Draw(1.0, 1.0, 5, 0.5)]
        together = choose(predict(logits.expand(2, -1)), draws, upload=torch.tensor)
        assert together[0] == choose(predict(logits), draws[:1], upload=torch.tensor)


def test_extreme_draws_stay_on_kept_tokens() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    kept = kept_distribution(logits.softmax(-1), top_p=0.5)[0]
    for uniform in (0.0, 1.0 - 2**-53, 1.0):
        (token,) = sample_by_both(logits, [Draw(1.0, 0.5, 0, uniform)])
        assert kept[token] > 0


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.proves("repetition penalty", "CPU")
@pytest.mark.proves("presence and frequency penalties, min-p", "CPU")
def test_all_rules_together_keep_the_tokens_and_probabilities_of_transformers(seed: int) -> None:
    random, is_on_device = Random(seed), seed % 2 == 1
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 3
    prompt, answer = ([random.randrange(30) for _ in range(random.randrange(8))] for _ in range(2))
    repetition, presence, frequency = random.choice([1.0, 0.7, 1.4]), random.uniform(-2, 2), random.uniform(-2, 2)
    temperature, min_p, top_k = random.uniform(0.5, 2), random.choice([0.0, 0.02, 0.2, 1.0]), random.choice([0, 5, 20])
    counts = Counter(answer)
    # OpenAI's penalties as its reference defines them; transformers has none.
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + answer]).long(), logits.clone())
    for token, count in counts.items():
        expected[0, token] -= count * frequency + presence
    warpers = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k or 30), TopPLogitsWarper(1.0)]
    warpers += [MinPLogitsWarper(min_p)]
    wanted = LogitsProcessorList(warpers)(torch.tensor([prompt]), expected).softmax(-1)[0]

    known = answer[:-1] if is_on_device else answer
    rules = Rules(repetition, presence, frequency, prompt, known, has_unread=is_on_device and bool(answer))
    newest = torch.tensor([29, *(answer[-1:] or [0])]).repeat_interleave(400)
    uniforms = [(index + 0.5) / 400 for index in range(400)]
    draws = [None] * 400 + [Draw(temperature, 1.0, top_k, uniform, min_p, rules) for uniform in uniforms]
    both = choose(predict(logits.expand(800, -1)), draws, upload=torch.tensor, newest_R=newest).tolist()
    best, ids = both[:400], both[400:]

    assert {*best} == {int(logits.argmax())}
    measured = torch.tensor([ids.count(token) / 400 for token in range(30)])
    torch.testing.assert_close(measured, wanted, atol=2 / 400, rtol=0)
    assert all(wanted[token] > 0 for token in ids)
    if not is_on_device:
        assert choose_on_host(logits.numpy().repeat(800, 0), draws) == both


def first_draw(**sampling: float) -> Draw | None:
    prefix, params = Prefix(torch.zeros(1), torch.zeros(1)), SamplingParams(**sampling)  # type: ignore[arg-type]
    request = GenerateRequest(id=0, prompt_ids=(1,), prefix=prefix, sampling=params)
    return Sequence(request, row=0, max_new_tokens=1).next_draw()


def test_each_seed_has_its_own_random_numbers() -> None:
    draws = [first_draw(temperature=1.0, seed=seed) for seed in (-2, -1, 0, 1, 2, 2**64 - 1)]
    assert len({draw.uniform for draw in draws if draw is not None}) == len(draws)
    assert draws[1] == first_draw(temperature=1.0, seed=-1)


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-7, 1e-40, 1e-320, 0.0])
def test_tiny_temperatures_take_the_best_token(temperature: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 30
    draw = first_draw(temperature=temperature, top_k=10**30, seed=0)
    assert (draw is None) == (temperature < 1e-6)
    with np.errstate(all="raise"):  # as notebooks of numerics set it
        assert sample_by_both(logits, [draw] * 3) == logits.argmax(-1).tolist()


def test_log_probabilities_do_not_depend_on_numpys_error_state() -> None:
    logits = torch.tensor([[0.0, -95.0, -200.0], [float("inf"), 0.0, 0.0]])
    with np.errstate(all="raise"):
        found = log_softmax(logits.numpy())
    np.testing.assert_allclose(found[0], logits[0].log_softmax(-1))


def test_row_that_is_not_finite_has_no_token() -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    draw = Draw(1.0, 0.75, 0, 0.3)
    expected = sample_by_both(logits, [draw] * 3)
    for value, own in itertools.product((float("nan"), float("inf")), (draw, None)):
        broken = logits.clone()
        broken[1, 7] = value
        assert sample_by_both(broken, [draw, own, draw]) == [expected[0], NO_TOKEN, expected[2]]


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 2.5},
        {"top_k": 1.5},
        {"temperature": "1"},
        {"max_new_tokens": -1},
        {"top_p": 1.5},
        {"top_k": -1},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"top_p": True},
        {"min_p": 1.01},
        {"presence_penalty": -2.1},
        {"frequency_penalty": float("nan")},
        {"seed": True},
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingParams(**options)  # type: ignore[arg-type]
