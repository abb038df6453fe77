"""Tiny random decoders, runners and requests for tests of the language half; none of them is trained."""

import functools
import random
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest, Output, Request, ScoreRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.load import place_decoder
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, RmsNorm
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.rotary import Rotary
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.sampler import kept_in_order
from llama_adapter.llm.runners.shapes import EXACT, Shapes
from llama_adapter.llm.weights.adapter import AdapterFile
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.names import LlamaSource
from llama_adapter.runtime.devices import Backend, CpuBackend
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.operators import ATEN, Operators
from tests.bounds import Float64, spread

GOLDEN = Path(__file__).parents[1] / "golden"
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

# Decoders that differ from the first LLaMA. Together they have every switch of `DecoderConfig`.
_GROUPED = replace(CONFIG, num_heads=6, num_kv_heads=3, head_dim=20)
_LLAMA3 = Rotary(theta=5e4, scaling="llama3", factor=8.0, original_context=16)
_YARN = Rotary(scaling="yarn", factor=4.0, original_context=16)
_LONG = Rotary(
    scaling="longrope", original_context=32, factor=4.0, share=0.5, long_factors=(1.5, 2.0), short_factors=()
)
FAMILIES = {
    "grouped": replace(_GROUPED, qk_norm="head", rotaries=(_LLAMA3,)),
    "gemma": replace(
        CONFIG,
        num_kv_heads=1,
        norms="both",
        activation="gelu_tanh",
        score_cap=2.0,
        logit_cap=5.0,
        rotaries=(Rotary(), Rotary(theta=1e6)),
        layer_rotaries=(0, 1, 0),
        layer_windows=(5, 0, 7),
    ),
    "olmo": replace(
        CONFIG,
        norms="after",
        qk_norm="all",
        rotaries=(_YARN, Rotary()),
        layer_rotaries=(1, 1, 0),
        layer_windows=(5, 5, 0),
    ),
    "windows": replace(CONFIG, num_kv_heads=2, rotaries=(_LONG,), layer_rotaries=(0, -1, 0), layer_windows=(5,) * 3),
}
NATIVE = replace(CONFIG, head_dim=0, num_kv_heads=0, dim=128, ffn_dim=192)  # sizes that the kernels accept
SMALL = replace(CONFIG, context=24, vocab_size=40, num_layers=2, num_adapter_layers=1)
NEEDS_KERNELS = pytest.mark.skipif(find_library().library is None, reason=find_library().reason or "there are kernels")
# Steps attend to all positions, and prompts are not padded, so that stale data in a slot has an effect.
WHOLE_CONTEXT = Shapes(length=lambda needed, *, limit: limit)


class QueuedBackend(CpuBackend):
    """The host, acting as a device that computes while the host continues."""

    capabilities = replace(CpuBackend.capabilities, queued=True)


def toy_decoder(config: DecoderConfig = CONFIG, *, seed: int = 0) -> LlamaAdapterDecoder:
    """A decoder with random weights, open gates and biases, so that every part of the model has an effect."""
    torch.manual_seed(seed)
    decoder = LlamaAdapterDecoder(config).eval().requires_grad_(False)
    decoder.adapter.gates.normal_()
    decoder.head.weight.normal_(std=0.5)
    if not config.is_first_llama:
        for module in decoder.modules():
            if isinstance(module, RmsNorm):
                module.weight.normal_(1.0, 0.2)
        return decoder
    for layer in decoder.layers:
        layer.attention.qkv.bias[config.dim :] = 0.0
    return decoder


def forward(decoder: LlamaAdapterDecoder, ids: Tensor, prefix: Prefix) -> Tensor:
    """Final hidden states (B, S, D) of whole sequences (B, S), without a cache."""
    length = ids.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).tril()
    hidden: Tensor = decoder(ids, torch.arange(length, device=ids.device)[None], mask, prefix)
    return hidden


