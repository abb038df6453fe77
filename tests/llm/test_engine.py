"""The engine's promises, on random weights."""

import random

import pytest
import torch

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.model.adapter import Prefix
from tests.llm.toys import (
    CONFIG,
    EOS_ID,
    answers,
    drain,
    toy_decoder,
    toy_engine,
    toy_prompts,
    toy_requests,
    toy_visual_queries,
)

PROMPTS = toy_prompts(16)


def run(
    num_slots: int, order: list[int], *, temperature: float = 0.0, **options: int
) -> dict[int, tuple[list[int], str | None]]:
    engine = toy_engine(toy_decoder(), num_slots=num_slots, **options)
    sampling = [
        SamplingParams(max_new_tokens=3 + index, temperature=temperature, top_p=0.9, top_k=40, seed=index)
        for index in range(len(PROMPTS))
    ]
    requests = toy_requests(engine, PROMPTS, sampling=sampling)
    for index in order:
        engine.submit(requests[index])
    return answers(drain(engine))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_slots", [2, 3, 5, 16])
def test_answers_do_not_depend_on_the_batch_or_the_order(num_slots: int, temperature: float) -> None:
    alone = run(1, list(range(16)), temperature=temperature)
    order = random.Random(num_slots).sample(range(16), 16)
    assert run(num_slots, order, temperature=temperature) == alone
    assert all(ids for ids, _ in alone.values())


def test_answers_do_not_depend_on_how_prompts_are_grouped_into_prefills() -> None:
    assert run(16, list(range(16)), max_prefill_tokens=40) == run(16, list(range(16)))


def test_rows_that_end_together_leave_the_others_untouched() -> None:
    # Equal limits end several rows in one step, so that slots move in a chain.
    decoder = toy_decoder()
    sampling = [SamplingParams(max_new_tokens=[4, 9][index % 2]) for index in range(8)]
    results = []
    for num_slots in (1, 8):
        engine = toy_engine(decoder, num_slots=num_slots)
        for request in toy_requests(engine, PROMPTS[:8], sampling=sampling):
            engine.submit(request)
        results.append(answers(drain(engine)))
    assert results[0] == results[1]


def test_every_row_stops_at_the_end_token_and_does_not_pass_it_on() -> None:
    decoder = toy_decoder()
    engine = toy_engine(decoder, num_slots=4)
    request = toy_requests(engine, PROMPTS[:1], sampling=[SamplingParams(max_new_tokens=30)])[0]
    engine.submit(request)
    free_running, _ = answers(drain(engine))[0]
    # Call the token it chose fifth the end token: the answer must now stop right before its first appearance.
    end_id = free_running[4]
    engine = Engine(engine._executor, eos_id=end_id)
    for copy in range(3):
        engine.submit(GenerateRequest(id=copy, prompt_ids=request.prompt_ids, prefix=request.prefix))
    for ids, finish in answers(drain(engine)).values():
        assert ids == free_running[: free_running.index(end_id)]
        assert finish == "stop"


def test_the_context_limits_the_answer_and_a_full_prompt_gets_an_empty_one() -> None:
    engine = toy_engine(toy_decoder(), num_slots=2)
    prompts = [tuple([1] * 60), tuple([1] * CONFIG.context)]
    for request in toy_requests(engine, prompts, sampling=[SamplingParams(max_new_tokens=50)] * 2):
        engine.submit(request)
    collected = answers(drain(engine))
    assert len(collected[0][0]) == CONFIG.context - 60
    assert collected[1] == ([], "length")


def test_no_tokens_are_generated_when_none_are_asked_for() -> None:
    engine = toy_engine(toy_decoder(), num_slots=2)
    request = toy_requests(engine, PROMPTS[:1], sampling=[SamplingParams(max_new_tokens=0)])[0]
    engine.submit(request)
    assert answers(drain(engine)) == {0: ([], "length")}


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths() -> None:
    engine = toy_engine(toy_decoder(), num_slots=1)
    with pytest.raises(PromptTooLongError, match=r"65 tokens.*holds 64"):
        engine.check(tuple([1] * 65))
    with pytest.raises(PromptTooLongError, match="66 tokens"):
        engine.check(tuple([1] * 64), [(5, 6, 7)])
    engine.check(tuple([1] * 64), [(5,), (6,)])


@pytest.mark.parametrize(("prompt", "continuations"), [((), ()), ((1, 300), ()), ((-1,), ()), ((1,), ((5,), ()))])
def test_ids_that_the_model_does_not_have_are_refused(
    prompt: tuple[int, ...], continuations: tuple[tuple[int, ...], ...]
) -> None:
    with pytest.raises(PromptError):
        toy_engine(toy_decoder(), num_slots=1).check(prompt, continuations)


def test_cancelled_requests_free_their_slot_and_say_nothing_more() -> None:
    decoder = toy_decoder()
    sampling = [SamplingParams(max_new_tokens=12)] * 6
    undisturbed = toy_engine(decoder, num_slots=2)
    for request in toy_requests(undisturbed, PROMPTS[:6], sampling=sampling):
        undisturbed.submit(request)
    expected = answers(drain(undisturbed))

    engine = toy_engine(decoder, num_slots=2)
    for request in toy_requests(engine, PROMPTS[:6], sampling=sampling):
        engine.submit(request)
    outputs = engine.step() + engine.step() + engine.step()
    engine.cancel(0)  # running
    engine.cancel(5)  # waiting
    engine.cancel(99)  # unknown
    later = drain(engine)
    assert not {output.request_id for output in later} & {0, 5}
    collected = answers(outputs + later)
    assert {index: collected[index] for index in (1, 2, 3, 4)} == {index: expected[index] for index in (1, 2, 3, 4)}


