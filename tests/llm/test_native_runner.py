"""The decoder by the kernels gives what the plain one gives: prefill, steps, scores, in slots of any order."""

import dataclasses
import itertools

import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.load import open_executor
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.runners.eager import EagerExecutor, Executor
from llama_adapter.llm.runners.native import NativeExecutor
from llama_adapter.llm.runners.prediction import NO_TOKEN
from llama_adapter.runtime.devices.backend import CpuBackend
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.kernels.threads import num_threads, torch_stands_aside
from tests.llm.toys import EOS_ID, answers, drain, toy_decoder, toy_prompts, toy_requests, toy_visual_queries

CONFIG = DecoderConfig(
    vocab_size=300,
    dim=128,
    num_layers=3,
    num_heads=4,
    ffn_dim=192,
    norm_eps=1e-6,
    context=64,
    num_adapter_layers=2,
    num_queries=5,
)
CONFIGS = {
    "heads of 32": CONFIG,
    "heads of 64": dataclasses.replace(CONFIG, num_heads=2),
    "heads of 96": dataclasses.replace(CONFIG, dim=192, num_heads=2),
    "heads of 128": dataclasses.replace(CONFIG, dim=256, num_heads=2),
    "no adapter": dataclasses.replace(CONFIG, num_adapter_layers=0, num_queries=0),
    "one layer": dataclasses.replace(CONFIG, num_layers=1, num_adapter_layers=1),
    "adapter everywhere": dataclasses.replace(CONFIG, num_adapter_layers=3, separate_adapter_kv=True),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.25}  # of logits of up to about 30

pytestmark = pytest.mark.skipif(find_library().library is None, reason=find_library().reason or "there are kernels")


def executors(
    config: DecoderConfig = CONFIG, *, dtype: torch.dtype = torch.float32, num_slots: int = 6
) -> tuple[Executor, Executor]:
    """By the kernels, and by plain torch."""
    state = {name: value.to(dtype) for name, value in toy_decoder(config).state_dict().items()}
    ours, plain = (
        open_executor(config, state, backend=CpuBackend(), num_slots=num_slots, operators=operators)
        for operators in ("auto", "aten")
    )
    if not isinstance(ours, NativeExecutor):
        pytest.skip(f"this processor has no kernels for {dtype}")
    assert type(plain) is EagerExecutor
    return ours, plain


def prefixes(executor: Executor, count: int) -> list[Prefix]:
    return executor.project_prefix(toy_visual_queries(count, config=executor.config))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_prefill_and_steps_give_the_plain_decoders_logits(config: DecoderConfig, dtype: torch.dtype) -> None:
    ours, plain = executors(config, dtype=dtype)
    prompts = toy_prompts(4, longest=20)
    pictures = prefixes(plain, 4)
    positions = [len(prompt) for prompt in prompts]

    logits = [executor.prefill(prompts, pictures, first_slot=0).logits_RV for executor in (ours, plain)]
    for _ in range(6):
        torch.testing.assert_close(*logits, atol=TOLERANCE[dtype], rtol=2e-5)
        tokens = logits[1].argmax(-1).tolist()
        logits = [executor.decode(tokens, positions).logits_RV for executor in (ours, plain)]
        positions = [position + 1 for position in positions]
    torch.testing.assert_close(*logits, atol=TOLERANCE[dtype], rtol=2e-5)


