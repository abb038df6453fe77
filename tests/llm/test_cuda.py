"""NVIDIA GPUs, simulated: fused operators compute the same as plain ones, and recorded steps answer like eager ones.

Rounded shapes and compiled steps on other devices do so too.
"""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.llama import use_operators
from llama_adapter.llm.runners.base import ScorePlan
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.graph import GraphRunner
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT, STEPPED
from llama_adapter.runtime.devices import Capabilities, CpuBackend, settle_mode
from llama_adapter.runtime.devices.cuda import FUSED, CudaGraphs
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.operators import ATEN, Operators
from llama_adapter.runtime.schemes import OperatorChoice
from tests.bounds import Float64, difference, spread
from tests.fakes import cuda_graphs
from tests.fakes.cuda_graphs import FakeCuda, HostCuda
from tests.llm.toys import (
    CONFIG,
    EOS_ID,
    FAMILIES,
    answers_of_all,
    eager,
    eager_config,
    open_runner,
    rounding,
    toy_decoder,
    toy_prompts,
    toy_requests,
    toy_visual_queries,
)

WIDE = replace(CONFIG, context=256)
cuda = cuda_graphs.cuda  # a fixture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.proves("fused operators or kernels", "CUDA")
def test_fused_operators_compute_what_plain_ones_do(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    q, k, v, gated = normal(3, 4, 6, 16), normal(3, 4, 9, 16), normal(3, 4, 9, 16), normal(3, 4, 5, 16)
    keys = normal(3, 4, 5, 16)
    shared = normal(3, 2, 6, 16)  # keys that two heads of queries read
    mask = torch.ones(3, 1, 6, 9, dtype=torch.bool).tril(diagonal=2)
    causal = mask[:, :, :, 2:8]
    angles = torch.randn(1, 6, 1, 8, generator=draw).repeat(1, 1, 1, 2)
    x, weight = normal(3, 6, 64), normal(64)

    def computed(operators: Operators, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        rotary = operators.lay_out_rotary(angles.cos(), angles.sin(), 3, dtype)
        q_, k_, v_, keys_, gated_, shared_ = (one.to(dtype) for one in (q, k, v, keys, gated, shared))
        return (
            operators.rms_norm(x.to(dtype), weight.to(dtype), 1e-6),
            *operators.rotate(q_.transpose(1, 2), k_[:, :, :6].transpose(1, 2), *rotary),
            operators.causal_attention(q_, k_, v_, mask),
            operators.causal_attention(q_, k_, v_, mask[:1]),
            operators.causal_attention(q_, k_[:, :, :6], v_[:, :, :6], None if operators.knows_causal else causal),
            operators.causal_attention(q_, shared_, -shared_, None if operators.knows_causal else causal),
            operators.adapter_attention(q_, keys_, gated_),
        )

    with Float64():
        exact = computed(ATEN, torch.float64)
    for plain, fused, wanted in zip(computed(ATEN, dtype), computed(FUSED, dtype), exact, strict=True):
        assert fused.dtype == plain.dtype == dtype
        assert difference(fused, plain) <= spread(plain, wanted)


def test_a_gpu_has_a_queue_and_graphs_and_its_own_operators(cuda: FakeCuda) -> None:
    backend = HostCuda()

    assert settle_mode("graph", backend=backend) == settle_mode("cuda_graph", backend=backend) == ("cuda_graph", "")
    assert backend.capabilities.queued
    assert backend.choose_operators(CONFIG, dtype=torch.bfloat16, wanted="auto", mode="eager").name == "triton"
    assert backend.choose_operators(CONFIG, dtype=torch.float32, wanted="auto", mode="eager") is FUSED
    assert backend.choose_operators(CONFIG, dtype=torch.bfloat16, wanted="aten", mode="eager") is ATEN
    cuda.capability = (7, 5)
    assert HostCuda().choose_operators(CONFIG, dtype=torch.float16, wanted="auto", mode="eager").name == "sdpa"
    with pytest.raises(DeviceError, match="has no mode `inductor`"):
        backend.compile(lambda: None, mode="inductor")


@pytest.mark.parametrize("config", [WIDE, *(replace(config, context=256) for config in FAMILIES.values())])
@pytest.mark.proves("graphs", "CUDA")
@pytest.mark.proves("float32", "CUDA")
@pytest.mark.proves("Llama 3, TinyLlama, SmolLM2", "CUDA")
@pytest.mark.proves("Mistral, Phi-3, SmolLM3", "CUDA")
@pytest.mark.proves("Qwen2, Qwen2.5, Qwen3", "CUDA")
@pytest.mark.proves("Gemma 2, Gemma 3", "CUDA")
@pytest.mark.proves("OLMo 2, OLMo 3, Granite", "CUDA")
def test_recorded_steps_answer_as_eager_ones(config: DecoderConfig, cuda: FakeCuda) -> None:
    prompts = toy_prompts(6, longest=70)
    sampling = [
        SamplingParams(max_new_tokens=2 + 6 * index, temperature=index % 2, top_k=20, seed=index) for index in range(6)
    ]
    graphs = open_runner(config, backend=HostCuda(), num_slots=3, mode="cuda_graph")
    plain = open_runner(config, num_slots=1, operators="aten")
    engines = [Engine(runner, eos_id=EOS_ID) for runner in (graphs, plain)]
    recorded, eager = answers_of_all(engines, prompts, sampling=sampling)

    assert recorded == eager
    assert isinstance(graphs, GraphRunner)
    assert cuda.num_captures() == len(graphs._programs)
    assert {rows for rows, _ in graphs._programs} == {1, 2, 3}
    assert {length for _, length in graphs._programs} == {64, 128}
    (pool,) = cuda.pools  # one pool for all graphs
    assert pool.num_replays > 2 * cuda.num_captures()
    assert set(cuda.warm_up_streams).isdisjoint({cuda.main})


def test_prompts_of_a_shape_are_recorded_when_it_occurs_again(cuda: FakeCuda) -> None:
    graphs = open_runner(WIDE, backend=HostCuda(), num_slots=3, mode="cuda_graph")
    plain = open_runner(WIDE, num_slots=3, operators="aten")
    visual_query = torch.randn(3, WIDE.num_queries, WIDE.dim, generator=torch.Generator().manual_seed(0))
    prefixes = [runner.project_prefix(visual_query) for runner in (graphs, plain)]
    prompts = [toy_prompts(6, longest=30)[start : start + 2] for start in (0, 2, 4, 0)]
    for prompts_2, first_slot, number in zip(prompts, (0, 1, 1, 0), (0, 1, 1, 1), strict=True):
        same = [[*prompt, *[3] * (32 - len(prompt))] for prompt in prompts_2]
        both = [
            runner.prefill(same, prefix[:2], first_slot=first_slot)
            for runner, prefix in zip((graphs, plain), prefixes, strict=True)
        ]
        assert difference(both[0].logits_RV, both[1].logits_RV) <= rounding(WIDE)
        assert difference(graphs._cache.k, plain._cache.k) <= rounding(WIDE)  # smaller numbers than the logits
        assert difference(graphs._cache.v, plain._cache.v) <= rounding(WIDE)
        assert cuda.num_captures() == number  # one recording for all slots
    plan = ScorePlan([0, 1], prompts[0], [[[5, 6], [7]]] * 2, prefixes[0][:2])
    first, second = graphs.score(plan), graphs.score(plan)

    assert cuda.num_captures() == 2
    limit = 2 * 2 * rounding(WIDE)  # log-probabilities of up to two tokens
    assert second == [pytest.approx(scores, abs=limit) for scores in first]
    assert second == [
        pytest.approx(scores, abs=limit) for scores in plain.score(replace(plan, prefixes=prefixes[1][:2]))
    ]


def test_a_runner_is_released_without_the_garbage_collector(cuda: FakeCuda) -> None:
    runner = open_runner(WIDE, backend=HostCuda(), num_slots=2, mode="cuda_graph")
    for _ in range(2):
        runner.prefill([[3, 4, 5]], [runner.empty_prefix()], first_slot=0)
    runner.decode([5], [3])
    assert cuda.num_captures() == 2
    alive = weakref.ref(runner)
    gc.disable()
    try:
        del runner
        assert alive() is None
    finally:
        gc.enable()


def test_prompts_that_keep_the_gpu_busy_are_not_recorded(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = WIDE.num_layers * WIDE.dim * (4 * WIDE.dim + 3 * WIDE.ffn_dim)
    monkeypatch.setattr("llama_adapter.llm.runners.graph._MOST_WORK", 2 * 16 * weights)
    runner = open_runner(WIDE, backend=HostCuda(), num_slots=3, mode="cuda_graph")
    prefix = runner.empty_prefix()
    for num_rows, num_captures in ((3, 0), (3, 0), (2, 0), (2, 1)):
        runner.prefill([[3 + row] * 16 for row in range(num_rows)], [prefix] * num_rows, first_slot=0)
        assert cuda.num_captures() == num_captures


@pytest.mark.parametrize("num_slots", [1, 9])
def test_a_warm_up_records_all_needed_steps_and_clears_the_cache(num_slots: int, cuda: FakeCuda) -> None:
    runner = open_runner(CONFIG, backend=HostCuda(), num_slots=num_slots, mode="cuda_graph")
    engine, plain = Engine(runner, eos_id=EOS_ID), Engine(open_runner(CONFIG, num_slots=1), eos_id=EOS_ID)

    done = engine.warm_up(prompt_tokens=31, new_tokens=33)

    assert cuda.num_captures() == num_slots
    assert done.programs == 2 * num_slots  # here one prefill for each number of rows, all with one length
    assert done.seconds > 0
    assert not torch.cat([runner._cache.k.flatten(), runner._prefix.k.flatten()]).any()
    sampling = [SamplingParams(max_new_tokens=3 + 5 * index) for index in range(6)]
    answered, expected = answers_of_all([engine, plain], toy_prompts(6, longest=31), sampling=sampling)
    assert answered == expected
    assert sorted(runner._programs) == [(rows, 64) for rows in range(1, num_slots + 1)]
    engine.submit(toy_requests(engine, toy_prompts(1), sampling=sampling[:1])[0])
    with pytest.raises(RuntimeError):
        engine.warm_up(prompt_tokens=4, new_tokens=4)


def test_step_that_reads_from_the_device_is_refused(cuda: FakeCuda) -> None:
    decoder = toy_decoder()
    use_operators(decoder, replace(FUSED, swiglu=lambda x: ATEN.swiglu(x) * (2.0 if bool(x.isnan().any()) else 1.0)))
    runner = GraphRunner(decoder, eager_config(decoder, num_slots=2, mode="cuda_graph"), backend=HostCuda())
    with pytest.raises(DeviceError, match="stream is capturing") as caught:
        runner.decode([5], [0])
    assert caught.value.hint == "pass `--mode eager`; `--operators aten` may help too"
    assert runner._programs == {}


def test_inputs_of_all_graphs_share_memory_and_so_do_their_results(cuda: FakeCuda) -> None:
    graphs = CudaGraphs(torch.device("cpu"))
    inputs, places = [], []

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs.append((x.data_ptr(), y.data_ptr()))
        return x + y, x.sum(dim=1).long()

    for rows, width in ((4, 5), (2, 5), (3, 5), (1, 20)):
        x, y = torch.full((rows, width), 2.0), torch.full((rows, width), 3.0)
        added, sums = graphs.capture_at_first_call(program)(x, y)
        assert added.tolist() == (x + y).tolist()
        assert sums.tolist() == [2 * width] * rows
        places.append((added.data_ptr(), sums.data_ptr()))
    assert len(set(inputs)) == 1
    assert len(set(places[:3])) == 1  # of results that differ in their rows alone
    larger = torch.ones(7, 3)
    assert graphs.capture_at_first_call(program)(larger, larger)[0].unique().tolist() == [2.0]
    assert len(set(inputs)) == 2


@pytest.mark.parametrize("other", [torch.ones(2, 3, dtype=torch.float64), torch.ones(1, 3)])
def test_a_graph_takes_inputs_of_one_form(other: torch.Tensor, cuda: FakeCuda) -> None:
    recorded = CudaGraphs(torch.device("cpu")).capture_at_first_call(lambda x: (x * 2,))
    recorded(torch.ones(2, 3))
    with pytest.raises(AssertionError, match="inputs of one form"):
        recorded(other)


def test_a_pool_whose_graphs_are_all_gone_is_not_used_again(cuda: FakeCuda) -> None:
    graphs, x = CudaGraphs(torch.device("cpu")), torch.ones(2, 3)
    for _ in range(2):
        kept = [graphs.capture_at_first_call(lambda x: (x * 2,)) for _ in range(2)]
        assert [recorded(x)[0].sum().item() for recorded in kept] == [12.0, 12.0]
        for pool in cuda.pools:
            pool.graphs.clear()  # the simulated pool holds its graphs
        kept.clear()

    assert len(cuda.pools) == 2


def test_streams_are_joined_after_a_warm_up_that_fails(cuda: FakeCuda) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaGraphs(torch.device("cpu")).capture_at_first_call(program)(torch.ones(1))
    assert cuda.warm_up_streams[-1] in cuda.main.waited_for


def test_models_in_several_threads_capture_one_after_the_other(cuda: FakeCuda) -> None:
    both, num_met = threading.Barrier(2), list[int]()

    def program(x: torch.Tensor) -> tuple[torch.Tensor]:
        with contextlib.suppress(threading.BrokenBarrierError):
            num_met.append(both.wait(0.2))
        return (x * 2,)

    with ThreadPoolExecutor(2) as threads:
        graphs = [CudaGraphs(torch.device("cpu")).capture_at_first_call(program) for _ in range(2)]
        found = list(threads.map(lambda recorded: recorded(torch.ones(1))[0].item(), graphs))
    assert (found, num_met) == ([2.0, 2.0], [])


def test_memory_that_earlier_models_have_released_is_free(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [8]
    monkeypatch.setattr("torch.cuda.empty_cache", kept.clear)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10 - sum(kept), 24))
    assert HostCuda().free_bytes() == 10


# Rounded shapes and compiled steps do not change any answer

# Decoding crosses the border of a bucket. One layer has an adapter, one has none.
TRACED = replace(CONFIG, context=128, num_layers=2, num_adapter_layers=1)
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
    decoder = toy_decoder(TRACED)
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
    compiled, plain = traced_runner(backend, num_slots=2), eager(toy_decoder(TRACED), num_slots=2)
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
