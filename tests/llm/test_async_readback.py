"""Ids that are read one step late give what ids read at once give, whatever the schedule."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output, Request, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.eager import EagerExecutor
from llama_adapter.llm.runners.graph import GraphExecutor
from llama_adapter.llm.runners.shapes import BucketedShapes, ExactShapes, Shapes, SteppedShapes
from llama_adapter.runtime.devices.backend import CpuBackend
from tests.llm.toys import CONFIG, EOS_ID, answers, drain, toy_decoder, toy_prompts, toy_requests, toy_visual_queries

SMALL = replace(CONFIG, context=24, vocab_size=40, num_layers=2, num_adapter_layers=1)
HARMFUL_IDS = (3, 4, 5)  # their embeddings overflow: whoever is fed one has no numbers from then on


class WholeContext(ExactShapes):
    """Steps attend to all positions and prompts are not filled up, so that whatever is left in a slot is met."""

    def length(self, needed: int, *, limit: int) -> int:
        return limit


class QueuedBackend(CpuBackend):
    """The host, treated as a device that computes while the host goes on."""

    capabilities = replace(CpuBackend.capabilities, queued=True)


class RecordingBackend(QueuedBackend):
    """As above, with graphs that only note each launch, and marks that note how far the device was when waited for."""

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
    """Requests with the step before which each is submitted or cancelled."""

    requests: tuple[tuple[int, tuple[int, ...], SamplingParams, tuple[tuple[int, ...], ...]], ...]
    cancelled: dict[int, int]
    num_slots: int
    max_prefill_tokens: int
    shapes: Shapes
    with_harm: bool


def schedule_of(draw: random.Random) -> Schedule:
    """A busy one: slots change hands while steps are not read, rows end in every way there is."""
    # Prompts are drawn from few: equal ones share what does not depend on the picture.
    with_harm = draw.random() < 0.6
    least_id = min(HARMFUL_IDS) if with_harm and draw.random() < 0.3 else max(HARMFUL_IDS) + 1
    prompts = [
        tuple(draw.randrange(least_id, SMALL.vocab_size) for _ in range(draw.randint(1, 22)))
        for _ in range(draw.randint(1, 5))
    ]
    requests = [
        (
            draw.randint(0, 12),
            draw.choice(prompts),
            SamplingParams(
                max_new_tokens=draw.randint(0, 30),  # often more than the context leaves
                temperature=draw.choice([0.0, 2.0]),
                top_p=1.0,
                top_k=draw.choice([0, 5]),
                seed=draw.randint(0, 9),
            ),
            draw.choice([(), (), (), (), (), ((16,), (17, 18))]),
        )
        for _ in range(draw.randint(1, 12))
    ]
    return Schedule(
        requests=tuple(requests),
        cancelled={draw.randrange(len(requests)): draw.randint(1, 20) for _ in range(draw.randint(0, 3))},
        num_slots=draw.randint(1, 5),
        max_prefill_tokens=draw.choice([30, 8192]),
        shapes=draw.choice([ExactShapes(), SteppedShapes(), BucketedShapes(), WholeContext(), WholeContext()]),
        with_harm=with_harm,
    )


def small_decoder(*, with_harm: bool) -> LlamaAdapterDecoder:
    decoder = toy_decoder(SMALL)
    if with_harm:
        decoder.embedding.weight[[*HARMFUL_IDS, EOS_ID]] = float("inf")
    return decoder


DECODERS = {with_harm: small_decoder(with_harm=with_harm) for with_harm in (False, True)}


def request_of(
    index: int,
    prompt: tuple[int, ...],
    prefix: Prefix,
    sampling: SamplingParams,
    continuations: tuple[tuple[int, ...], ...],
) -> Request:
    if continuations:
        return ScoreRequest(id=index, prompt_ids=prompt, prefix=prefix, continuations=continuations)
    return GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=sampling)


def play(schedule: Schedule, backend: CpuBackend, *, num_slots: int | None = None) -> list[Output]:
    """All news of a schedule."""
    executor = EagerExecutor(
        DECODERS[schedule.with_harm],
        backend=backend,
        num_slots=num_slots or schedule.num_slots,
        shapes=schedule.shapes,
    )
    engine = Engine(executor, eos_id=EOS_ID, max_prefill_tokens=schedule.max_prefill_tokens)
    prefixes = engine.project_prefix(toy_visual_queries(len(schedule.requests), config=SMALL))
    outputs: list[Output] = []
    number = 0
    while number <= 20 or engine.num_unfinished:
        for index, (arrival, prompt, sampling, continuations) in enumerate(schedule.requests):
            if arrival == number:
                engine.submit(request_of(index, prompt, prefixes[index], sampling, continuations))
        for index, moment in schedule.cancelled.items():
            if moment == number:
                engine.cancel(index)
        outputs += engine.step()
        number += 1
    return outputs


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_late_ids_give_the_same_answers_on_any_schedule(seed: int) -> None:
    schedule = schedule_of(random.Random(seed))
    alone = answers(play(replace(schedule, cancelled={}, shapes=ExactShapes()), CpuBackend(), num_slots=1))

    for backend in (CpuBackend(), QueuedBackend()):
        given = answers(play(schedule, backend))
        for index, (ids, finish) in given.items():
            if index in schedule.cancelled:
                assert ids == alone[index][0][: len(ids)]
                assert finish in (None, alone[index][1])
            else:
                assert (ids, finish) == alone[index]
        assert given.keys() >= alone.keys() - schedule.cancelled.keys()


def requests_of(engine: Engine, prompts: list[tuple[int, ...]], *, max_new_tokens: list[int]) -> list[GenerateRequest]:
    prefixes = engine.project_prefix(toy_visual_queries(len(prompts), config=SMALL))
    return [
        GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=SamplingParams(max_new_tokens=most))
        for index, (prompt, prefix, most) in enumerate(zip(prompts, prefixes, max_new_tokens, strict=True))
    ]


def whole_context_engine(decoder: LlamaAdapterDecoder, *, num_slots: int, eos_id: int = -7) -> Engine:
    executor = EagerExecutor(decoder, backend=QueuedBackend(), num_slots=num_slots, shapes=WholeContext())
    return Engine(executor, eos_id=eos_id)


def alone(decoder: LlamaAdapterDecoder, request: GenerateRequest) -> list[int]:
    engine = Engine(EagerExecutor(decoder, backend=CpuBackend(), num_slots=1), eos_id=-7)
    engine.submit(request)
    return answers(drain(engine))[request.id][0]


def test_a_step_in_vain_that_overflows_harms_nobody_who_gets_the_slot() -> None:
    decoder = toy_decoder(SMALL)
    prompts: list[tuple[int, ...]] = [(6, 7, 8, 9), (6,)]
    first, second = requests_of(whole_context_engine(decoder, num_slots=1), prompts, max_new_tokens=[9, 9])
    end_id = alone(decoder, first)[2]
    expected = alone(decoder, second)
    assert end_id not in (*expected, *prompts[1])
    decoder.embedding.weight[end_id] = float("inf")
    engine = whole_context_engine(decoder, num_slots=1, eos_id=end_id)
    for request in (first, second):
        engine.submit(request)

    assert answers(drain(engine))[1] == (expected, "length")


def test_a_row_that_moves_before_it_proves_not_finite_harms_nobody_in_its_old_slot() -> None:
    decoder = toy_decoder(SMALL)
    prompts: list[tuple[int, ...]] = [(14, 24), (14, 12), (22, 15, 25, 12, 10, 27), (36,), (12,)]
    requests = requests_of(whole_context_engine(decoder, num_slots=1), prompts, max_new_tokens=[12, 3, 9, 8, 8])
    harmful_id = alone(decoder, requests[2])[2]
    expected = [alone(decoder, request) for request in requests]
    assert all(harmful_id not in (*prompts[index], *expected[index]) for index in (0, 1, 3, 4))
    decoder.embedding.weight[harmful_id] = float("inf")
    engine = whole_context_engine(decoder, num_slots=4)
    for request in requests[:3]:
        engine.submit(request)
    outputs: list[Output] = []
    while not any(output.finish for output in outputs):  # the second ends; the third moves, its harmful step unread
        outputs += engine.step()
    for request in requests[3:]:
        engine.submit(request)
    given = answers(outputs + drain(engine))

    assert given[2] == (expected[2][:3], "not_finite")
    assert [given[index][0] for index in (0, 1, 3, 4)] == [expected[index] for index in (0, 1, 3, 4)]


def test_a_cancelled_row_of_which_nothing_was_read_harms_nobody_who_gets_the_slot() -> None:
    decoder = toy_decoder(SMALL)
    decoder.embedding.weight[HARMFUL_IDS[0]] = float("inf")
    engine = whole_context_engine(decoder, num_slots=1)
    prompts: list[tuple[int, ...]] = [(6, 7, 8, HARMFUL_IDS[0], 9, 10), (6,)]
    first, second = requests_of(engine, prompts, max_new_tokens=[9, 9])
    expected = alone(decoder, second)
    assert HARMFUL_IDS[0] not in expected
    engine.submit(first)
    engine.step()
    engine.cancel(first.id)
    engine.submit(second)

    assert answers(drain(engine)) == {1: (expected, "length")}


def test_scores_do_not_wait_for_steps_and_steps_not_for_scores() -> None:
    results = []
    for backend in (CpuBackend(), QueuedBackend()):
        engine = Engine(EagerExecutor(toy_decoder(), backend=backend, num_slots=2), eos_id=EOS_ID)
        prefixes = engine.project_prefix(toy_visual_queries(6))
        for index, prefix in enumerate(prefixes):
            continuations = ((5,), (6, 7)) if index % 2 else ()
            engine.submit(request_of(index, (1, 8, 9), prefix, SamplingParams(max_new_tokens=5), continuations))
        outputs = drain(engine)
        results.append((answers(outputs), {output.request_id: output.logprobs for output in outputs}))
    assert results[0] == results[1]


def test_the_host_reads_ids_while_the_next_step_runs() -> None:
    backend = RecordingBackend()
    executor = GraphExecutor(toy_decoder(), backend=backend, num_slots=3, mode="recorded")
    engine = Engine(executor, eos_id=-7)
    for request in toy_requests(engine, toy_prompts(3), sampling=[SamplingParams(max_new_tokens=10)] * 3):
        engine.submit(request)
    given = answers(drain(engine))

    assert [len(ids) for ids, _ in given.values()] == [10] * 3
    # One prefill and nine steps; each but the last is read with one more launched, and none is launched in vain.
    assert backend.num_ahead == [1] * 9 + [0]
    assert backend.num_launched == 9


def test_no_step_writes_beyond_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    positions_seen: list[int] = []
    plain = EagerExecutor.decode

    def watched(self: EagerExecutor, token_ids: Any, positions: Any) -> Any:
        positions_seen.extend(positions)
        return plain(self, token_ids, positions)

    monkeypatch.setattr(EagerExecutor, "decode", watched)
    engine = Engine(EagerExecutor(toy_decoder(SMALL), backend=QueuedBackend(), num_slots=2), eos_id=-7)
    prompts = [tuple([6] * (SMALL.context - 3)), (6,)]
    for request in requests_of(engine, prompts, max_new_tokens=[SMALL.context] * 2):
        engine.submit(request)
    given = answers(drain(engine))

    assert [len(given[index][0]) for index in (0, 1)] == [3, SMALL.context - 1]
    assert max(positions_seen) == SMALL.context - 2  # the last token is chosen, and fed to nobody


def test_an_engine_whose_requests_are_all_cancelled_is_idle_and_goes_on_with_the_next() -> None:
    decoder = toy_decoder()
    engine = Engine(EagerExecutor(decoder, backend=QueuedBackend(), num_slots=2), eos_id=EOS_ID)
    requests = toy_requests(engine, toy_prompts(3), sampling=[SamplingParams(max_new_tokens=6)] * 3)
    expected = Engine(EagerExecutor(decoder, backend=CpuBackend(), num_slots=2), eos_id=EOS_ID)
    expected.submit(requests[2])
    for request in requests[:2]:
        engine.submit(request)
    assert engine.step() == []
    for request in requests[:2]:
        engine.cancel(request.id)

    assert engine.num_unfinished == 0
    assert engine.step() == []
    engine.submit(requests[2])
    assert answers(drain(engine)) == answers(drain(expected))


def test_what_is_fed_to_the_device_is_what_it_chose_itself() -> None:
    # On a device with a queue the host may not be asked for a token that it has not read.
    fed: list[bool] = []

    class Watched(EagerExecutor):
        def decode(self, token_ids: Any, positions: Any) -> Any:
            fed.append(isinstance(token_ids, Tensor))
            return super().decode(token_ids, positions)

    for backend, on_device in ((QueuedBackend(), True), (CpuBackend(), False)):
        fed.clear()
        engine = Engine(Watched(toy_decoder(), backend=backend, num_slots=2), eos_id=EOS_ID)
        for request in toy_requests(engine, toy_prompts(2), sampling=[SamplingParams(max_new_tokens=4)] * 2):
            engine.submit(request)
        drain(engine)
        assert set(fed) == {on_device}


def test_a_warm_up_takes_no_time_from_requests_under_way() -> None:
    engine = Engine(EagerExecutor(toy_decoder(), backend=CpuBackend(), num_slots=2), eos_id=EOS_ID)
    (request,) = toy_requests(engine, toy_prompts(1), sampling=[SamplingParams(max_new_tokens=4)])
    engine.submit(request)
    with pytest.raises(RuntimeError, match="before its first request"):
        engine.warm_up(prompt_tokens=4, new_tokens=4)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_warm_up_runs_every_step_that_requests_will_need_and_leaves_nothing(num_slots: int) -> None:
    decoder = toy_decoder()
    executor = GraphExecutor(decoder, backend=RecordingBackend(), num_slots=num_slots, mode="recorded")
    engine = Engine(executor, eos_id=EOS_ID)
    done = engine.warm_up(prompt_tokens=31, new_tokens=33)
    ready = executor.programs

    assert done.programs == 2 * len(ready)  # one prefill for each number of rows, of one length here
    assert done.seconds > 0
    assert not torch.cat([executor._cache.k.flatten(), executor._prefix.k.flatten()]).any()
    sampling = [SamplingParams(max_new_tokens=3 + 5 * index) for index in range(6)]
    requests = toy_requests(engine, toy_prompts(6, longest=31), sampling=sampling)
    plain = Engine(EagerExecutor(decoder, backend=CpuBackend(), num_slots=1), eos_id=EOS_ID)
    for request in requests:
        engine.submit(request)
        plain.submit(request)
    assert answers(drain(engine)) == answers(drain(plain))
    assert executor.programs == ready
