"""Ablation of what the adapter alone can learn: a text-only LLaMA, a frozen tower, and arms that train different parts.

Every arm starts from the LLaMA of the stage `text` with closed gates and the visual-query blocks of the stage `slots`,
sees the same pictures and questions in the same order, and learns from answers alone.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.vision.encoder import PictureEncoder
from scripts.train_embedded.answering import answer_loss, exact_match
from scripts.train_embedded.code_stage import open_gates
from scripts.train_embedded.features import feature_batch
from scripts.train_embedded.loop import Optimizers, train, trained
from scripts.train_embedded.packing import Packed, Packer, ask_many
from scripts.train_embedded.pictures import Chunks, labels_to_scene
from scripts.train_embedded.sizes import build_decoder, build_encoder, is_hidden_matrix
from scripts.train_embedded.vision_stage import load_tower

BATCH = 12
QUESTIONS = 8
LORA_RANK = 16  # as in the released LORA-BIAS-7B
SEED = 7

# What may be trained of the LLaMA besides the adapter's queries and gates, the norms and the biases.
ARMS = {
    "frozen": "nothing more: LLaMA-Adapter V2 with bias tuning, as BIAS-7B",
    "lora": f"low-rank additions of rank {LORA_RANK} to its matrices, as LORA-BIAS-7B",
    "opened": "everything",
    "opened-slowly": "everything, the LLaMA at a fifth of the rate",
}
LLAMA_RATE = {"opened-slowly": 0.2}  # relative to the rate of everything else; default 1


class Lora(nn.Module):
    """W + B A (Hu et al., 2021), apart for each of the projections that are packed in one matrix; B starts at zero."""

    def __init__(self, weight: Tensor, *, parts: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(parts, LORA_RANK, columns) / columns**0.5)
        self.b = nn.Parameter(torch.zeros(parts, rows // parts, LORA_RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.bmm(self.b, self.a).flatten(0, 1)


def run(arm: str, *, data: Path, tokenizer: Tokenizer, folder: Path, num_steps: int, lr: float = 2e-3) -> None:
    """Train one arm; writes ablation-`arm`.pt and, with what was trained, ablation-`arm`.json into `folder`."""
    torch.manual_seed(SEED)
    encoder, decoder = build_arm(arm, folder)
    llama = nn.ModuleDict({name: part for name, part in decoder.named_children() if name != "adapter"})
    rates = [(encoder.query, 1.0), (decoder.adapter, 1.0), (llama, LLAMA_RATE.get(arm, 1.0))]
    optimizers = Optimizers(rates, lr=lr, is_hidden=is_hidden_matrix)
    packer, name = Packer(tokenizer), f"ablation-{arm}"
    counts = {"arm": arm, "trained": ARMS[arm], "weights": count_weights(encoder, decoder)}
    (folder / f"{name}.json").write_text(json.dumps(counts, indent=2) + "\n")
    train(
        name,
        {"query": encoder.query, "decoder": decoder},
        optimizers,
        partial(_batch_at, Chunks(data, "scene", "features"), packer),
        partial(_compute, encoder, decoder),
        num_steps=num_steps,
        seed=SEED,
        folder=folder,
        evaluate=lambda: evaluate(encoder, decoder, packer, data),
        evaluate_every=200,
    )


def load_arm(arm: str, folder: Path) -> tuple[PictureEncoder, LlamaAdapterDecoder]:
    """An arm as it was trained, low-rank additions merged; gates are open, as `load_trained` gives them."""
    encoder, decoder = build_arm(arm, folder)
    encoder.query.load_state_dict(trained(folder, f"ablation-{arm}", "query"))
    decoder.load_state_dict(trained(folder, f"ablation-{arm}", "decoder"))
    merge_lora(decoder)
    return encoder, decoder


def build_arm(arm: str, folder: Path) -> tuple[PictureEncoder, LlamaAdapterDecoder]:
    """Both halves at the start of `arm`; frozen weights need no gradient. Raises KeyError for unknown arms."""
    if arm not in ARMS:
        raise KeyError(f"no arm {arm!r}; there are {', '.join(ARMS)}")
    encoder = build_encoder()
    load_tower(encoder, folder)
    encoder.query.load_state_dict(trained(folder, "slots", "query"))
    encoder.requires_grad_(False).query.requires_grad_(True)
    text = trained(folder, "text", "decoder")
    decoder = build_decoder(separate_adapter_kv=arm == "lora")
    decoder.load_state_dict(text, strict=arm != "lora")
    open_gates(decoder)
    if not arm.startswith("opened"):
        freeze_matrices(decoder)
    if arm == "lora":
        add_lora(decoder)
    return encoder, decoder


def freeze_matrices(decoder: LlamaAdapterDecoder) -> None:
    """Leave the adapter, norms and biases to be trained."""
    for name, weight in decoder.named_parameters():
        weight.requires_grad_(name.startswith("adapter.") or weight.ndim == 1)


def add_lora(decoder: LlamaAdapterDecoder) -> None:
    """Add low-rank matrices to all of each layer's; the adapter keeps the bare key and value weights, frozen."""
    assert decoder.adapter.kv is not None, "the adapter has to keep key and value weights of its own"
    decoder.adapter.kv.requires_grad_(False)
    first = decoder.config.first_adapter_layer
    with torch.no_grad():
        for kv, layer in zip(decoder.adapter.kv, decoder.layers[first:], strict=True):
            bare = layer.get_parameter("attention.qkv.weight")
            kv.get_parameter("weight").copy_(bare[-2 * decoder.config.dim :])
    for layer in decoder.layers:
        for linear, parts in _linears(layer):
            lora = Lora(linear.get_parameter("weight"), parts=parts)
            parametrize.register_parametrization(linear, "weight", lora)


