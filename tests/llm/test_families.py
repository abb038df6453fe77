"""Toy decoders of every family, written by transformers and opened as folders, compute what transformers computes."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
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
from tests.llm.toys import answer, build_decoder, eager, forward

# Six query heads on three heads of keys, unless a family says otherwise; windows of 5 tokens.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [1.5, 3.0]}
GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 24, "sliding_window": 5}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
SLIDING = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("Llama", {"head_dim": 20, "rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"num_key_value_heads": 6, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 5}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": SLIDING}),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32, "rope_parameters": LONG}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0, 1]}),
    "granite": ("Granite", {**GRANITE, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
    "olmo2": ("Olmo2", {}),
}
CONTEXT = 128


@functools.cache
def written(family: str) -> Any:
    """A model of transformers with random weights."""
    name, entries = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **entries})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                # Small embeddings, because otherwise the head would repeat the last token where both are tied.
                parameter.normal_(std=0.05 if "embed" in parameter_name else 0.3)
    return model


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


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.proves("Llama 3, TinyLlama, SmolLM2", "CPU", "ONNX")
@pytest.mark.proves("Mistral, Phi-3, SmolLM3", "CPU", "ONNX")
@pytest.mark.proves("Qwen2, Qwen2.5, Qwen3", "CPU", "ONNX")
@pytest.mark.proves("Gemma 2, Gemma 3", "CPU", "ONNX")
@pytest.mark.proves("OLMo 2, Granite", "CPU", "ONNX")
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
