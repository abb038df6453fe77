"""Toy decoders of every family, written by transformers and opened as folders, compute what transformers computes."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.requests import GenerateRequest
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.load import decoder_from_state
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import Runner
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT
from llama_adapter.llm.weights.huggingface import open_huggingface
from tests.llm.exported import onnx_runner
from tests.llm.test_sources_of_families import CASES, SIZES, made
from tests.llm.toys import answer, build_decoder, eager, forward

# Models of `CASES` in test_sources_of_families.py, and entries in which they differ.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama with biases": {},
    "llama 3.1": {},
    "mistral without window": {},  # YaRN
    "mistral": {},
    "ministral": {},
    "qwen2": {},
    "qwen3": {"attention_bias": False},  # with these large biases, it would repeat one token
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},  # caps that have an effect
    "gemma3": {},
    "phi3 in part": {},
    "smollm3": {},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
}
CONTEXT = 128


@functools.cache
def written(family: str) -> Any:
    """A model of transformers with random weights."""
    return made(family, **FAMILIES[family])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decoder(family: str, tmp_path: Path) -> LlamaAdapterDecoder:
    return opened(family, tmp_path)


def opened(family: str, folder: Path) -> LlamaAdapterDecoder:
    """A model, saved in `folder` and opened as `--llama-dir` is."""
    written(family).save_pretrained(folder)
    config, state = build_decoder(open_huggingface(folder), None, vocab_size=SIZES["vocab_size"], context=CONTEXT)
    return decoder_from_state(config, state)


def random_ids(num_rows: int, length: int) -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], (num_rows, length), generator=torch.Generator().manual_seed(1))


def no_picture(config: DecoderConfig, num_rows: int) -> Prefix:
    empty = torch.zeros(0, num_rows, config.num_heads, 0, config.head_dim)
    return Prefix(empty, empty)


def test_every_kind_of_model_is_computed() -> None:
    assert {CASES[name][0] for name in FAMILIES} == {kind for kind, *_ in CASES.values()}


def test_logits_are_those_of_transformers(family: str, decoder: LlamaAdapterDecoder) -> None:
    # Longrope takes the long factors if one row is longer than the original context, as our whole context is.
    ids = random_ids(3, 40)
    wanted = written(family)(ids).logits
    found = decoder.logits(forward(decoder, ids, no_picture(decoder.config, 3)))
    assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


RUNNERS: dict[str, Callable[[LlamaAdapterDecoder, Path], Runner]] = {
    "exact": lambda decoder, folder: eager(decoder, num_slots=2, shapes=EXACT),
    "bucketed": lambda decoder, folder: eager(decoder, num_slots=2, shapes=BUCKETED),
    "onnx": lambda decoder, folder: onnx_runner(decoder, folder, num_slots=2),
}


# In exact shapes: with windows and two rotations, and with layers without positions. What shapes change does not depend
# on the rest.
@pytest.mark.parametrize(
    ("family", "runner"),
    [("gemma3", "exact"), ("smollm3", "exact"), *itertools.product(FAMILIES, ("bucketed", "onnx"))],
    indirect=["family"],
)
@pytest.mark.proves("Llama 3, TinyLlama, SmolLM2", "CPU", "ONNX")
@pytest.mark.proves("Mistral, Phi-3, SmolLM3", "CPU", "ONNX")
@pytest.mark.proves("Qwen2, Qwen2.5, Qwen3", "CPU", "ONNX")
@pytest.mark.proves("Gemma 2, Gemma 3", "CPU", "ONNX")
@pytest.mark.proves("OLMo 2, OLMo 3, Granite", "CPU", "ONNX")
def test_greedy_tokens_of_ragged_batches_are_those_of_transformers(
    family: str, runner: str, decoder: LlamaAdapterDecoder, tmp_path: Path
) -> None:
    check_greedy_tokens(RUNNERS[runner](decoder, tmp_path), family)


def check_greedy_tokens(runner: Runner, family: str, *, num_tokens: int = 64) -> None:
    """Three ragged prompts on a runner with two slots continue as in transformers."""
    prompts = [tuple(random_ids(1, length)[0].tolist()) for length in (37, 35, 50)]
    settings = SamplingParams(max_new_tokens=num_tokens)
    engine = Engine(runner, eos_id=-7)  # the third one starts beside a running row
    requests = [
        GenerateRequest(id=index, prompt_ids=prompt, prefix=engine.empty_prefix(), sampling=settings)
        for index, prompt in enumerate(prompts)
    ]
    answers = answer(engine, requests)
    model = written(family)
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *answers[index][0]]])
        best = model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert answers[index][0] == best.tolist()
        assert len(set(answers[index][0])) > 1