@functools.cache
def rounding(config: DecoderConfig = CONFIG, *, dtype: torch.dtype = torch.float32) -> float:
    """How far apart two programs in `dtype` may be in the logits of `toy_decoder(config)`.

    Log-probabilities may be twice as far apart, and those of several tokens add up.
    """
    with torch.random.fork_rng(devices=[]):
        decoder = toy_decoder(config).to(dtype)
    shape, draw = (8, min(30, config.context)), torch.Generator().manual_seed(0)
    ids, queries = torch.randint(config.vocab_size, shape, generator=draw), toy_visual_queries(8, config=config)
    computed = decoder.logits(forward(decoder, ids, decoder.project_prefix(queries.to(dtype))))
    with Float64():
        decoder = decoder.double()
        exact = decoder.logits(forward(decoder, ids, decoder.project_prefix(queries.to(dtype).double())))
    return spread(computed, exact)


def eager_config(decoder: LlamaAdapterDecoder, **options: Any) -> EngineConfig:
    return EngineConfig(decoder=decoder.config, dtype=decoder.embedding.weight.dtype, **options)


def eager(
    decoder: LlamaAdapterDecoder,
    *,
    num_slots: int,
    backend: Backend | None = None,
    operators: Operators = ATEN,
    shapes: Shapes = EXACT,
    **options: Any,
) -> EagerRunner:
    """A runner of an unchanged decoder; `options` are those of EngineConfig."""
    config = eager_config(decoder, num_slots=num_slots, **options)
    return EagerRunner(decoder, config, backend=backend or CpuBackend(), operators=operators, shapes=shapes)


def open_runner(
    config: DecoderConfig,
    state: Mapping[str, Tensor] | None = None,
    *,
    num_slots: int,
    backend: Backend | None = None,
    **options: Any,
) -> Any:
    """The runner that the product chooses, on the CPU by default, for a state dict, or for `toy_decoder(config)`.

    `options` are those of EngineConfig.
    """
    state = toy_decoder(config).state_dict() if state is None else state
    engine_config = EngineConfig(decoder=config, dtype=state["embedding.weight"].dtype, **options)
    return place_decoder(engine_config, state.items(), backend=backend or CpuBackend()).runner(num_slots)


def toy_engine(decoder: LlamaAdapterDecoder, *, num_slots: int, eos_id: int = EOS_ID, **options: Any) -> Engine:
    """An engine on an eager runner; `options` are those of `eager`."""
    return Engine(eager(decoder, num_slots=num_slots, **options), eos_id=eos_id)


def toy_prompts(count: int, *, seed: int = 0, longest: int = 30) -> list[tuple[int, ...]]:
    """Prompts of different lengths that begin with the begin token."""
    draw = random.Random(seed)
    return [(1, *(draw.randrange(3, 300) for _ in range(draw.randrange(longest)))) for _ in range(count)]


def toy_visual_queries(count: int, *, config: DecoderConfig = CONFIG) -> Tensor:
    return torch.randn(count, config.num_queries, config.dim, generator=torch.Generator().manual_seed(1))


def toy_past(config: DecoderConfig, num_tokens: int) -> PastKeyValues | None:
    """Random keys and values of past tokens; None if there are none."""
    shape = (2, config.num_layers, config.num_kv_heads, num_tokens, config.head_dim)
    return PastKeyValues(*np.random.default_rng(1).standard_normal(shape, np.float32)) if num_tokens else None


def toy_requests(
    engine: Engine, prompts: list[tuple[int, ...]], *, sampling: list[SamplingParams], config: DecoderConfig = CONFIG
) -> list[GenerateRequest]:
    """One request per prompt, each with its own picture; ids count from 0."""
    prefixes = engine.project_prefix(toy_visual_queries(len(prompts), config=config))
    return [
        GenerateRequest(id=index, prompt_ids=prompt, prefix=prefix, sampling=params)
        for index, (prompt, prefix, params) in enumerate(zip(prompts, prefixes, sampling, strict=True))
    ]


def drain(engine: Engine) -> list[Output]:
    """Step until every request is answered."""
    outputs: list[Output] = []
    while engine.num_unfinished:
        outputs += engine.step()
    return outputs


Answers = dict[int, tuple[list[int], str | None]]


def answers(outputs: Iterable[Output]) -> Answers:
    """Token ids and finish reason of each request."""
    collected: Answers = {}
    for output in outputs:
        ids, finish = collected.get(output.request_id, ([], None))
        assert finish is None, "an answer went on after its end"
        if output.token_id is not None:
            ids.append(output.token_id)
        collected[output.request_id] = (ids, output.finish)
    return collected


