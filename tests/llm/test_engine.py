"""The engine's guarantees, with random weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.runners.base import DecodePlan
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT
from llama_adapter.runtime.devices import CpuBackend
from tests.llm.toys import (
    CONFIG,
    EOS_ID,
    FAMILIES,
    SMALL,
    WHOLE_CONTEXT,
    Alternating,
    QueuedBackend,
    answer,
    drain,
    eager,
    forward,
    rounding,
    toy_decoder,
    toy_engine,
    toy_prompts,
    toy_requests,
    toy_visual_queries,
)

PROMPTS = toy_prompts(16)
SMALL_PROMPTS = [tuple(token % SMALL.vocab_size for token in prompt[:9]) for prompt in toy_prompts(9, longest=12)]


def test_end_token_stops_a_row_and_is_not_returned() -> None:
    engine = toy_engine(toy_decoder(), num_slots=4)
    (request,) = toy_requests(engine, PROMPTS[:1], sampling=[SamplingParams(max_new_tokens=30)])
    free_running, _ = answer(engine, [request])[0]
    # If the fifth token is the end token, the answer stops just before its first occurrence.
    end_id = free_running[4]
    expected = free_running[: free_running.index(end_id)], "stop"
    copies = [replace(request, id=copy) for copy in range(3)]
    assert answer(Engine(engine._runner, eos_id=end_id), copies) == dict.fromkeys(range(3), expected)


@pytest.mark.parametrize(
    ("prompt_length", "limits", "known_ids", "num_tokens"),
    [
        (60, {"max_new_tokens": 50}, (), CONFIG.context - 60),
        (CONFIG.context, {"max_new_tokens": 50}, (), 0),
        (5, {"max_new_tokens": 0}, (), 0),
        (5, {"max_new_tokens": 3}, (6, 7), 1),
        (5, {"max_new_tokens": 3}, (6, 7, 8), 0),
        *(
            (5, {"max_new_tokens": 20, "max_length": most}, (), num)
            for most, num in ((8, 3), (5, 0), (4, 0), (1000, 20))
        ),
    ],
)
def test_context_lengths_and_known_tokens_bound_the_answer(
    prompt_length: int, limits: dict[str, int], known_ids: tuple[int, ...], num_tokens: int
) -> None:
    engine = toy_engine(toy_decoder(), num_slots=2, eos_id=-7)
    prompt = tuple([1] * prompt_length)
    (request,) = toy_requests(engine, [prompt], sampling=[SamplingParams(**limits)])  # type: ignore[arg-type]
    ids, finish = answer(engine, [replace(request, known_ids=known_ids)])[0]
    assert (len(ids), finish) == (num_tokens, "length")


def test_prompts_that_the_model_cannot_answer_are_refused() -> None:
    engine = toy_engine(toy_decoder(), num_slots=1)
    for prompt_length, continuations, num_tokens in ((65, (), 65), (64, ((5, 6, 7),), 66)):
        with pytest.raises(PromptTooLongError) as caught:
            engine.check(tuple([1] * prompt_length), continuations)
        assert (caught.value.num_tokens, caught.value.context) == (num_tokens, 64)
    engine.check(tuple([1] * 64), ((5,), (6,)))
    outside: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]
    outside = [((), ()), ((1, 300), ()), ((-1,), ()), ((1,), ((5,), ()))]
    for prompt, continuations in outside:
        with pytest.raises(PromptError):
            engine.check(prompt, continuations)


def score(
    prompts: list[tuple[int, ...]],
    continuations: tuple[tuple[int, ...], ...],
    *,
    config: DecoderConfig,
    num_slots: int = 4,
    **options: Any,
) -> list[tuple[float, ...]]:
    """Scores of the same continuations for each prompt; each prompt has its own picture."""
    engine = toy_engine(toy_decoder(config), num_slots=num_slots, **options)
    prefixes = engine.project_prefix(toy_visual_queries(len(prompts), config=config))
    for index, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
        engine.submit(ScoreRequest(id=index, prompt_ids=prompt, prefix=prefix, continuations=continuations))
    outputs = sorted(drain(engine), key=lambda output: output.request_id)
    assert {output.finish for output in outputs} == {"scored"}
    return [output.logprobs for output in outputs]


def naive_logprob(prompt: tuple[int, ...], continuation: tuple[int, ...], *, config: DecoderConfig = CONFIG) -> float:
    """Computed by one plain forward pass over prompt and continuation."""
    decoder = toy_decoder(config)
    prefix = decoder.project_prefix(toy_visual_queries(1, config=config))
    hidden = forward(decoder, torch.tensor([[*prompt, *continuation]]), prefix)
    logprobs = decoder.logits(hidden)[0].log_softmax(-1)
    return sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(continuation))


@pytest.mark.parametrize("config", [CONFIG, *FAMILIES.values()], ids=["llama", *FAMILIES])
def test_continuations_are_scored_independently(config: DecoderConfig) -> None:
    continuations = ((7,), (8, 9, 10), (8, 11), (EOS_ID,))
    expected = [naive_logprob(PROMPTS[3], continuation, config=config) for continuation in continuations]
    for companions in ([], PROMPTS[1:3]):
        for shapes in (EXACT, BUCKETED):
            scores = score([PROMPTS[3], *companions], continuations, shapes=shapes, config=config)
            assert scores[0] == pytest.approx(expected, abs=2 * 3 * rounding(config))  # of up to three tokens


@pytest.mark.parametrize("config", [CONFIG, FAMILIES["gemma"]], ids=["llama", "gemma"])
@pytest.mark.parametrize("prompts", [[PROMPTS[3]] * 5, [PROMPTS[3]] * 4 + [PROMPTS[4]]], ids=["equal", "different"])
def test_scores_do_not_depend_on_the_batch(prompts: list[tuple[int, ...]], config: DecoderConfig) -> None:
    continuations = ((7,), (8, 9, 10), (8, 11))
    alone, together = (score(prompts, continuations, num_slots=num_slots, config=config) for num_slots in (1, 5))
    for one, other in zip(alone, together, strict=True):
        assert one == pytest.approx(other, abs=2 * 3 * rounding(config))
    assert len(set(alone)) == 5


def test_logits_of_many_choices_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.llm.runners.eager._LOGITS_AT_ONCE", 3 * CONFIG.vocab_size + 1)
    engine, most = toy_engine(decoder := toy_decoder(), num_slots=2), list[int]()
    decoder.head.register_forward_hook(lambda head, inputs, logits: most.append(logits.numel()))
    [prefix, _], choices = engine.project_prefix(toy_visual_queries(2)), ((7,), (8, 9, 10), (8, 11), (EOS_ID,))
    engine.submit(ScoreRequest(id=0, prompt_ids=PROMPTS[3], prefix=prefix, continuations=choices))
    [output] = drain(engine)

    assert most == [3 * CONFIG.vocab_size] * 2 + [CONFIG.vocab_size]
    expected = [naive_logprob(PROMPTS[3], choice) for choice in choices]
    assert output.logprobs == pytest.approx(expected, abs=2 * 3 * rounding())


def test_score_that_is_not_finite_ends_its_request_only() -> None:
    engine = toy_engine(toy_decoder(), num_slots=2)
    good, bad = engine.project_prefix(toy_visual_queries(2))
    bad = bad._replace(k=bad.k * float("nan"))
    for index, prefix in enumerate((good, bad)):
        engine.submit(ScoreRequest(id=index, prompt_ids=PROMPTS[1], prefix=prefix, continuations=((5,), (6, 7))))
    assert {output.request_id: output.finish for output in drain(engine)} == {0: "scored", 1: "not_finite"}


@pytest.mark.parametrize("backend", [CpuBackend(), QueuedBackend()], ids=["at once", "queued"])
def test_log_probabilities_and_the_likeliest_tokens_are_those_of_the_model(backend: CpuBackend) -> None:
    engine = toy_engine(toy_decoder(), num_slots=2, eos_id=-7, backend=backend)
    sampling = [SamplingParams(max_new_tokens=5, temperature=temperature, seed=3) for temperature in (0.0, 2.0, 0.0)]
    requests = toy_requests(engine, PROMPTS[:3], sampling=sampling)
    (prefix,) = engine.project_prefix(toy_visual_queries(1))
    for request in requests:
        engine.submit(replace(request, prefix=prefix, num_logprobs=(4, 2, None)[request.id]))

    found: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    for output in drain(engine):
        assert bool(output.logprobs) == (output.request_id < 2 and output.token_id is not None)
        assert len(output.top) == ((4, 2, 0)[output.request_id] if output.token_id is not None else 0)
        if output.token_id is not None and output.logprobs:
            found[output.request_id].append((output.token_id, *output.logprobs))
            assert [logprob for _, logprob in output.top] == sorted((one for _, one in output.top), reverse=True)
            assert output.request_id or output.top[0] == found[0][-1]

    for index, tokens in found.items():
        ids, logprobs = zip(*tokens, strict=True)
        expected = [naive_logprob(PROMPTS[index], ids[: i + 1]) for i in range(5)]
        assert [sum(logprobs[: i + 1]) for i in range(5)] == pytest.approx(expected, abs=2 * 5 * rounding())


@pytest.mark.parametrize("backend", [CpuBackend(), QueuedBackend()], ids=["at once", "queued"])
def test_a_constraint_that_fails_ends_its_answer_alone(backend: CpuBackend) -> None:
    engine = toy_engine(toy_decoder(), num_slots=3, eos_id=-7, backend=backend)
    requests = toy_requests(engine, PROMPTS[:3], sampling=[SamplingParams(max_new_tokens=9)] * 3)
    expected = answer(engine, requests)

    requests[1] = replace(requests[1], constraint=Alternating(fails_at=4))
    given = answer(engine, requests)

    ids, finish = given.pop(1)
    assert (finish, len(ids) <= 4, [token % 2 for token in ids]) == ("too_complex", True, [0, 1, 0, 1][: len(ids)])
    assert given == {0: expected[0], 2: expected[2]}


def test_hardly_any_token_occurs_twice_under_a_large_penalty() -> None:
    engine = toy_engine(toy_decoder(), num_slots=4, eos_id=-7)
    sampling = [SamplingParams(max_new_tokens=12, repetition_penalty=3.0)] * len(PROMPTS)
    for ids, _ in answer(engine, toy_requests(engine, PROMPTS, sampling=sampling)).values():
        assert len(set(ids)) == len(ids)


def test_slots_are_clean_after_a_failed_step() -> None:
    decoder = toy_decoder(SMALL)
    runner = eager(decoder, num_slots=4, shapes=WHOLE_CONTEXT)
    engine = Engine(runner, eos_id=EOS_ID)
    runner._cache.k.fill_(torch.nan)  # as left by activations that overflowed
    runner._cache.v.fill_(torch.nan)
    engine.reset()
    sampling = [SamplingParams(max_new_tokens=9)] * len(SMALL_PROMPTS)
    requests = toy_requests(engine, SMALL_PROMPTS, sampling=sampling, config=SMALL)
    assert answer(engine, requests) == answer(toy_engine(decoder, num_slots=4), requests)


def test_row_limit_applies_to_new_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[type, int]] = []
    plain = EagerRunner.run

    def watched(self: EagerRunner, plan: Any) -> Any:
        rows.append((type(plan), len(plan.rows)))
        return plain(self, plan)

    monkeypatch.setattr(EagerRunner, "run", watched)
    engine = toy_engine(toy_decoder(SMALL), num_slots=4, eos_id=-7)
    sampling = [SamplingParams(max_new_tokens=4 + 3 * index) for index in range(len(SMALL_PROMPTS))]
    requests = toy_requests(engine, SMALL_PROMPTS, sampling=sampling, config=SMALL)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.limit_rows(2)
    assert (engine.num_slots, engine.num_rows) == (4, 2)
    drain(engine)
    steps = [count for kind, count in rows if kind is DecodePlan]
    assert steps[:3] == [4, 4, 4]
    assert steps[-1] == 1
    assert all(count <= 2 for count in steps[steps.index(2) :])

    rows.clear()
    for request in requests:
        engine.submit(ScoreRequest(id=request.id, prompt_ids=(1,), prefix=request.prefix, continuations=((5,),)))
    drain(engine)
    assert [count for _, count in rows] == [2, 2, 2, 2, 1]


def test_a_row_limit_beyond_the_slots_is_refused() -> None:
    for num_rows in (0, 5):
        with pytest.raises(ValueError, match=r"1\.\.4"):
            toy_engine(toy_decoder(SMALL), num_slots=4).limit_rows(num_rows)
