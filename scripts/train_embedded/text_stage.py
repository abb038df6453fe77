"""For the ablation: a LLaMA that never met a picture learns to answer about scenes that its instruction describes."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded.answering import answer_loss, exact_match
from scripts.train_embedded.code_stage import FOCUS_WEIGHT, FocusHead, sample_questions_scene
from scripts.train_embedded.loop import Optimizers, train
from scripts.train_embedded.packing import Packed, Packer, ask_many
from scripts.train_embedded.sizes import DECODER, build_decoder, is_hidden_matrix

BATCH = 12
QUESTIONS = 8
FOCUS_LAYER = 2  # one layer gathers the words of an object, one finds the object that a question names


def run(*, tokenizer: Tokenizer, folder: Path, num_steps: int, lr: float = 2e-3, seed: int = 6) -> None:
    """Train the LLaMA alone, its adapter shut; writes text.pt into `folder`."""
    torch.manual_seed(seed)
    decoder = build_decoder()
    decoder.adapter.requires_grad_(False)  # its gates are zero
    focus = FocusHead(decoder, layer=FOCUS_LAYER)
    optimizers = Optimizers([(decoder, 1.0), (focus, 1.0)], lr=lr, is_hidden=is_hidden_matrix)
    packer = Packer(tokenizer)
    train(
        "text",
        {"decoder": decoder, "focus": focus},
        optimizers,
        partial(_batch_at, packer=packer, seed=seed),
        partial(_compute, decoder, focus),
        num_steps=num_steps,
        seed=seed,
        folder=folder,
        evaluate=lambda: evaluate(decoder, packer),
    )


def evaluate(
    decoder: LlamaAdapterDecoder, packer: Packer, *, num_scenes: int = 256, seed: int = 12345
) -> dict[str, float]:
    """Exact match by task on fresh scenes in words."""
    rng = np.random.default_rng(seed)
    batches = (("", _no_picture(16), _draw(rng, packer, count=16)) for _ in range(num_scenes // 16))
    return exact_match(decoder, batches)


def _draw(rng: np.random.Generator, packer: Packer, *, count: int) -> Packed:
    scenes = [sample_questions_scene(rng) for _ in range(count)]
    return packer.pack([ask_many(scene, rng, count=QUESTIONS) for scene in scenes], scenes, in_words=True)


def _no_picture(count: int) -> Tensor:
    return torch.zeros(count, DECODER.num_queries, DECODER.dim)


def _batch_at(step: int, *, packer: Packer, seed: int) -> Packed:
    return _draw(np.random.default_rng([seed, step]), packer, count=BATCH)


def _compute(decoder: LlamaAdapterDecoder, focus: FocusHead, packed: Packed) -> tuple[Tensor, dict[str, float]]:
    loss = answer_loss(decoder, _no_picture(BATCH), packed)
    to_words, found = focus.loss(packed)
    return loss + FOCUS_WEIGHT * to_words, {"answers": float(loss.detach()), "words": found}
