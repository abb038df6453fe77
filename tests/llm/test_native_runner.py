"""The kernels' decoder gives the same as the plain one: prefill, steps and scores, with slots in any order."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.rotary import Rotary
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, PrefillPlan, ScorePlan
from llama_adapter.llm.runners.draw import Draw, Rules
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.kernels.threads import num_threads, torch_stands_aside
from llama_adapter.runtime.schemes import Precision
from llama_adapter.runtime.schemes.state import dequantise, quantise
from tests.bounds import difference
from tests.llm.toys import (
    FAMILIES,
    NEEDS_KERNELS,
    answer,
    open_runner,
    rounding,
    toy_decoder,
    toy_past,
    toy_prompts,
    toy_requests,
    toy_visual_queries,
)
from tests.llm.toys import NATIVE as CONFIG

SIZES: dict[str, Any] = {"dim": CONFIG.dim, "ffn_dim": CONFIG.ffn_dim}
CONFIGS = {
    "heads of 32": CONFIG,
    "heads of 64": dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, num_heads=2),
    "heads of 96": dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, dim=192, num_heads=2),
    "heads of 128": dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, dim=256, num_heads=2),
    "no adapter": dataclasses.replace(CONFIG, num_adapter_layers=0, num_queries=0),
    "no queries": dataclasses.replace(CONFIG, num_queries=0),
    "one layer": dataclasses.replace(CONFIG, num_layers=1, num_adapter_layers=1),
    "adapter everywhere": dataclasses.replace(CONFIG, num_adapter_layers=3, separate_adapter_kv=True),
    # As families of decoders differ. Windows are shorter than prompts, caps near the size of scores and logits.
    "groups of 3": dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=2, head_dim=64),
    "groups of 7, heads of 80": dataclasses.replace(CONFIG, num_heads=7, num_kv_heads=1, head_dim=80),
    "grouped": dataclasses.replace(FAMILIES["grouped"], **SIZES, num_heads=2, num_kv_heads=1, head_dim=128),
    "gemma": dataclasses.replace(FAMILIES["gemma"], **SIZES, head_dim=256),
    "olmo": dataclasses.replace(FAMILIES["olmo"], **SIZES, head_dim=96),
    "windows": dataclasses.replace(
        FAMILIES["windows"], **SIZES, num_heads=8, head_dim=16, rotaries=(Rotary(share=0.75),)
    ),
}
WITH_BIAS = dataclasses.replace(CONFIGS["grouped"], separate_adapter_kv=True)  # also behind LoRA
DTYPES = (torch.float32, torch.bfloat16)

pytestmark = NEEDS_KERNELS


def runners(
    config: DecoderConfig = CONFIG, *, dtype: torch.dtype = torch.float32, num_slots: int = 6, **options: Any
) -> tuple[KernelRunner, EagerRunner]:
    """A runner by the kernels, and one by plain torch; `options` are those of EngineConfig."""
    state = {name: value.to(dtype) for name, value in toy_decoder(config).state_dict().items()}
    plain = open_runner(config, state, num_slots=num_slots, operators="aten", **options)
    assert type(plain) is EagerRunner
    return open_native(config, state, num_slots=num_slots, **options), plain


def open_native(
    config: DecoderConfig, state: Mapping[str, torch.Tensor], *, num_slots: int, **options: Any
) -> KernelRunner:
    """A runner by the kernels; `options` are those of EngineConfig."""
    runner = open_runner(config, state, num_slots=num_slots, **options)
    if not isinstance(runner, KernelRunner):
        pytest.skip(f"this processor has no kernels for {state['embedding.weight'].dtype}")
    return runner


def prefixes(runner: EagerRunner | KernelRunner, count: int) -> list[Prefix]:
    return runner.project_prefix(toy_visual_queries(count, config=runner.config.decoder))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.proves("fused operators or kernels", "CPU")
@pytest.mark.proves("fused decode steps of other bases than LLaMA", "CPU")
def test_prefill_steps_and_scores_are_the_plain_decoders(config: DecoderConfig, dtype: torch.dtype) -> None:
    prompts, limit = toy_prompts(4, longest=20), rounding(config, dtype=dtype)
    continuations = ((3, 4, 5), (6,), (7, 8), (3, 4), (9,))
    asked = [continuations[: 2 + index] for index in range(4)]
    # Windows count positions of the past too.
    for num_past in (0, 4) if config.layer_windows and dtype == torch.float32 else (0,):
        both = runners(config, dtype=dtype, past=toy_past(config, num_past))
        pictures = [prefixes(runner, 4) for runner in both]

        plans = [ScorePlan(range(4), prompts, asked, shown) for shown in pictures]
        scored = [runner.score(plan) for runner, plan in zip(both, plans, strict=True)]
        for scores in zip(*scored, strict=True):
            assert difference(*map(torch.tensor, scores)) <= 2 * 3 * limit  # of up to three tokens
        made = [runner.prefill(prompts, shown, first_slot=0) for runner, shown in zip(both, pictures, strict=True)]
        for step in range(7):
            logits = [torch.as_tensor(one.logits_RV) for one in made]
            assert difference(*logits) <= limit
            tokens, positions = logits[1].argmax(-1).tolist(), [len(prompt) + step for prompt in prompts]
            made = [runner.decode(tokens, positions) for runner in both]


@pytest.mark.parametrize("name", ["heads of 32", "groups of 7, heads of 80", "gemma"])
def test_rows_are_bitwise_independent_of_the_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = runners(CONFIGS[name])
    prompts, pictures = toy_prompts(6), prefixes(ours, 6)
    positions = [len(prompt) for prompt in prompts]
    together = (
        ours.prefill(prompts, pictures, first_slot=0).logits_RV,
        ours.decode([5] * 6, positions).logits_RV.copy(),
    )

    # Alone, a row's query heads are divided over more threads.
    monkeypatch.setattr("llama_adapter.llm.runners.kernel_decoder.num_threads", lambda: 5)
    for row in range(6):
        alone = ours.prefill([prompts[row]], [pictures[row]], first_slot=0).logits_RV
        assert np.array_equal(alone[0], together[0][row])
        assert np.array_equal(ours.decode([5], [positions[row]]).logits_RV.copy()[0], together[1][row])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pictures_that_are_asked_the_same_answer_as_each_alone(config: DecoderConfig) -> None:
    ours, _ = runners(config)
    prompt, pictures = toy_prompts(1)[0], prefixes(ours, 4)
    plan = ScorePlan(range(4), [prompt] * 4, [((3, 4), (5,))] * 4, pictures)
    scores = ours.score(plan)
    ours.prefill(toy_prompts(4, longest=30), pictures, first_slot=0)  # earlier content of the slots must not matter
    together = [ours.prefill([prompt] * 4, pictures, first_slot=0).logits_RV]
    steps = [[5] * 4, [6, 5, 5, 7], [8] * 4]  # equal tokens after different ones
    for place, tokens in enumerate(steps, start=len(prompt)):
        together.append(ours.decode(tokens, [place] * 4).logits_RV.copy())

    for row in range(4):
        alone = [ours.prefill([prompt], [pictures[row]], first_slot=0).logits_RV]
        for place, tokens in enumerate(steps, start=len(prompt)):
            alone.append(ours.decode([tokens[row]], [place]).logits_RV.copy())
        assert np.array_equal(np.concatenate(alone), np.stack(together)[:, row])
        asked = ScorePlan([0], [prompt], [((3, 4), (5,))], [pictures[row]])
        assert ours.score(asked) == [scores[row]]


def test_many_long_prompts_go_through_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = runners()
    prompts, pictures = toy_prompts(6, longest=60), prefixes(ours, 6)
    plan = ScorePlan(range(6), prompts, [((3, 4), (5,))] * 6, pictures)
    whole = ours.prefill(prompts, pictures, first_slot=0).logits_RV, ours.score(plan)
    monkeypatch.setattr("llama_adapter.llm.runners.ragged.MAX_TOKENS", 40)

    assert np.array_equal(ours.prefill(prompts, pictures, first_slot=0).logits_RV, whole[0])
    assert ours.score(plan) == whole[1]


def test_of_equal_logits_the_first_token_is_the_best() -> None:
    decoder = toy_decoder(CONFIG)
    decoder.head.weight[100:] = decoder.head.weight[:100].repeat(2, 1)  # each logit occurs three times
    runner = open_runner(CONFIG, decoder.state_dict(), num_slots=6)

    logits_RV, best_R = runner.prefill(toy_prompts(6), prefixes(runner, 6), first_slot=0)

    assert best_R.tolist() == [row.index(max(row)) for row in logits_RV.tolist()]
    assert max(best_R.tolist()) < 100


@pytest.mark.parametrize(
    ("token_ids", "positions"),
    [([5] * 7, [3] * 7), ([5], [64]), ([5], [-1]), ([5], []), ([5], [3, 4]), ([-1], [3]), ([5, 10**6], [3, 3])],
    ids=str,
)
def test_tokens_slots_and_positions_out_of_range_are_refused(token_ids: list[int], positions: list[int]) -> None:
    ours, _ = runners()

    with pytest.raises(IndexError):
        ours.decode(token_ids, positions)


@pytest.mark.parametrize("prompts", [[[]], [[3, 4], []]], ids=str)
def test_prompts_without_tokens_are_refused(prompts: list[list[int]]) -> None:
    ours, _ = runners()

    with pytest.raises(IndexError, match="no tokens"):
        ours.prefill(prompts, prefixes(ours, len(prompts)), first_slot=0)


def test_pictures_of_another_model_are_not_scored() -> None:
    ours, _ = runners()
    [picture] = prefixes(ours, 1)
    fewer = Prefix(picture.k[:, :, :, :2], picture.v[:, :, :, :2])

    with pytest.raises(ValueError, match="prefixes"):
        ours.score(ScorePlan([0], [(3, 4)], [((5,), (6,))], [fewer]))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_equals_single_steps_bitwise(config: DecoderConfig, dtype: torch.dtype) -> None:
    """A prefill computes the end of the last layer only for the last token; a step has only this token."""
    ours, _ = runners(config, dtype=dtype)
    [prompt], [picture] = toy_prompts(1, longest=20), prefixes(ours, 1)
    whole = ours.prefill([prompt], [picture], first_slot=0).logits_RV

    logits = ours.prefill([prompt[:1]], [picture], first_slot=0).logits_RV
    for position, token in enumerate(prompt[1:], start=1):
        logits = ours.decode([token], [position]).logits_RV.copy()

    assert np.array_equal(logits, whole)


def test_unsupported_decoders_run_in_torch_and_the_operators_of_others_name_the_instruction_set() -> None:
    narrow = dataclasses.replace(CONFIG, head_dim=0, num_kv_heads=0, num_heads=16)

    runner = open_runner(narrow, num_slots=2)

    assert type(runner) is EagerRunner

    library = find_library().library
    assert library is not None
    runner = open_runner(CONFIG, num_slots=1)

    assert runner.operators_name == f"native {library.instruction_set}"


# As in SmolLM2, widths are no multiples of the 128 inputs whose activations share a scale.
NARROW = dataclasses.replace(CONFIG, num_heads=6, num_kv_heads=2, head_dim=32, dim=160, ffn_dim=320)


@pytest.mark.parametrize("config", [CONFIG, NARROW], ids=["widths of 128", "widths of 160"])
@pytest.mark.parametrize(("precision", "least", "most"), [("int8", 1e-5, 0.05), ("int4", 1e-4, 0.05)])
def test_weights_of_few_bits_run_in_kernels_or_are_dequantised(
    precision: Precision, least: float, most: float, config: DecoderConfig
) -> None:
    decoder = toy_decoder(config)
    state = dict(quantise(decoder.state_dict().items(), decoder, dtype=torch.float32, precision=precision))
    exact = dict(dequantise(state, dtype=torch.float32))
    prompts = toy_prompts(3)
    logits = []
    for weights, operators in itertools.product((state, exact), ("auto", "aten")):
        runner = open_runner(config, weights, num_slots=3, operators=operators)
        assert isinstance(runner, KernelRunner) == (operators == "auto")
        logits.append(torch.as_tensor(runner.prefill(prompts, prefixes(runner, 3), first_slot=0).logits_RV))
    quantised, widened, float_native, float_plain = logits

    assert difference(widened, float_plain) <= rounding(config)
    error = (quantised - float_native).norm() / float_native.norm()
    assert least < error < most  # its activations are rounded to 8 bits


class _NoTorch(TorchFunctionMode):
    """Fails in each call of an operator of torch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} was called")


