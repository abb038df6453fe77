"""Rounded shapes and compiled steps compute what exact ones do."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.load import open_executor
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.runners.eager import EagerExecutor
from llama_adapter.llm.runners.graph import GraphExecutor
from llama_adapter.llm.runners.shapes import BucketedShapes, ExactShapes
from llama_adapter.runtime.devices.backend import Capabilities, CpuBackend, OperatorChoice, resolve_mode
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.operators.base import ATEN, Operators
from tests.llm.toys import CONFIG, EOS_ID, answers, drain, toy_decoder, toy_prompts, toy_requests, toy_visual_queries

WIDE = replace(CONFIG, context=256)  # so that decoding crosses the borders of buckets
PROMPTS = toy_prompts(9, longest=80)


class TracingBackend(CpuBackend):
    """A CPU with a graph mode: whole programs of fixed shapes, traced by torch's compiler and run without codegen."""

    capabilities = Capabilities(dtypes=("float32",), static_shapes=True, graph_modes=("traced",))

    def __init__(self) -> None:
        self.num_compiled = 0

    def compile(self, program: Callable[..., Tensor], *, mode: str) -> Callable[..., Tensor]:
        assert mode == "traced"
        self.num_compiled += 1
        return torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=False)


def answer_all(executor: EagerExecutor, *, num_prompts: int = len(PROMPTS)) -> dict[int, tuple[list[int], str | None]]:
    engine = Engine(executor, eos_id=EOS_ID)
    sampling = [SamplingParams(max_new_tokens=2 + 7 * index) for index in range(num_prompts)]
    for request in toy_requests(engine, PROMPTS[:num_prompts], sampling=sampling):
        engine.submit(request)
    return answers(drain(engine))


@given(needed=st.integers(1, 2000), room=st.integers(0, 500))
def test_rounded_sizes_hold_what_is_needed_and_stay_within_the_limit(needed: int, room: int) -> None:
    limit = needed + room
    for shapes in (ExactShapes(), BucketedShapes()):
        for size in (shapes.rows, shapes.prompt, shapes.length):
            assert needed <= size(needed, limit=limit) <= limit


def test_rounding_leaves_few_shapes() -> None:
    shapes = BucketedShapes()

    assert {shapes.rows(rows, limit=12) for rows in range(1, 13)} == {1, 2, 4, 8, 12}
    assert {shapes.length(length, limit=500) for length in range(1, 501)} == {64, 128, 256, 500}
    assert len({shapes.prompt(tokens, limit=512) for tokens in range(1, 513)}) == 8


@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_rounded_shapes_give_the_same_answers(num_slots: int) -> None:
    decoder, backend = toy_decoder(WIDE), CpuBackend()

    exact = answer_all(EagerExecutor(decoder, backend=backend, num_slots=num_slots))
    rounded = answer_all(EagerExecutor(decoder, backend=backend, num_slots=num_slots, shapes=BucketedShapes()))

    assert rounded == exact
    assert any(len(ids) > 30 for ids, _ in exact.values())


def test_rounded_shapes_give_the_same_scores() -> None:
    results = []
    for shapes in (ExactShapes(), BucketedShapes()):
        engine = Engine(
            EagerExecutor(toy_decoder(WIDE), backend=CpuBackend(), num_slots=4, shapes=shapes), eos_id=EOS_ID
        )
        prefixes = engine.project_prefix(toy_visual_queries(3))
        for index, prefix in enumerate(prefixes):
            continuations = ((5, 6, 7), (8,), (9, 10))
            engine.submit(ScoreRequest(id=index, prompt_ids=PROMPTS[index], prefix=prefix, continuations=continuations))
        results.append(torch.tensor([output.logprobs for output in drain(engine)]))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=0)


def test_a_row_that_is_not_finite_leaves_nothing_behind_for_rows_computed_along() -> None:
    decoder = toy_decoder(WIDE)
    executor = EagerExecutor(decoder, backend=CpuBackend(), num_slots=4, shapes=BucketedShapes())
    engine = Engine(executor, eos_id=EOS_ID)
    good = toy_requests(engine, PROMPTS[:6], sampling=[SamplingParams(max_new_tokens=30)] * 6)
    bad = GenerateRequest(
        id=99,
        prompt_ids=PROMPTS[6],
        prefix=Prefix(good[0].prefix.k * float("nan"), good[0].prefix.v),
        sampling=SamplingParams(max_new_tokens=5),
    )
    for request in (bad, *good):
        engine.submit(request)
    with_bad = answers(drain(engine))

    assert with_bad.pop(99) == ([], "not_finite")
    engine = Engine(EagerExecutor(decoder, backend=CpuBackend(), num_slots=1), eos_id=EOS_ID)
    for request in good:
        engine.submit(request)
    assert with_bad == answers(drain(engine))


