"""Tiny random decoders and requests for tests of the engine and the model; nothing here is trained."""

import random
from collections.abc import Iterable

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.eager import EagerExecutor
from llama_adapter.runtime.devices.backend import CpuBackend

EOS_ID = 2
CONFIG = DecoderConfig(
    vocab_size=300,
    dim=32,
    num_layers=3,
    num_heads=4,
    ffn_dim=48,
    norm_eps=1e-6,
    context=64,
    num_adapter_layers=2,
    num_queries=5,
)


def toy_decoder(config: DecoderConfig = CONFIG, *, seed: int = 0) -> LlamaAdapterDecoder:
    """Random weights with open gates and biases, so that every part of the model matters."""
    torch.manual_seed(seed)
    decoder = LlamaAdapterDecoder(config).eval().requires_grad_(False)
    decoder.adapter.gates.normal_()
    decoder.head.weight.normal_(std=0.5)
    for layer in decoder.layers:
        layer.attention.qkv.bias[config.dim :] = 0.0
    return decoder


def toy_engine(decoder: LlamaAdapterDecoder, *, num_slots: int, **options: int) -> Engine:
    executor = EagerExecutor(decoder, backend=CpuBackend(), num_slots=num_slots)
    return Engine(executor, eos_id=EOS_ID, **options)


def toy_prompts(count: int, *, seed: int = 0, longest: int = 30) -> list[tuple[int, ...]]:
    """Ragged prompts that begin with the begin token."""
    draw = random.Random(seed)
    return [(1, *(draw.randrange(3, 300) for _ in range(draw.randrange(longest)))) for _ in range(count)]


def toy_visual_queries(count: int, *, config: DecoderConfig = CONFIG) -> Tensor:
    return torch.randn(count, config.num_queries, config.dim, generator=torch.Generator().manual_seed(1))


def drain(engine: Engine) -> list[Output]:
    """Step until every request is answered."""
    outputs: list[Output] = []
    while engine.num_unfinished:
        outputs += engine.step()
    return outputs


def answers(outputs: Iterable[Output]) -> dict[int, tuple[list[int], str | None]]:
    """Token ids and finish of each request."""
    collected: dict[int, tuple[list[int], str | None]] = {}
    for output in outputs:
        ids, finish = collected.get(output.request_id, ([], None))
        assert finish is None, "an answer went on after its end"
        if output.token_id is not None:
            ids.append(output.token_id)
        collected[output.request_id] = (ids, output.finish)
    return collected


def toy_requests(
    engine: Engine, prompts: list[tuple[int, ...]], *, sampling: list[SamplingParams], config: DecoderConfig = CONFIG
) -> list[GenerateRequest]:
    prefixes = engine.project_prefix(toy_visual_queries(len(prompts), config=config))
    return [
        GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=params)
        for index, (prompt, prefix, params) in enumerate(zip(prompts, prefixes, sampling, strict=True))
    ]