def test_new_rows_behind_running_ones_and_moved_rows_go_on_as_they_were() -> None:
    ours, plain = executors()
    prompts, pictures = toy_prompts(5), prefixes(plain, 5)
    logits = []
    for executor in (ours, plain):
        executor.prefill(prompts[:3], pictures[:3], first_slot=0)
        executor.prefill(prompts[3:], pictures[3:], first_slot=3)
        executor.move(4, 1, num_tokens=len(prompts[4]))
        order = [0, 4, 2, 3]
        logits.append(executor.decode([9, 8, 7, 6], [len(prompts[row]) for row in order]).logits_RV)

    torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-5)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    ours, _ = executors()
    prompts, pictures = toy_prompts(6), prefixes(ours, 6)
    positions = [len(prompt) for prompt in prompts]
    together = ours.prefill(prompts, pictures, first_slot=0).logits_RV, ours.decode([5] * 6, positions).logits_RV

    for row in range(6):
        alone = ours.prefill([prompts[row]], [pictures[row]], first_slot=0).logits_RV
        assert torch.equal(alone[0], together[0][row])
        assert torch.equal(ours.decode([5], [positions[row]]).logits_RV[0], together[1][row])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_continuations_are_scored_as_by_the_plain_decoder(config: DecoderConfig) -> None:
    ours, plain = executors(config)
    continuations = ((3, 4, 5), (6,), (7, 8), (3, 4))
    rows = [
        ScoreRequest(id=0, prompt_ids=prompt, continuations=continuations[: 2 + index], prefix=prefix)
        for index, (prompt, prefix) in enumerate(zip(toy_prompts(3), prefixes(plain, 3), strict=True))
    ]

    for scores in zip(ours.score(rows), plain.score(rows), strict=True):
        torch.testing.assert_close(*map(torch.tensor, scores), atol=2e-4, rtol=0)


def test_scoring_leaves_running_rows_alone() -> None:
    ours, _ = executors()
    prompts, pictures = toy_prompts(2), prefixes(ours, 2)
    ours.prefill(prompts, pictures, first_slot=0)
    positions = [len(prompt) for prompt in prompts]
    expected = ours.decode([5, 6], positions).logits_RV

    ours.prefill(prompts, pictures, first_slot=0)
    ours.score([ScoreRequest(id=0, prompt_ids=prompts[1], continuations=((3,), (4, 5)), prefix=pictures[0])])

    assert torch.equal(ours.decode([5, 6], positions).logits_RV, expected)


def test_many_long_prompts_go_through_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = executors()
    prompts, pictures = toy_prompts(6, longest=60), prefixes(ours, 6)
    rows = [
        ScoreRequest(id=0, prompt_ids=prompt, continuations=((3, 4), (5,)), prefix=prefix)
        for prompt, prefix in zip(prompts, pictures, strict=True)
    ]
    whole = ours.prefill(prompts, pictures, first_slot=0).logits_RV, ours.score(rows)
    monkeypatch.setattr("llama_adapter.llm.runners.native._MAX_TOKENS", 40)

    assert torch.equal(ours.prefill(prompts, pictures, first_slot=0).logits_RV, whole[0])
    assert ours.score(rows) == whole[1]


def test_the_engine_answers_as_with_the_plain_decoder() -> None:
    sampled = [
        SamplingParams(max_new_tokens=5 + index, temperature=0.8 * (index % 2), seed=index) for index in range(9)
    ]
    collected = []
    for executor in executors(num_slots=4):
        engine = Engine(executor, eos_id=EOS_ID)
        for request in toy_requests(engine, toy_prompts(9), sampling=sampled, config=CONFIG):
            engine.submit(request)
        collected.append(answers(drain(engine)))

    assert collected[0] == collected[1]


def test_a_picture_without_numbers_ends_its_own_row_only() -> None:
    ours, _ = executors()
    pictures = prefixes(ours, 2)
    broken = Prefix(pictures[1].k, pictures[1].v * float("nan"))

    logits_RV, best_R = ours.prefill(toy_prompts(2), [pictures[0], broken], first_slot=0)

    assert logits_RV[0].isfinite().all()
    assert not logits_RV[1].isfinite().any()
    assert best_R.tolist() == [int(logits_RV[0].argmax()), NO_TOKEN]


def test_of_equal_logits_the_first_token_is_the_best() -> None:
    decoder = toy_decoder(CONFIG)
    decoder.head.weight[100:] = decoder.head.weight[:100].repeat(2, 1)  # each logit three times
    executor = open_executor(CONFIG, decoder.state_dict(), backend=CpuBackend(), num_slots=6)

    logits_RV, best_R = executor.prefill(toy_prompts(6), prefixes(executor, 6), first_slot=0)

    assert best_R.tolist() == [row.index(max(row)) for row in logits_RV.tolist()]
    assert max(best_R.tolist()) < 100


@pytest.mark.parametrize(("slot", "position"), [(6, 3), (0, 64)])
def test_what_lies_outside_of_the_slots_is_refused(slot: int, position: int) -> None:
    ours, _ = executors()

    with pytest.raises(IndexError):
        ours.decode([5] * (slot + 1), [position] * (slot + 1))


