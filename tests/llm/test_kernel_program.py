"""The kernels' program without torch gives the bits of the native runner: prompts, steps, mixed plans and scores."""

from typing import Any

import numpy as np
import pytest
import torch

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.exported.kernel_program import KernelProgram
from llama_adapter.llm.exported.runner import ExportedRunner
from llama_adapter.llm.runners.base import ScorePlan
from llama_adapter.llm.runners.native import NativeRunner
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.schemes.scheme import dtype_name
from tests.llm.test_native_runner import CONFIG, CONFIGS, DTYPES, open_native
from tests.llm.toys import EOS_ID, answer, toy_decoder, toy_prompts, toy_requests, toy_visual_queries

pytestmark = pytest.mark.skipif(find_library().library is None, reason=find_library().reason or "there are kernels")


def runners(
    config: DecoderConfig = CONFIG, *, dtype: torch.dtype = torch.float32, num_slots: int = 4
) -> tuple[ExportedRunner, NativeRunner]:
    state = {name: value.to(dtype) for name, value in toy_decoder(config).state_dict().items()}
    native = open_native(config, state, num_slots=num_slots)
    arrays, library = native.arrays, find_library().library
    assert library is not None
    program = KernelProgram(config, arrays, dtype=dtype_name(dtype), num_slots=num_slots, library=library)
    return ExportedRunner(program, EngineConfig(decoder=config, dtype=np.dtype("f4"), num_slots=num_slots)), native


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_answers_log_probabilities_and_scores_are_those_of_the_native_runner(
    config: DecoderConfig, dtype: torch.dtype
) -> None:
    prompts = toy_prompts(7, longest=20)
    # More requests than slots, of different lengths, so that prompts are admitted beside running rows.
    sampled = [SamplingParams(max_new_tokens=3 + 2 * index) for index in range(7)]
    collected: list[Any] = []
    for runner in runners(config, dtype=dtype):
        engine = Engine(runner, eos_id=EOS_ID)
        answers = answer(engine, toy_requests(engine, prompts, sampling=sampled, config=config))
        pictures = runner.project_prefix(toy_visual_queries(2, config=config))
        plan = ScorePlan(range(2), prompts[:2], [((3, 4, 5), (6,)), ((7, 8),)], pictures)
        collected.append((answers, runner.run(plan)))

    (ours, our_scores), (native, scores) = collected
    assert ours == native
    assert np.concatenate(our_scores.logprobs) == pytest.approx(np.concatenate(scores.logprobs), rel=1e-6)


def test_drawn_answers_are_those_of_the_native_runner() -> None:
    sampled = [SamplingParams(max_new_tokens=9, temperature=0.8, top_p=0.9, seed=index) for index in range(6)]
    collected = []
    for runner in runners():
        engine = Engine(runner, eos_id=EOS_ID)
        collected.append(answer(engine, toy_requests(engine, toy_prompts(6), sampling=sampled, config=CONFIG)))

    assert collected[0] == collected[1]


@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.attention.qkv.float32", "norm.weight"])
def test_arrays_of_another_size_are_refused(name: str) -> None:
    native = open_native(CONFIG, toy_decoder(CONFIG).state_dict(), num_slots=1)
    arrays, library = native.arrays, find_library().library
    assert library is not None

    with pytest.raises(ValueError, match=r"wanted|embedding"):
        KernelProgram(CONFIG, {**arrays, name: arrays[name][:-1]}, dtype="float32", num_slots=1, library=library)
