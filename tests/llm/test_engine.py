"""The engine's guarantees, with random weights."""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output, Request, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.base import DecodePlan
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.graph import GraphRunner
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT, STEPPED, Shapes
from llama_adapter.runtime.devices import CpuBackend
from tests.fakes import cuda_graphs
from tests.fakes.cuda_graphs import FakeCuda, HostCuda
from tests.fakes.cuda_linear import LinearOps
from tests.llm.exported import runner_of
from tests.llm.test_native_runner import open_native
from tests.llm.toys import (
    CONFIG,
    EOS_ID,
    FAMILIES,
    NATIVE,
    SMALL,
    WHOLE_CONTEXT,
    Alternating,
    QueuedBackend,
    answer,
    drain,
    eager,
    eager_config,
    forward,
    open_runner,
    resume,
    rounding,
    toy_decoder,
    toy_engine,
    toy_past,
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
        has_logprobs, num_top = request.id < 2, (4, 2, 0)[request.id]
        engine.submit(replace(request, prefix=prefix, with_logprobs=has_logprobs, num_top=num_top))

    found: dict[int, list[tuple[int, float]]] = {0: [], 1: []}
    for output in drain(engine):
        assert bool(output.logprobs) == (output.request_id < 2 and output.token_id is not None)
        if output.token_id is not None and output.logprobs:
            found[output.request_id].append((output.token_id, *output.logprobs))
            assert len(output.top) == (4, 2)[output.request_id]
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


# Rows in blocks: many rows share a small cache, are put back when it is full, and answer as with a cache for each

SMALLEST = {"block": 8, "spare_blocks": 7}  # of a context of 64: one row can fill it beside rows of one block
cuda = cuda_graphs.cuda  # a fixture


def mixed_requests(engine: Engine, count: int, *, config: DecoderConfig) -> list[GenerateRequest]:
    """Requests of all lengths, most of them short."""
    draw = random.Random(0)
    prompts, sampling = [], []
    for index in range(count):
        longest = draw.choice([6, 6, 20, 60])
        prompts.append((1, *(draw.randrange(3, 300) for _ in range(draw.randrange(longest)))))
        most = draw.choice([3, 5, 9, 64])
        sampling.append(SamplingParams(max_new_tokens=most, temperature=index % 3 / 2, seed=index))
    return toy_requests(engine, prompts, sampling=sampling, config=config)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("kernels", NATIVE), *(("bucketed", config) for config in FAMILIES.values())],
    ids=["kernels", *FAMILIES],
)
def test_rows_of_a_small_cache_answer_as_with_one_for_each(kind: str, config: DecoderConfig) -> None:
    """The property test of schedules has small caches in all shapes of plain torch."""
    answers = []
    for cache in ({}, SMALLEST):
        engine = Engine(runner_of(kind, config, num_slots=5, **cache), eos_id=EOS_ID)
        requests = [
            replace(request, constraint=Alternating() if request.id % 5 == 0 else None)
            for request in mixed_requests(engine, 30, config=config)
        ]
        answers.append(answer(engine, requests))
        assert (engine.num_put_back > 0) == bool(cache)

    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["plain operators", "fused operators"])