@pytest.mark.parametrize("positions", [[-1], [], [3, 4]], ids=str)
def test_positions_that_are_not_those_of_the_tokens_are_refused(positions: list[int]) -> None:
    ours, _ = executors()

    with pytest.raises(IndexError):
        ours.decode([5], positions)


@pytest.mark.parametrize("prompts", [[[]], [[3, 4], []]], ids=str)
def test_prompts_without_tokens_are_refused(prompts: list[list[int]]) -> None:
    ours, _ = executors()

    with pytest.raises(IndexError, match="no tokens"):
        ours.prefill(prompts, prefixes(ours, len(prompts)), first_slot=0)


def test_pictures_of_another_model_are_not_scored() -> None:
    ours, _ = executors()
    [picture] = prefixes(ours, 1)
    fewer = Prefix(picture.k[:, :, :, :2], picture.v[:, :, :, :2])

    with pytest.raises(ValueError, match="prefixes"):
        ours.score([ScoreRequest(id=0, prompt_ids=(3, 4), continuations=((5,), (6,)), prefix=fewer)])


def test_an_adapter_without_queries_adds_nothing() -> None:
    ours, plain = executors(dataclasses.replace(CONFIG, num_queries=0))
    pictures = [executor.project_prefix(torch.zeros(1, 0, CONFIG.dim)) for executor in (ours, plain)]

    logits = [
        executor.prefill([[3, 4]], picture, first_slot=0).logits_RV
        for executor, picture in zip((ours, plain), pictures, strict=True)
    ]

    torch.testing.assert_close(*logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_prompt_gives_the_same_bits_at_once_and_token_by_token(dtype: torch.dtype) -> None:
    ours, _ = executors(dtype=dtype)
    [prompt], [picture] = toy_prompts(1, longest=20), prefixes(ours, 1)
    whole = ours.prefill([prompt], [picture], first_slot=0).logits_RV

    logits = ours.prefill([prompt[:1]], [picture], first_slot=0).logits_RV
    for position, token in enumerate(prompt[1:], start=1):
        logits = ours.decode([token], [position]).logits_RV

    assert torch.equal(logits, whole)


def test_decoders_that_the_kernels_do_not_take_run_by_torch() -> None:
    narrow = dataclasses.replace(CONFIG, num_heads=16)
    state = toy_decoder(narrow).state_dict()

    executor = open_executor(narrow, state, backend=CpuBackend(), num_slots=2)

    assert type(executor) is EagerExecutor


def test_quantised_weights_run_by_the_kernels_and_are_widened_without_them() -> None:
    library = find_library().library
    assert library is not None
    state = dict(toy_decoder(CONFIG).state_dict())
    exact = dict(state)
    for name in [
        name for name in state if name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight"))
    ]:
        scale = state[name].abs().amax(dim=1) / 127
        state[name + "_scale"], state[name] = scale, (state[name] / scale[:, None]).round().to(torch.int8)
        exact[name] = state[name].float() * scale[:, None]
    prompts = toy_prompts(3)
    logits = []
    for weights, operators in itertools.product((state, exact), ("auto", "aten")):
        executor = open_executor(CONFIG, weights, backend=CpuBackend(), num_slots=3, operators=operators)
        logits.append(executor.prefill(prompts, prefixes(executor, 3), first_slot=0).logits_RV)
    quantised, widened, float_native, float_plain = logits

    torch.testing.assert_close(widened, float_plain, atol=2e-5, rtol=2e-5)
    if not library.takes(torch.int8):
        pytest.skip("this processor has no kernels for int8")
    error = (quantised - float_native).norm() / float_native.norm()
    assert 1e-5 < error < 0.05


def test_torch_has_its_threads_back_after_each_call_also_after_a_failing_one() -> None:
    ours, _ = executors()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_stands_aside():
            assert (torch.get_num_threads(), num_threads()) == (1, 3)
            ours.prefill(toy_prompts(2), prefixes(ours, 2), first_slot=0)
            assert (torch.get_num_threads(), num_threads()) == (1, 3)
        with pytest.raises(IndexError):
            ours.prefill([[]], prefixes(ours, 1), first_slot=0)
        assert (torch.get_num_threads(), num_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)
