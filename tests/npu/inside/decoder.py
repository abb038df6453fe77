"""Models on the fake NPU and on the CPU: toy decoders in the engine, and the embedded model in `Captioner`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.devices import Backend, CpuBackend
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.schemes.state import convert_precision
from tests.llm import toys
from tests.llm.toys import CONFIG, drain, open_runner, toy_decoder, toy_prompts, toy_visual_queries
from tests.npu.inside.host_ops import HostOps, MixedDevicesError

# Heads of 64, as the fused rotation needs them, and heads of 16, which it refuses.
FUSED = dataclasses.replace(
    CONFIG, head_dim=0, num_kv_heads=0, dim=128, num_layers=2, num_heads=2, ffn_dim=80, num_adapter_layers=1
)
SMALL = dataclasses.replace(FUSED, head_dim=0, num_kv_heads=0, num_heads=8)
# Two query heads on one of keys, norms of heads, and a window that every prompt exceeds.
GROUPED = dataclasses.replace(FUSED, num_kv_heads=1, qk_norm="head", layer_windows=(5, 0))
NUM_REQUESTS = 5  # on 3 slots, so that lengths differ, slots are freed and rows are moved
PROMPTS = ["Generate caption of this image", "How many shapes are there?"]  # prompts of different lengths


def results(
    config: DecoderConfig,
    backend: Backend,
    *,
    dtype: torch.dtype,
    wanted: str = "auto",
    mode: str = "eager",
    precision: Any = FLOAT,
    num_requests: int = NUM_REQUESTS,
    num_tokens: int = 4,
) -> dict[str, Any]:
    toy = toy_decoder(config)
    state = convert_precision(toy.state_dict(), toy, dtype=dtype, wanted=precision)
    runner = open_runner(config, state, backend=backend, num_slots=3, operators=wanted, mode=mode)
    engine = Engine(runner, eos_id=2)
    prompts = toy_prompts(num_requests)
    prefixes = engine.project_prefix(toy_visual_queries(num_requests, config=config))
    for index, (prompt, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
        sampling = SamplingParams(max_new_tokens=num_tokens + index)
        engine.submit(GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=sampling))
    continuations = ((5, 6), (7,), (8, 9, 10))
    engine.submit(ScoreRequest(id=90, prompt_ids=prompts[-1], prefix=prefixes[-1], continuations=continuations))
    outputs = drain(engine)
    scores = [output.logprobs for output in outputs if output.logprobs]
    given = toys.answers(outputs)
    return {"ids": [given[index][0] for index in range(num_requests)], "scores": scores[0]}


@functools.cache
def on_cpu(config: DecoderConfig, name: str) -> dict[str, Any]:
    return results(config, CpuBackend(), dtype=getattr(torch, name))


def compute_expected() -> None:
    """Compute the expected results for all chips before the forks that inherit them."""
    halves = ("float16", "float32")
    for config, names in ((FUSED, ("float16", "bfloat16", "float32")), (SMALL, halves), (GROUPED, halves)):
        for name in names:
            on_cpu(config, name)
    captions_on_cpu()


def runs(backend: Backend) -> list[dict[str, Any]]:
    """Run the larger heads in every dtype of the chip, with its own operators and plain ones.

    Small heads and shared keys run in two dtypes.
    """
    runs = [("fused", FUSED, name, wanted) for name in backend.capabilities.dtypes for wanted in ("auto", "aten")]
    for name in ("float16", "float32"):
        runs += [("small", SMALL, name, "auto"), ("grouped", GROUPED, name, "auto")]
    return [one_run(*run, backend) for run in runs]


def one_run(label: str, config: DecoderConfig, name: str, wanted: str, backend: Any) -> dict[str, Any]:
    mode = HostOps()
    with mode:
        given = results(config, backend, dtype=getattr(torch, name), wanted=wanted)
    return {
        "label": f"{label} {name} {wanted}",
        "expected": on_cpu(config, name),
        "given": given,
        "calls": mode.calls,
        "choices": {choice.operator: [choice.implementation, choice.reason] for choice in backend.choices},
    }


def planted_mixes() -> dict[str, str]:
    """The results of operators that are given tensors of both host and device."""
    here, there = torch.ones(3), torch.ones(3).to("npu:0")
    attempts: dict[str, Callable[[], Any]] = {
        "add": lambda: here + there,
        "in place": lambda: there.mul_(here),
        "cat": lambda: torch.cat([there, here]),
        "index": lambda: there[torch.tensor([0, 1])],
        "matmul": lambda: there @ here,
    }
    outcomes = {}
    with HostOps():
        for name, attempt in attempts.items():
            try:
                attempt()
                outcomes[name] = "computed"
            except MixedDevicesError:
                outcomes[name] = "refused"
    return outcomes


def load(device: str, **options: Any) -> Captioner:
    return Captioner.load(device=device, dtype="float32", batch_size=3, **options)


def answers(captioner: Captioner) -> list[tuple[str, list[int], str]]:
    pictures = sorted(sample_pictures().iterdir())[:NUM_REQUESTS]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(pictures))]
    given = captioner.generate(pictures, prompts, max_new_tokens=8)
    given += captioner.generate(pictures[:2], "What colour is the shape?", choices=["red", "blue", "yellow"])
    return [(answer.text, list(answer.token_ids), answer.finish) for answer in given]


@functools.cache
def captions_on_cpu() -> list[tuple[str, list[int], str]]:
    return answers(load("cpu"))


def captions_of_both() -> dict[str, Any]:
    expected = captions_on_cpu()
    mode = HostOps()
    with mode:
        given = answers(load("npu:0"))
    return {"expected": expected, "given": given, "calls": mode.calls}