def test_recorded_steps_read_the_blocks_of_the_moment(
    dtype: torch.dtype, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = LinearOps()
    ops.install(monkeypatch)
    state = {name: value.to(dtype) for name, value in toy_decoder(NATIVE).state_dict().items()}
    open_graphs = partial(open_runner, NATIVE, state, backend=HostCuda(), num_slots=4, mode="cuda_graph")
    answers = []
    for cache in ({}, SMALLEST):
        engine = Engine(open_graphs(**cache), eos_id=EOS_ID)
        engine.warm_up(prompt_tokens=20, new_tokens=40)
        answers.append(answer(engine, mixed_requests(engine, 20, config=NATIVE)))
        assert (engine.num_put_back > 0) == bool(cache)

    assert answers[0] == answers[1]
    assert (ops.calls["attend to blocks"] > 0) == (dtype == torch.bfloat16)


def test_a_cache_that_cannot_hold_one_whole_row_or_its_past_is_refused() -> None:
    with pytest.raises(ValueError, match="spare_blocks must be at least 7"):
        EngineConfig(decoder=NATIVE, dtype=torch.float32, num_slots=20, block=8, spare_blocks=6)
    with pytest.raises(ValueError, match="block must be at least 6"):
        EngineConfig(decoder=NATIVE, dtype=torch.float32, past=toy_past(NATIVE, 5), block=4, spare_blocks=20)


def test_cancelled_rows_give_their_blocks_back() -> None:
    engine = Engine(open_runner(NATIVE, num_slots=3, **SMALLEST), eos_id=-7)
    requests = toy_requests(
        engine, [(5,) * 30, (6,) * 20, (7,) * 50], sampling=[SamplingParams(max_new_tokens=14)] * 3, config=NATIVE
    )
    assert engine._runner._cache.k[0, :, 0, :, 0].size == (3 + 7 + 1) * 8, "the rows share a small cache"  # type: ignore[attr-defined]
    expected = answer(engine, requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.cancel(0)
    engine.cancel(1)
    outputs = drain(engine)
    assert {output.request_id for output in outputs} == {2}
    assert [output.token_id for output in outputs] == expected[2][0]


# Tokens that are read one step late give the same answers as tokens read at once, on any schedule

NEVER = -7  # an end token that is outside the vocabulary
HARMFUL_IDS = (3, 4, 5)  # their embeddings overflow: a row that is fed one of them is not finite afterwards
NATIVE_SMALL = replace(SMALL, head_dim=NATIVE.head_dim, dim=NATIVE.dim, ffn_dim=NATIVE.ffn_dim)
BACKENDS = {"at once": CpuBackend(), "queued": QueuedBackend()}


class RecordingBackend(QueuedBackend):
    """Has graphs that count launches, and marks that record how far the device was ahead when they were waited for."""

    capabilities = replace(QueuedBackend.capabilities, graph_modes=("recorded",))

    def __init__(self) -> None:
        self.num_launched = 0
        self.num_ahead: list[int] = []

    def compile(self, program: Callable[..., Any], *, mode: str) -> Any:
        def launch(*inputs: Tensor) -> Any:
            self.num_launched += 1
            return program(*inputs)

        return launch

    def mark(self) -> Any:
        backend, launched = self, self.num_launched

        class Mark:
            def wait(self) -> None:
                backend.num_ahead.append(backend.num_launched - launched)

        return Mark()


@dataclass(frozen=True)
class Schedule:
    """Requests, and the steps before which each is submitted or cancelled, and all slots are cleared."""

    requests: tuple[tuple[int, tuple[int, ...], SamplingParams, tuple[tuple[int, ...], ...], bool], ...]
    cancelled: dict[int, int]
    resets: dict[int, int]  # steps, and the limit of rows from there on
    num_slots: int
    max_prefill_tokens: int
    num_past: int
    cache: dict[str, int]
    shapes: Shapes
    with_harm: bool


def schedule_of(draw: random.Random) -> Schedule:
    """A busy random schedule: slots are reused while steps are unread, and rows end in every possible way."""
    with_harm, num_past = draw.random() < 0.6, draw.choice([0, 0, 3])
    least_id = min(HARMFUL_IDS) if with_harm and draw.random() < 0.3 else max(HARMFUL_IDS) + 1
    prompts = [  # few, so that some are equal and share the part that does not depend on the picture
        tuple(draw.randrange(least_id, SMALL.vocab_size) for _ in range(draw.randint(1, 22 - num_past)))
        for _ in range(draw.randint(1, 5))
    ]
    requests = [
        (
            draw.randint(0, 12),
            draw.choice(prompts),
            SamplingParams(
                max_new_tokens=draw.randint(0, 30),  # often more than the remaining context
                temperature=draw.choice([0.0, 0.7, 2.0]),
                top_p=draw.choice([1.0, 0.9]),
                top_k=draw.choice([0, 5]),
                min_p=draw.choice([0.0, 0.1]),
                seed=draw.randint(0, 9),
                repetition_penalty=draw.choice([1.0, 1.0, 0.5, 1.5, 50.0]),
                presence_penalty=draw.choice([0.0, 0.0, 1.0]),
                frequency_penalty=draw.choice([0.0, 0.0, 2.0, -0.5]),
            ),
            draw.choice([(), (), (), (), (), ((16,), (17, 18))]),
            draw.random() < 0.3,  # only even and odd ids in turn
        )
        for _ in range(draw.randint(1, 12))
    ]
    return Schedule(
        requests=tuple(requests),
        cancelled={draw.randrange(len(requests)): draw.randint(1, 20) for _ in range(draw.randint(0, 3))},
        resets={draw.randint(1, 20): draw.randint(1, 5) for _ in range(draw.choice([0, 0, 1, 3]))},
        num_slots=draw.randint(1, 5),
        max_prefill_tokens=draw.choice([30, 8192]),
        num_past=num_past,
        cache=draw.choice([{}, {}, {"block": 8, "spare_blocks": 2}]),  # one row can fill it beside rows of one block
        shapes=draw.choice([EXACT, STEPPED, BUCKETED, WHOLE_CONTEXT, WHOLE_CONTEXT]),
        with_harm=with_harm,
    )


@functools.cache
def small_decoder(*, with_harm: bool, config: DecoderConfig = SMALL) -> LlamaAdapterDecoder:
    decoder = toy_decoder(config)
    if with_harm:
        decoder.embedding.weight[[0, *HARMFUL_IDS, EOS_ID]] = float("inf")
    return decoder


def play(schedule: Schedule, kind: str, *, num_slots: int) -> dict[int, list[Output]]:
    """The events of each request, by the kernels or by plain torch; log-probabilities only by the kernels."""
    config = NATIVE_SMALL if kind == "kernels" else SMALL
    decoder = small_decoder(with_harm=schedule.with_harm, config=config)
    options: dict[str, Any] = {"max_prefill_tokens": schedule.max_prefill_tokens, **schedule.cache}
    options["past"] = toy_past(config, schedule.num_past)
    if kind == "kernels":
        engine = Engine(open_native(config, decoder.state_dict(), num_slots=num_slots, **options), eos_id=EOS_ID)
    else:
        options |= {"backend": BACKENDS[kind], "shapes": schedule.shapes}
        engine = toy_engine(decoder, num_slots=num_slots, **options)
    prefixes = engine.project_prefix(toy_visual_queries(len(schedule.requests), config=config))
    submitted, gone = list[Request](), set[int]()
    events: dict[int, list[Output]] = {}
    number = 0
    while number <= 20 or engine.num_unfinished:
        if number in schedule.resets:
            engine.reset()
            engine.limit_rows(min(schedule.resets[number], num_slots))
            resume(engine, submitted, itertools.chain(*events.values()))
        for index, (arrival, prompt, sampling, continuations, constrained) in enumerate(schedule.requests):
            if arrival == number:
                common: dict[str, Any] = {"id": index, "prompt_ids": prompt, "prefix": prefixes[index]}
                if continuations:
                    submitted.append(ScoreRequest(**common, continuations=continuations))
                else:
                    common["constraint"] = Alternating() if constrained else None
                    submitted.append(GenerateRequest(**common, sampling=sampling, with_logprobs=kind == "kernels"))
                engine.submit(submitted[-1])
        for index, moment in schedule.cancelled.items():
            if moment == number:
                engine.cancel(index)
                gone |= {index} & {request.id for request in submitted}
                submitted = [request for request in submitted if request.id != index]
        for output in engine.step():
            assert output.request_id not in gone
            kept = output if kind == "kernels" and output.finish != "not_finite" else replace(output, logprobs=())
            events.setdefault(output.request_id, []).append(kept)
        number += 1
    return events


@pytest.mark.parametrize("kind", [pytest.param("at once", marks=pytest.mark.slow), "queued", "kernels"])
@given(seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=20, deadline=None)
@pytest.mark.proves("asynchronous read-back", "CUDA", "NPU")
@pytest.mark.proves("continuous batching", "CPU", "CUDA")
def test_answers_do_not_depend_on_schedule_shapes_late_reading_or_mixed_steps(kind: str, seed: int) -> None:
    schedule = schedule_of(random.Random(seed))
    by_one = replace(schedule, cancelled={}, resets={}, cache={}, shapes=EXACT)
    alone = play(by_one, "kernels" if kind == "kernels" else "at once", num_slots=1)

    together = play(schedule, kind, num_slots=schedule.num_slots)

    for index, found in together.items():
        assert found == alone[index][: len(found)]
        assert len(found) == len(alone[index]) or index in schedule.cancelled
        ids = [output.token_id for output in found if output.token_id is not None]
        assert not schedule.requests[index][-1] or [token % 2 for token in ids] == ([0, 1] * len(ids))[: len(ids)]
    assert together.keys() >= alone.keys() - schedule.cancelled.keys()


def small_requests(prompts: list[tuple[int, ...]], *, max_new_tokens: list[int]) -> list[GenerateRequest]:
    engine = toy_engine(toy_decoder(SMALL), num_slots=1)
    sampling = [SamplingParams(max_new_tokens=most) for most in max_new_tokens]
    return toy_requests(engine, prompts, sampling=sampling, config=SMALL)


def test_engine_ignores_the_unread_step_of_an_earlier_engine() -> None:
    decoder = toy_decoder(SMALL)
    first, second = small_requests([(6, 7), (8,)], max_new_tokens=[9, 9])
    abandoned = toy_engine(decoder, num_slots=1, eos_id=NEVER, backend=QueuedBackend(), shapes=WHOLE_CONTEXT)
    abandoned.submit(first)
    abandoned.step()

    given = answer(Engine(abandoned._runner, eos_id=NEVER), [second])

    assert given == answer(toy_engine(decoder, num_slots=1, eos_id=NEVER), [second])


def recording_runner(decoder: LlamaAdapterDecoder, *, num_slots: int) -> tuple[GraphRunner, RecordingBackend]:
    backend = RecordingBackend()
    return GraphRunner(decoder, eager_config(decoder, num_slots=num_slots, mode="recorded"), backend=backend), backend


def test_the_host_reads_ids_while_the_next_step_runs() -> None:
    runner, backend = recording_runner(toy_decoder(), num_slots=3)
    engine = Engine(runner, eos_id=NEVER)
    requests = toy_requests(engine, toy_prompts(3), sampling=[SamplingParams(max_new_tokens=10)] * 3)

    assert [len(ids) for ids, _ in answer(engine, requests).values()] == [10] * 3
    # One prefill and nine steps. Each step except the last is read after one more step was launched, and no step is
    # superfluous.
    assert backend.num_ahead == [1] * 9 + [0]
    assert backend.num_launched == 9