def test_nothing_calls_an_operator_of_torch() -> None:
    """Its threads would spin on the cores that the kernels need."""
    ours, _ = runners(num_slots=2)
    queries = toy_visual_queries(1, config=CONFIG).numpy()
    prompt = toy_prompts(1)[0]
    stored = np.zeros((CONFIG.num_adapter_layers, CONFIG.num_heads, CONFIG.num_queries, CONFIG.head_dim), np.float32)
    draw = Draw(0.8, 0.9, 5, 0.3, rules=Rules(repetition=1.2, prompt=prompt))
    with _NoTorch():
        [prefix] = ours.project_prefix(queries)
        step = DecodePlan([0], [len(prompt)], [draw], num_logprobs=2)
        later = PrefillPlan([1], [prompt], [ours.stored_prefix(stored, stored)], [None], first_slot=1)
        ours.run(PrefillPlan([0], [prompt], [prefix], [None], first_slot=0))
        ours.run(step)
        ours.run(MixedPlan(step, later))
        ours.run(ScorePlan([0], [prompt], [[(5, 6)]], [ours.empty_prefix()]))
        ours.move(1, 0, num_tokens=len(prompt))
        ours.clear(0)
        ours.warm_up(prompt_tokens=3, new_tokens=2)


def test_threads_of_torch_are_restored_after_errors() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_stands_aside():
            assert (torch.get_num_threads(), num_threads()) == (1, 3)
            with torch_stands_aside():
                pass
            assert (torch.get_num_threads(), num_threads()) == (1, 3)
        with pytest.raises(IndexError), torch_stands_aside():
            raise IndexError
        assert (torch.get_num_threads(), num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.attention.qkv.float32", "norm.weight"])
def test_arrays_of_another_size_are_refused(name: str) -> None:
    ours, library = open_native(CONFIG, toy_decoder(CONFIG).state_dict(), num_slots=1), find_library().library
    assert library is not None

    with pytest.raises(ValueError, match=r"wanted|embedding"):
        KernelRunner(ours.config, {**ours.arrays, name: ours.arrays[name][:-1]}, dtype="float32", library=library)


@pytest.mark.parametrize("config", [*CONFIGS.values(), WITH_BIAS], ids=[*CONFIGS, "biases of keys and values"])
@pytest.mark.parametrize(("dtype", "limit"), [*zip(DTYPES, (1e-5, 0.02), strict=True)], ids=str)
def test_prefixes_are_those_of_the_adapters_module(config: DecoderConfig, dtype: torch.dtype, limit: float) -> None:
    for ours, plain in zip(*(prefixes(runner, 3) for runner in runners(config, dtype=dtype)), strict=True):
        for made, wanted in zip(ours, plain, strict=True):
            torch.testing.assert_close(torch.from_numpy(made), wanted.float(), rtol=limit, atol=limit)


# A decode step in the program of a prefill


# Equal prompts in float32 are compared with single rows above.
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("dtype", "are_equal"),
    [(torch.bfloat16, True), (torch.float32, False)],
    ids=["equal prompts", "different prompts"],
)
def test_a_mixed_step_gives_the_logits_of_its_parts(
    are_equal: bool, dtype: torch.dtype, config: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = runners(config, dtype=dtype)
    prompts, pictures = toy_prompts(6, longest=20), prefixes(ours, 6)
    running, admitted = prompts[:3], [prompts[3]] * 3 if are_equal else prompts[3:]
    first = PrefillPlan(range(3), running, pictures[:3], [None] * 3, first_slot=0)
    step = DecodePlan(range(3), [len(prompt) for prompt in running], [None] * 3)
    prefill = PrefillPlan(range(3, 6), admitted, pictures[3:], [None] * 3, first_slot=3)
    positions = [len(prompt) + 1 for prompt in running] + [len(prompt) for prompt in admitted]

    newest: Any = ours.run(first)
    expected = [
        ours.decode(newest.token_ids, step.positions).logits_RV.copy(),
        ours.prefill(admitted, pictures[3:], first_slot=3).logits_RV,
        ours.decode([5] * 6, positions).logits_RV.copy(),
    ]
    for most_tokens in (2048, 10):  # in one portion, and in several
        monkeypatch.setattr("llama_adapter.llm.runners.ragged.MAX_TOKENS", most_tokens)
        ours.reset()
        ours.run(first)
        given = [ours.predict(MixedPlan(step, prefill)).logits_RV, ours.decode([5] * 6, positions).logits_RV.copy()]
        assert np.array_equal(np.concatenate(given), np.concatenate(expected))


def test_running_rows_go_on_while_new_ones_are_admitted() -> None:
    """That they answer the same is shown by the property test of schedules in test_engine.py."""
    runner, plans = open_native(CONFIG, toy_decoder(CONFIG).state_dict(), num_slots=3), list[Any]()
    run, engine = runner.run, Engine(runner, eos_id=-7)
    runner.run = lambda plan: plans.append(plan) or run(plan)  # type: ignore[method-assign, assignment, func-returns-value]
    sampling = [SamplingParams(max_new_tokens=3 + 2 * index) for index in range(6)]
    answer(engine, toy_requests(engine, toy_prompts(6), sampling=sampling, config=CONFIG))

    mixed = [plan for plan in plans if isinstance(plan, MixedPlan)]
    assert len(mixed) >= 3
    assert all(len(plan.decode.rows) == plan.prefill.first_slot > 0 for plan in mixed)
    assert sum(isinstance(plan, PrefillPlan) for plan in plans) == 1
    assert max(len(plan.rows) for plan in plans) == 3
