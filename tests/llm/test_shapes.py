"""Rounded shapes and compiled steps do not change any answer."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.graph import GraphRunner
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT, STEPPED
from llama_adapter.runtime.devices import Capabilities, CpuBackend, settle_mode
from llama_adapter.runtime.operators import ATEN, Operators
from llama_adapter.runtime.schemes import OperatorChoice
from tests.llm.toys import (
    CONFIG,
    answers_of_all,
    eager,
    eager_config,
    open_runner,
    toy_decoder,
    toy_prompts,
    toy_visual_queries,
)

# Decoding crosses the border of a bucket. One layer has an adapter, one has none.
WIDE = replace(CONFIG, context=128, num_layers=2, num_adapter_layers=1)
PROMPTS = toy_prompts(9, longest=80)


class TracingBackend(CpuBackend):
    """A CPU with a graph mode. torch's compiler traces whole programs with fixed shapes, without code generation."""

    capabilities = Capabilities(dtypes=("float32",), static_shapes=True, graph_modes=("traced",))

    def __init__(self) -> None:
        self.num_compiled = 0

    def compile(self, program: Callable[..., Tensor], *, mode: str) -> Callable[..., Tensor]:
        assert mode == "traced"
        self.num_compiled += 1
        return torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=False)


def traced_runner(backend: TracingBackend, *, num_slots: int) -> GraphRunner:
    decoder = toy_decoder(WIDE)
    return GraphRunner(decoder, eager_config(decoder, num_slots=num_slots, mode="traced"), backend=backend)


@given(needed=st.integers(1, 2000), room=st.integers(0, 500))
def test_rounded_sizes_hold_what_is_needed_and_stay_within_the_limit(needed: int, room: int) -> None:
    limit = needed + room
    for shapes in (EXACT, BUCKETED, STEPPED):
        for size in (shapes.rows, shapes.step_rows, shapes.prompt, shapes.length):
            assert needed <= size(needed, limit=limit) <= limit


def test_rounding_leaves_few_shapes() -> None:
    assert {BUCKETED.rows(rows, limit=12) for rows in range(1, 13)} == {1, 2, 4, 8, 12}
    assert {BUCKETED.length(length, limit=500) for length in range(1, 501)} == {64, 128, 256, 500}
    assert len({BUCKETED.prompt(tokens, limit=512) for tokens in range(1, 513)}) == 8
    assert {STEPPED.step_rows(rows, limit=21) for rows in range(1, 22)} == {*range(1, 9), 10, 12, 14, 16, 20, 21}


@pytest.mark.slow
def test_compiled_steps_give_the_same_answers() -> None:
    backend = TracingBackend()
    compiled, plain = traced_runner(backend, num_slots=2), eager(toy_decoder(WIDE), num_slots=2)
    sampling = [SamplingParams(max_new_tokens=count) for count in (8, 3)]
    prompts = [tuple(range(3, 63)), (1, 8, 9)]
    engines = [Engine(runner, eos_id=-7) for runner in (compiled, plain)]
    ours, theirs = answers_of_all(engines, prompts, sampling=sampling)

    assert ours == theirs
    # One program per number of rows and attended length, for any number of steps.
    assert compiled._programs.keys() == {(2, 64), (1, 64), (1, 128)}
    assert backend.num_compiled == 3


def test_mode_chooses_the_runner() -> None:
    state, backend = toy_decoder().state_dict(), TracingBackend()
    mode, _ = settle_mode("graph", backend=backend)

    assert type(open_runner(CONFIG, state, backend=backend, num_slots=2)) is EagerRunner
    assert type(open_runner(CONFIG, state, backend=backend, num_slots=2, mode=mode)) is GraphRunner


def test_a_device_may_bring_its_own_operators() -> None:
    calls: list[str] = []

    def counted_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        calls.append("rms_norm")
        return ATEN.rms_norm(x, weight, eps)

    def counted_store(cache_BNPH: Tensor, positions_B: Tensor, new_BN1H: Tensor) -> None:
        calls.append("store")
        ATEN.store(cache_BNPH, positions_B, new_BN1H)

    class OwnOperators(CpuBackend):
        def choose_operators(
            self, config: object, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
        ) -> Operators:
            return ATEN if wanted == "aten" else replace(ATEN, rms_norm=counted_norm, store=counted_store)

    state = toy_decoder().state_dict()
    for wanted, expected in (("auto", {"rms_norm", "store"}), ("aten", set())):
        calls.clear()
        runner = open_runner(CONFIG, state, backend=OwnOperators(), num_slots=2, operators=wanted)
        runner.prefill([PROMPTS[0][:20]], runner.project_prefix(toy_visual_queries(1)), first_slot=0)
        runner.decode([5], [20])
        assert set(calls) == expected