def test_padding_is_as_finite_as_the_row_that_it_fills() -> None:
    # A piece of the vocabulary that overflows harms the rows that hold it, and no row that is filled up beside it.
    decoder = toy_decoder(WIDE)
    decoder.embedding.weight[0] = float("inf")
    prompts = [prompt for prompt in PROMPTS if 0 not in prompt][:3]
    logits = []
    for shapes, num_slots in ((ExactShapes(), 1), (ExactShapes(), 3), (BucketedShapes(), 5)):
        executor = EagerExecutor(decoder, backend=CpuBackend(), num_slots=num_slots, shapes=shapes)
        prefixes = executor.project_prefix(toy_visual_queries(3))
        if num_slots == 1:
            rows = [executor.prefill([prompts[row]], [prefixes[row]], first_slot=0).logits_RV for row in range(3)]
            logits.append(torch.cat(rows))
        else:
            logits.append(executor.prefill(prompts, prefixes, first_slot=0).logits_RV)
    assert bool(torch.stack(logits).isfinite().all())
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(logits[2], logits[0], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_compiled_steps_give_the_same_answers() -> None:
    decoder, backend = toy_decoder(WIDE), TracingBackend()
    executor = GraphExecutor(decoder, backend=backend, num_slots=3, mode="traced")

    assert answer_all(executor, num_prompts=4) == answer_all(
        EagerExecutor(decoder, backend=CpuBackend(), num_slots=3), num_prompts=4
    )
    # One program for each number of rows and attended length, and no more however many steps there are.
    assert backend.num_compiled == len(executor.programs) <= 3 * 2
    assert {rows for rows, _ in executor.programs} <= {1, 2, 3}
    assert {length for _, length in executor.programs} <= {64, 128}


def test_the_mode_decides_the_executor_and_an_unknown_one_is_told() -> None:
    state = toy_decoder(CONFIG).state_dict()
    backend = TracingBackend()

    eager = open_executor(CONFIG, state, backend=backend, num_slots=2)
    graph = open_executor(CONFIG, state, backend=backend, num_slots=2, mode=resolve_mode("graph", backend=backend))

    assert type(eager) is EagerExecutor
    assert type(graph) is GraphExecutor
    with pytest.raises(DeviceError, match="cpu has no mode `acl_graph`") as caught:
        resolve_mode("acl_graph", backend=backend)
    assert caught.value.hint == "pass one of eager, traced as --mode"
    with pytest.raises(DeviceError, match="cpu has no mode `graph`"):
        resolve_mode("graph", backend=CpuBackend())


def test_what_a_compiler_stumbles_over_is_told_as_the_modes_fault() -> None:
    class Stumbling(TracingBackend):
        def compile(self, program: Callable[..., Tensor], *, mode: str) -> Callable[..., Tensor]:
            def compiled(*_: Tensor) -> Tensor:
                raise ValueError("no kernel for this\nand a long story")

            return compiled

    executor = GraphExecutor(toy_decoder(), backend=Stumbling(), num_slots=2, mode="traced")
    executor.prefill([PROMPTS[0][:20]], executor.project_prefix(toy_visual_queries(1)), first_slot=0)
    with pytest.raises(DeviceError) as caught:
        executor.decode([5], [20])
    assert caught.value.message == (
        "cpu cannot compile a decode step of 1 rows and 64 positions in mode `traced` (ValueError: no kernel for this)"
    )
    assert caught.value.hint == "pass `--mode eager`"
    assert executor.programs == ()


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

    for wanted, expected in (("auto", {"rms_norm", "store"}), ("aten", set())):
        calls.clear()
        executor = open_executor(
            CONFIG, toy_decoder().state_dict(), backend=OwnOperators(), num_slots=2, operators=wanted
        )
        executor.prefill([PROMPTS[0][:20]], executor.project_prefix(toy_visual_queries(1)), first_slot=0)
        executor.decode([5], [20])
        assert set(calls) == expected


def test_what_would_not_fit_is_told_before_it_is_made() -> None:
    class SmallBackend(CpuBackend):
        def free_bytes(self) -> int:
            return 1_000

    with pytest.raises(
        DeviceError, match=r"2 slots with a context of 64 need .* GB for weights, .* GB for keys and values"
    ) as caught:
        open_executor(CONFIG, toy_decoder().state_dict(), backend=SmallBackend(), num_slots=2)
    assert caught.value.hint == "try a smaller --batch-size or --context, or a half --dtype"
