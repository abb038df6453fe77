"""What an engine promises whoever begins again after a step that raised: other rows, other slots, the same answers."""

import random
from dataclasses import replace

import pytest
import torch

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.eager import EagerExecutor
from llama_adapter.llm.runners.shapes import BucketedShapes, ExactShapes
from llama_adapter.runtime.devices.backend import CpuBackend
from tests.llm.test_async_readback import SMALL, QueuedBackend, WholeContext
from tests.llm.toys import EOS_ID, answers, drain, toy_decoder, toy_prompts, toy_requests, toy_visual_queries

PROMPTS = [prompt[:9] for prompt in toy_prompts(9, longest=12)]
PROMPTS = [tuple(token % SMALL.vocab_size for token in prompt) for prompt in PROMPTS]


def open_engine(
    decoder: LlamaAdapterDecoder, backend: CpuBackend, *, num_slots: int = 4, shapes: object = None
) -> Engine:
    executor = EagerExecutor(decoder, backend=backend, num_slots=num_slots, shapes=shapes)  # type: ignore[arg-type]
    return Engine(executor, eos_id=EOS_ID)


def requests_to(engine: Engine, *, temperature: float = 0.0) -> list[GenerateRequest]:
    sampling = [
        SamplingParams(max_new_tokens=4 + 3 * index, temperature=temperature, top_p=0.9, seed=index)
        for index in range(len(PROMPTS))
    ]
    return toy_requests(engine, PROMPTS, sampling=sampling, config=SMALL)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("backend", [CpuBackend(), QueuedBackend()], ids=["at once", "queued"])
def test_answers_that_are_begun_again_anywhere_are_the_same(backend: CpuBackend, temperature: float) -> None:
    decoder = toy_decoder(SMALL)
    plain = open_engine(decoder, CpuBackend())
    for request in requests_to(plain, temperature=temperature):
        plain.submit(request)
    expected = answers(drain(plain))

    draw = random.Random(1)
    engine = open_engine(decoder, backend, shapes=draw.choice([ExactShapes(), BucketedShapes(), WholeContext()]))
    requests = requests_to(engine, temperature=temperature)
    outputs: list[Output] = []
    for request in requests:
        engine.submit(request)
    for _ in range(4):
        for _ in range(draw.randint(0, 6)):
            outputs += engine.step()
        engine.reset()
        assert engine.num_unfinished == 0
        engine.limit_rows(draw.randint(1, 4))
        given = answers(outputs)
        for request in requests:
            ids, finish = given.get(request.id, ([], None))
            if finish is None:
                engine.submit(replace(request, known_ids=tuple(ids)))
    assert answers(outputs + drain(engine)) == expected


def test_no_more_rows_run_than_the_limit_and_those_that_do_are_let_be() -> None:
    rows: list[int] = []

    class Watched(EagerExecutor):
        def decode(self, token_ids: object, positions: object) -> object:  # type: ignore[override]
            rows.append(len(positions))  # type: ignore[arg-type]
            return super().decode(token_ids, positions)  # type: ignore[arg-type]

    engine = Engine(Watched(toy_decoder(SMALL), backend=CpuBackend(), num_slots=4), eos_id=-7)
    for request in requests_to(engine):
        engine.submit(request)
    engine.step()
    engine.step()
    engine.limit_rows(2)
    assert (engine.num_slots, engine.num_rows) == (4, 2)
    engine.step()
    assert rows == [4, 4]
    drain(engine)
    assert rows[-1] == 1
    assert all(count <= 2 for count in rows[rows.index(2) :])


@pytest.mark.parametrize("num_rows", [0, 5, -1])
def test_a_limit_beyond_the_slots_is_refused(num_rows: int) -> None:
    engine = open_engine(toy_decoder(SMALL), CpuBackend())
    with pytest.raises(ValueError, match=r"1\.\.4"):
        engine.limit_rows(num_rows)


def test_scores_keep_to_the_limit() -> None:
    rows: list[int] = []

    class Watched(EagerExecutor):
        def score(self, asked: object) -> object:  # type: ignore[override]
            rows.append(len(asked))  # type: ignore[arg-type]
            return super().score(asked)  # type: ignore[arg-type]

    engine = Engine(Watched(toy_decoder(SMALL), backend=CpuBackend(), num_slots=4), eos_id=-7)
    engine.limit_rows(3)
    for request in requests_to(engine):
        engine.submit(
            ScoreRequest(
                id=request.id,
                prompt_ids=request.prompt_ids,
                prefix=request.prefix,
                continuations=((5,), (6, 7)),
            )
        )
    drain(engine)
    assert rows == [3, 3, 3]


def test_what_a_failed_step_left_in_any_slot_reaches_nobody() -> None:
    decoder = toy_decoder(SMALL)
    plain = open_engine(decoder, CpuBackend())
    for request in requests_to(plain):
        plain.submit(request)
    expected = answers(drain(plain))

    executor = EagerExecutor(decoder, backend=CpuBackend(), num_slots=4, shapes=WholeContext())
    engine = Engine(executor, eos_id=EOS_ID)
    executor._cache.k.fill_(torch.nan)  # as of activations that overflowed
    executor._cache.v.fill_(torch.nan)
    engine.reset()
    for request in requests_to(engine):
        engine.submit(request)
    assert answers(drain(engine)) == expected


def test_an_answer_that_is_known_to_its_last_token_is_only_ended() -> None:
    engine = open_engine(toy_decoder(SMALL), CpuBackend())
    (prefix,) = engine.project_prefix(toy_visual_queries(1, config=SMALL))
    sampling = SamplingParams(max_new_tokens=3)
    engine.submit(GenerateRequest(id=0, prompt_ids=(1, 5), prefix=prefix, sampling=sampling, known_ids=(6, 7, 8)))
    assert answers(drain(engine)) == {0: ([], "length")}