def merge_lora(decoder: LlamaAdapterDecoder) -> None:
    """Make the low-rank additions part of the matrices, as the product reads LORA checkpoints."""
    for layer in decoder.layers:
        for linear, _ in _linears(layer):
            if parametrize.is_parametrized(linear, "weight"):
                parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


def _linears(layer: nn.Module) -> list[tuple[nn.Module, int]]:
    """All linear layers of a decoder layer, and how many projections each one packs."""
    packed = {"attention.qkv": 3, "attention.out": 1, "feed_forward.gate_up": 2, "feed_forward.down": 1}
    return [(layer.get_submodule(name), parts) for name, parts in packed.items()]


def count_weights(encoder: PictureEncoder, decoder: LlamaAdapterDecoder) -> dict[str, int]:
    """How many weights of each part are trained, and how many there are in all."""
    counts: dict[str, int] = defaultdict(int)
    for weight in encoder.query.parameters():
        counts["visual_blocks"] += weight.numel() * weight.requires_grad
    for name, weight in decoder.named_parameters():
        is_third = name.endswith("qkv.bias")  # those of keys and values stay zero
        counts[_part(name)] += weight.numel() * weight.requires_grad // (3 if is_third else 1)
    every = [*encoder.parameters(), *decoder.parameters()]
    return {**counts, "all_trained": sum(counts.values()), "all": sum(weight.numel() for weight in every)}


def _part(name: str) -> str:
    if name.startswith("adapter."):
        return "adapter"
    if name.endswith((".a", ".b")):
        return "lora"
    return "biases" if name.endswith("bias") else "norms" if "norm" in name else "llama"


@torch.no_grad()
def evaluate(
    encoder: PictureEncoder, decoder: LlamaAdapterDecoder, packer: Packer, data: Path, *, num_pictures: int = 256
) -> dict[str, float]:
    """Exact match by task on pictures never trained on; `pair-` prefixes tasks on never-drawn pairs."""

    def batches() -> Iterator[tuple[str, Tensor, Packed]]:
        for kind, prefix in (("check", ""), ("pair", "pair-")):
            chunks, rng = Chunks(data, kind, "features"), np.random.default_rng(12345)
            for step in range(num_pictures // BATCH):
                features, labels = feature_batch(chunks, step, batch_size=BATCH, seed=0)
                yield prefix, _see(encoder, features), _asked(packer, labels, rng)

    return exact_match(decoder, batches())


def _see(encoder: PictureEncoder, features: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        visual_query: Tensor = encoder.query(features)
    return visual_query


def _batch_at(pictures: Chunks, packer: Packer, step: int) -> tuple[Tensor, Packed]:
    features, labels = feature_batch(pictures, step, batch_size=BATCH, seed=SEED)
    return features, _asked(packer, labels, np.random.default_rng([SEED, step]))


def _asked(packer: Packer, labels_BO4: Tensor, rng: np.random.Generator) -> Packed:
    return packer.pack([ask_many(labels_to_scene(labels), rng, count=QUESTIONS) for labels in labels_BO4.numpy()])


def _compute(
    encoder: PictureEncoder, decoder: LlamaAdapterDecoder, batch: tuple[Tensor, Packed]
) -> tuple[Tensor, dict[str, float]]:
    features, packed = batch
    loss = answer_loss(decoder, _see(encoder, features), packed)
    return loss, {"answers": float(loss.detach())}