def resume(engine: Engine, requests: Iterable[Request], outputs: Iterable[Output]) -> None:
    """Submit the requests without an end again, with the tokens that are known."""
    given = answers(outputs)
    for request in requests:
        ids, finish = given.get(request.id, ([], None))
        if finish is None:
            engine.submit(replace(request, known_ids=tuple(ids)) if isinstance(request, GenerateRequest) else request)


def answer(engine: Engine, requests: Iterable[Request]) -> Answers:
    """Submit requests and step until all are answered."""
    for request in requests:
        engine.submit(request)
    return answers(drain(engine))


def to_score(request: GenerateRequest, continuations: Sequence[tuple[int, ...]], **changes: Any) -> ScoreRequest:
    """A request to score continuations of the prompt of another one."""
    shared = {"id": request.id, "prompt_ids": request.prompt_ids, "prefix": request.prefix, **changes}
    return ScoreRequest(**shared, pictures=request.pictures, continuations=continuations)


def answers_of_all(
    engines: Iterable[Engine],
    prompts: list[tuple[int, ...]],
    *,
    sampling: list[SamplingParams],
    config: DecoderConfig = CONFIG,
) -> list[Answers]:
    """The answers of each engine to the same `toy_requests`."""
    return [answer(engine, toy_requests(engine, prompts, sampling=sampling, config=config)) for engine in engines]


class Alternating:
    """Allows even and odd token ids in turn, beginning with even ones, and fails at a number of tokens."""

    def __init__(self, *, fails_at: int = 10**9) -> None:
        self._fails_at, self.has_failed = fails_at, False

    def allowed(self, answer: Sequence[int], size: int) -> np.ndarray:
        self.has_failed |= len(answer) >= self._fails_at
        return np.arange(size) % 2 == (answer[-1] + 1) % 2 if answer else np.arange(size) % 2 == 0


def kept_distribution(probabilities_RV: Tensor, *, top_p: float, top_k: int = 0) -> Tensor:
    """The distribution that tokens are drawn from, (R, V) in vocabulary order."""
    top_k_11 = torch.tensor([[top_k]]) if top_k else None
    kept_RV, order_RV = kept_in_order(probabilities_RV, top_p=torch.tensor([[top_p]]), top_k=top_k_11)
    kept_RV = kept_RV / kept_RV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(kept_RV).scatter(-1, order_RV, kept_RV)


def refusal(action: Callable[[], object], folder: Path) -> str:
    """Message and hint of the CheckpointError raised by `action`; `folder` and the golden data get short names."""
    with pytest.raises(CheckpointError) as caught:
        action()
    text = f"{caught.value.message} [{caught.value.hint}]"
    return text.replace(str(folder), "FOLDER").replace(str(GOLDEN), "GOLDEN")


def adapter_tensors(name: str) -> dict[str, Tensor]:
    """The tensors of a golden adapter, read by torch."""
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(GOLDEN / "adapters" / f"{name}.pth", weights_only=True)
    return dict(content["model"])


def put(key: str, value: Tensor) -> Callable[[dict[str, Any]], object]:
    """An edit of tensors."""
    return lambda tensors: tensors.update({key: value})


def drop(key: str) -> Callable[[dict[str, Any]], object]:
    """An edit of tensors."""
    return lambda tensors: tensors.pop(key)


def build_decoder(
    source: LlamaSource,
    adapter: AdapterFile | None,
    *,
    vocab_size: int = 512,
    context: int = 512,
    dtype: torch.dtype = torch.float32,
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """The configuration and state dict of a decoder, built from files."""
    config = plan_decoder(source, adapter, vocab_size=vocab_size, context=context)
    return config, dict(decoder_tensors(config, source=source, adapter=adapter, dtype=dtype))


def is_mapped(tensor: Tensor, path: Path) -> bool:
    """Whether the tensor's memory is a mapping of this file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(maxsplit=1)[0].split("-"))
        if line.endswith(str(path)) and first <= tensor.data_ptr() < last:
            return True
    return False


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A block in which torch's default dtype is another one, as programs set it."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
