"""Rows in blocks: many rows share a small cache, are put back when it is full, and answer as with a cache for each."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.fakes import cuda_graphs
from tests.fakes.cuda_graphs import FakeCuda, HostCuda
from tests.fakes.cuda_linear import LinearOps
from tests.llm.exported import runner_of
from tests.llm.toys import (
    EOS_ID,
    FAMILIES,
    NATIVE,
    Alternating,
    answer,
    drain,
    open_runner,
    toy_decoder,
    toy_past,
    toy_requests,
)

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
            for request in mixed_requests(engine, 16, config=config)
        ]
        answers.append(answer(engine, requests))
        assert (engine.num_put_back > 0) == bool(cache)

    assert answers[0] == answers[1]


@pytest.mark.slow
def test_a_thousand_rows_are_put_back_and_none_is_lost() -> None:
    whole, small = (Engine(open_runner(NATIVE, num_slots=8, **cache), eos_id=EOS_ID) for cache in ({}, SMALLEST))
    requests = mixed_requests(whole, 1000, config=NATIVE)
    expected, given = (answer(engine, requests) for engine in (whole, small))

    assert given.keys() == {request.id for request in requests}
    assert given == expected
    assert small.num_put_back > 100


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
        answers.append(answer(engine, mixed_requests(engine, 12, config=NATIVE)))
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
    places = engine._runner._cache.k[0, :, 0, :, 0]  # type: ignore[attr-defined]
    assert np.prod(places.shape) == (3 + 7 + 1) * 8, "the rows share a small cache"
    expected = answer(engine, requests)
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.cancel(0)
    engine.cancel(1)
    outputs = drain(engine)
    assert {output.request_id for output in outputs} == {2}
    assert [output.token_id for output in outputs] == expected[2][0]
