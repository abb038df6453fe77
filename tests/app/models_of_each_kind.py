"""Toy models of each kind, and what they answer, for tests of devices: each must answer as the CPU does."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.numpy import save_file

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.bundle import convert
from tests.app.models.adapters import chat_adapter, v1_adapter
from tests.app.models.bundles import SOURCES
from tests.llm.gguf_files import sentencepiece_keys, write_model
from tests.parity.golden import GOLDEN, model_options, picture

META: Final = {"llama_dir": GOLDEN / "LLaMA", "llama_type": "TINY"}
HUGGINGFACE: Final = GOLDEN / "LLaMA-HF" / "TINY"
PROMPTS: Final = ("Name a colour.", "The sun is", "What is it, and how many are there?")
# Of all rules with which tokens are chosen. Among few tokens, because the sums of many round differently.
SETTINGS: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 1.0, "top_k": 4, "min_p": 0.1, "seed": 4},
    {"regex": "(red|green) [a-z]{2,5}"},
)


def _with_template(folder: Path) -> dict[str, Any]:
    """A LLaMA with a chat template."""
    place = Path(shutil.copytree(HUGGINGFACE, folder / "LLaMA"))
    (place / "chat_template.jinja").write_text(
        "{% for one in messages %}<{{ one['role'] }}> {{ one['content'] }}{% endfor %}"
    )
    return {"llama_dir": place}


def _prefix_tuning(folder: Path) -> dict[str, Any]:
    sizes = json.loads((HUGGINGFACE / "config.json").read_text(encoding="utf-8"))
    flat = np.random.default_rng(2).normal(size=(6, sizes["num_hidden_layers"] * 2 * sizes["hidden_size"]))
    return {"llama_dir": HUGGINGFACE, "past_key_values": _peft(folder, {"prompt_embeddings": flat}, "PREFIX_TUNING")}


def _lora(folder: Path) -> dict[str, Any]:
    sizes, draw = json.loads((HUGGINGFACE / "config.json").read_text(encoding="utf-8")), np.random.default_rng(3)
    width, tensors = sizes["hidden_size"], {}
    for layer in range(sizes["num_hidden_layers"]):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = draw.normal(size=(4, width)) / 4
        tensors[f"{module}.lora_B.weight"] = draw.normal(size=(width, 4)) / 4
    place = _peft(folder, tensors, "LORA", r=4, lora_alpha=8, target_modules=["q_proj"])
    return {"llama_dir": HUGGINGFACE, "lora": [str(place)]}


def _peft(folder: Path, tensors: Mapping[str, np.ndarray], kind: str, **entries: Any) -> Path:
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": kind, **entries}))
    return folder


def _gguf(folder: Path) -> dict[str, Any]:
    import sentencepiece
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(HUGGINGFACE, dtype=torch.float32)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(HUGGINGFACE / "tokenizer.model"))
    return {"llama_dir": write_model(folder / "tiny.gguf", model, sentencepiece_keys(processor))}


def _pictures_as_tokens(folder: Path, kind: str) -> dict[str, Any]:
    from tests.app import picture_models

    return {"model": picture_models.save(folder, kind)}


def _of_texts(folder: Path, write: Callable[[Path], object]) -> dict[str, Any]:
    write(folder / "adapter.pth")
    return {**META, "adapter": folder / "adapter.pth"}


# By features of docs/support.md: how a model is written into a folder, as options of `Captioner.load`.
MODELS: Final[Mapping[str, Callable[[Path], dict[str, Any]]]] = {
    "bundles": lambda folder: {"model": convert(SOURCES, folder / "bundle", dtype=torch.float32)},
    "Hugging Face LLaMA": lambda _: {**model_options(), "llama_dir": HUGGINGFACE, "llama_type": None},
    "BIAS adapters": lambda _: model_options("BIAS-TINY"),
    "LORA adapters": lambda _: model_options("LORA-BIAS-TINY"),
    "CAPTION adapters (one query)": lambda _: model_options("CAPTION-TINY"),
    "adapters with CLIP inside": lambda _: {**model_options("training-checkpoint-0"), "clip": None},
    "LLaMA without adapter": lambda _: dict(META),
    "LLaMA-Adapter V1 for texts": lambda folder: _of_texts(folder, v1_adapter),
    "LLaMA-Adapter V2 for chat": lambda folder: _of_texts(folder, chat_adapter),
    "Meta's 2, 4 and 8 files": lambda _: {**META, "llama_type": "TINY-2SHARD"},
    "prefix tuning": _prefix_tuning,
    "LoRA of PEFT": _lora,
    "chat templates": _with_template,
}
# These are written by transformers.
WRITTEN: Final[Mapping[str, Callable[[Path], dict[str, Any]]]] = {
    "GGUF files": _gguf,
    "LLaVA": lambda folder: _pictures_as_tokens(folder, "llava"),
    "SmolVLM": lambda folder: _pictures_as_tokens(folder, "smolvlm"),
}


def answers(**options: Any) -> list[Any]:
    """What a model says about pictures, if it sees any, and texts; chosen in all ways, and streamed."""
    with Captioner.load(dtype="float32", batch_size=3, **options) as captioner:
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(captioner.generate_text, (PROMPTS,))]
        if captioner.info.sees_pictures:
            names = ("shapes_200x300.jpg", "noise_128x96.png", "rgba_180x140.png")
            calls.append((captioner.generate, (list(map(picture, names)), PROMPTS)))
        said = [
            [(answer.text, answer.token_ids) for answer in call(*asked, max_new_tokens=8, **settings)]
            for call, asked in calls
            for settings in SETTINGS
        ]
        pieces = [getattr(event, "text", "") for event in captioner.stream_text(PROMPTS[0], max_new_tokens=8)]
        return [said, pieces]
