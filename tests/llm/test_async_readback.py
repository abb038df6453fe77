"""Tokens that are read one step late give the same answers as tokens read at once, on any schedule."""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output, Request, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.graph import GraphRunner
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT, STEPPED, Shapes
from llama_adapter.runtime.devices import CpuBackend
from tests.llm.test_native_runner import open_native
from tests.llm.toys import (
    EOS_ID,
    NATIVE,
    SMALL,
    WHOLE_CONTEXT,
    Alternating,
    QueuedBackend,
    answer,
    answers,
    drain,
    eager_config,
    resume,
    toy_decoder,
    toy_engine,
    toy_past,
    toy_prompts,
    toy_requests,
    toy_visual_queries,
)

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
    if with_harm:  # a row that ends not finite is fed 0 in the step after it
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
                    submitted.append(
                        GenerateRequest(**common, sampling=sampling, num_logprobs=0 if kind == "kernels" else None)
                    )
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
@hypothesis_settings(max_examples=14, deadline=None)
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


def whole_context_engine(decoder: LlamaAdapterDecoder, *, num_slots: int, eos_id: int = NEVER) -> Engine:
    return toy_engine(decoder, num_slots=num_slots, eos_id=eos_id, backend=QueuedBackend(), shapes=WHOLE_CONTEXT)


def alone(decoder: LlamaAdapterDecoder, request: GenerateRequest) -> list[int]:
    return answer(toy_engine(decoder, num_slots=1, eos_id=NEVER), [request])[request.id][0]


def test_overflow_in_a_surplus_step_does_not_reach_the_next_row() -> None:
    decoder = toy_decoder(SMALL)
    prompts: list[tuple[int, ...]] = [(6, 7, 8, 9), (6,)]
    first, second = small_requests(prompts, max_new_tokens=[9, 9])
    end_id = alone(decoder, first)[2]
    expected = alone(decoder, second)
    assert end_id not in (*expected, *prompts[1])
    decoder.embedding.weight[end_id] = float("inf")

    given = answer(whole_context_engine(decoder, num_slots=1, eos_id=end_id), [first, second])

    assert given[1] == (expected, "length")


@pytest.mark.parametrize(
    "most_of_second", [3, 4], ids=["it moves before its step is read", "both end in the same step"]
)
def test_moved_row_that_is_not_finite_leaves_its_old_slot_clean(most_of_second: int) -> None:
    decoder = toy_decoder(SMALL)
    prompts: list[tuple[int, ...]] = [(14, 24), (14, 12), (22, 15, 25, 12, 10, 27), (36,), (12,)]
    requests = small_requests(prompts, max_new_tokens=[12, most_of_second, 9, 8, 8])
    harmful_id = alone(decoder, requests[2])[2]
    expected = [alone(decoder, request) for request in requests]
    assert all(harmful_id not in (*prompts[index], *expected[index]) for index in (0, 1, 3, 4))
    decoder.embedding.weight[harmful_id] = float("inf")
    engine = whole_context_engine(decoder, num_slots=4)
    for request in requests[:3]:
        engine.submit(request)
    outputs: list[Output] = []
    while not any(output.finish for output in outputs):  # the second ends
        outputs += engine.step()
    for request in requests[3:]:
        engine.submit(request)
    given = answers(outputs + drain(engine))

    assert given[2] == (expected[2][:3], "not_finite")
    assert [given[index][0] for index in (0, 1, 3, 4)] == [expected[index] for index in (0, 1, 3, 4)]


def test_row_cancelled_before_reading_leaves_its_slot_clean_and_its_id_free() -> None:
    decoder = small_decoder(with_harm=True)
    first, second = small_requests([(6, 7, 8, HARMFUL_IDS[0], 9, 10), (6,)], max_new_tokens=[9, 9])
    expected = alone(decoder, second)
    engine = whole_context_engine(decoder, num_slots=1)
    engine.submit(first)
    engine.step()
    engine.cancel(first.id)

    assert answer(engine, [replace(second, id=first.id)]) == {first.id: (expected, "length")}


def test_engine_ignores_the_unread_step_of_an_earlier_engine() -> None:
    decoder = toy_decoder(SMALL)
    first, second = small_requests([(6, 7), (8,)], max_new_tokens=[9, 9])
    abandoned = whole_context_engine(decoder, num_slots=1)
    abandoned.submit(first)
    abandoned.step()

    given = answer(Engine(abandoned._runner, eos_id=NEVER), [second])

    assert given[second.id][0] == alone(decoder, second)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_positions_stay_in_the_context(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    plain = EagerRunner.decode

    def watched(self: EagerRunner, token_ids: Any, positions: Any) -> Any:
        fed.extend(positions)
        return plain(self, token_ids, positions)

    monkeypatch.setattr(EagerRunner, "decode", watched)
    requests = small_requests([tuple([6] * (SMALL.context - 3)), (6,)], max_new_tokens=[SMALL.context] * 2)
    given = answer(toy_engine(toy_decoder(SMALL), num_slots=2, eos_id=NEVER, backend=backend), requests)

    assert [len(given[index][0]) for index in (0, 1)] == [3, SMALL.context - 1]
    assert max(fed) == SMALL.context - 2  # the last token is chosen, but not fed


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
