"""Decoders of all families in MindIR graphs, run by MindSpore."""

from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.exported.parity import compare
from llama_adapter.runtime.graphs.defaults import MindirBackend
from tests.llm.test_exported_decoder import check_answers_and_scores
from tests.llm.test_families import check_greedy_tokens, opened
from tests.llm.toys import CONFIG, EOS_ID, FAMILIES, eager, rounding, toy_decoder, toy_engine, toy_past, toy_prompts
from tests.mindspore.models import mindir_runner


@pytest.mark.parametrize("family", ["llama 3.1", "qwen2", "qwen3", "gemma3"])
@pytest.mark.proves("Llama 3, TinyLlama, SmolLM2", "MindSpore")
@pytest.mark.proves("Qwen2, Qwen2.5, Qwen3", "MindSpore")
@pytest.mark.proves("Gemma 2, Gemma 3", "MindSpore")
def test_greedy_tokens_of_ragged_batches_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    decoder = opened(family, tmp_path / "folder")
    check_greedy_tokens(mindir_runner(decoder, tmp_path, num_slots=2), family, num_tokens=32)


@pytest.mark.parametrize(
    ("name", "backend", "num_past"),
    [("grouped", "mslite", 0), ("gemma", "mslite", 0), ("olmo", "ms", 4), ("windows", "ms", 4)],
)
@pytest.mark.proves("Mistral, Phi-3, SmolLM3", "MindSpore")
@pytest.mark.proves("OLMo 2, OLMo 3, Granite", "MindSpore")
def test_pictures_are_answered_and_scored_as_in_torch(
    tmp_path: Path, mslite: Any, name: str, backend: MindirBackend, num_past: int
) -> None:
    """MindSpore Lite runs prompts in the prefill graph; MindSpore, and prompts after a past, in that of increments."""
    config = FAMILIES[name]
    decoder = toy_decoder(config)
    past = toy_past(config, num_past)
    engines = [
        toy_engine(decoder, num_slots=4, past=past),
        Engine(mindir_runner(decoder, tmp_path, num_slots=4, past=past, backend=backend), eos_id=EOS_ID),
    ]
    check_answers_and_scores(engines, toy_prompts(9, longest=20), config)


@pytest.mark.parametrize("config", [CONFIG, *FAMILIES.values()], ids=["llama", *FAMILIES])
@pytest.mark.proves("float16", "MindSpore")
def test_logits_in_float16_differ_by_rounding_only(tmp_path: Path, config: DecoderConfig) -> None:
    decoder = toy_decoder(config)
    runner = mindir_runner(decoder, tmp_path, num_slots=3, dtype="float16")

    parity = compare(runner.program, eager(decoder, num_slots=3))

    assert parity.max_abs < 2 * rounding(config, dtype=torch.float16)  # of activations, and of weights
    assert parity.num_same == parity.num_tokens