def score(prompt: tuple[int, ...], continuations: list[tuple[int, ...]], *, companions: int = 0) -> tuple[float, ...]:
    engine = toy_engine(toy_decoder(), num_slots=4)
    prefixes = engine.project_prefix(toy_visual_queries(1 + companions))
    engine.submit(ScoreRequest(id=0, prompt_ids=prompt, prefix=prefixes[0], continuations=tuple(continuations)))
    for index in range(1, companions + 1):
        engine.submit(
            ScoreRequest(id=index, prompt_ids=PROMPTS[index], prefix=prefixes[index], continuations=((5, 6, 7), (8,)))
        )
    outputs = drain(engine)
    (own,) = (output for output in outputs if output.request_id == 0)
    assert own.finish == "scored"
    return own.logprobs


def naive_logprob(prompt: tuple[int, ...], continuation: tuple[int, ...]) -> float:
    """One plain forward pass over prompt and continuation."""
    decoder = toy_decoder()
    ids = torch.tensor([[*prompt, *continuation]])
    length = ids.shape[1]
    prefix = decoder.project_prefix(toy_visual_queries(1))
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    logprobs = decoder.logits(decoder(ids, torch.arange(length)[None], mask, prefix))[0].log_softmax(-1)
    return sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(continuation))


def test_continuations_are_scored_as_if_each_followed_the_prompt_alone() -> None:
    continuations = [(7,), (8, 9, 10), (8, 11), (EOS_ID,)]
    expected = [naive_logprob(PROMPTS[3], continuation) for continuation in continuations]
    assert score(PROMPTS[3], continuations) == pytest.approx(expected, abs=1e-5)
    assert score(PROMPTS[3], continuations, companions=3) == pytest.approx(expected, abs=1e-5)


def test_a_question_about_many_pictures_is_scored_as_about_each_alone() -> None:
    """Equal questions share what does not depend on the picture; two different ones share nothing."""
    decoder = toy_decoder()
    continuations = ((7,), (8, 9, 10), (8, 11))
    for prompts in ([PROMPTS[3]] * 5, [PROMPTS[3]] * 4 + [PROMPTS[4]]):
        results: list[dict[int, tuple[float, ...]]] = []
        for num_slots in (1, 5):
            engine = toy_engine(decoder, num_slots=num_slots)
            prefixes = engine.project_prefix(toy_visual_queries(5))
            for index, prompt in enumerate(prompts):
                engine.submit(
                    ScoreRequest(id=index, prompt_ids=prompt, prefix=prefixes[index], continuations=continuations)
                )
            results.append({output.request_id: output.logprobs for output in drain(engine)})
        for index in range(5):
            assert results[1][index] == pytest.approx(results[0][index], abs=1e-5)
        assert len(set(results[0].values())) == 5


def test_a_prompt_about_many_pictures_is_answered_as_about_each_alone() -> None:
    decoder = toy_decoder()
    sampling = [SamplingParams(max_new_tokens=8)] * 6
    results = []
    for num_slots in (1, 6):
        engine = toy_engine(decoder, num_slots=num_slots)
        for request in toy_requests(engine, [PROMPTS[5]] * 6, sampling=sampling):
            engine.submit(request)
        results.append(answers(drain(engine)))
    assert results[0] == results[1]
    assert len({tuple(ids) for ids, _ in results[0].values()}) > 1


def test_scored_and_generated_requests_share_a_queue() -> None:
    engine = toy_engine(toy_decoder(), num_slots=3)
    prefixes = engine.project_prefix(toy_visual_queries(6))
    for index in range(6):
        common = {"id": index, "prompt_ids": PROMPTS[index], "prefix": prefixes[index]}
        if index % 2:
            engine.submit(ScoreRequest(**common, continuations=((5,), (6, 7))))
        else:
            engine.submit(GenerateRequest(**common, sampling=SamplingParams(max_new_tokens=4)))
    finishes = {output.request_id: output.finish for output in drain(engine) if output.finish}
    assert finishes == {index: "scored" if index % 2 else "length" for index in range(6)}


def test_a_slot_keeps_nothing_of_the_picture_before() -> None:
    """The prefix of a finished picture must not reach the next one in its slot."""
    decoder = toy_decoder()
    engine = toy_engine(decoder, num_slots=1)
    first, second = engine.project_prefix(toy_visual_queries(2))
    assert not torch.equal(first.k, second.k)
    ids = []
    for order in ([first, second], [second]):
        engine = toy_engine(decoder, num_slots=1)
        for index, prefix in enumerate(order):
            engine.submit(GenerateRequest(id=index, prompt_ids=PROMPTS[1], prefix=Prefix(*prefix)))
        ids.append(answers(drain(engine))[len(order) - 1])
    assert ids[0] == ids[1]
