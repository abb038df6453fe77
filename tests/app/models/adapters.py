"""Adapters with random weights for the golden LLaMA, in the form of released files that need no picture."""

from pathlib import Path

import torch

DIM, FFN, LAYERS, HEADS = 64, 192, 4, 4  # of the golden LLaMA
MATRICES = {
    "attention.wq": (DIM, DIM),
    "attention.wk": (DIM, DIM),
    "attention.wv": (DIM, DIM),
    "attention.wo": (DIM, DIM),
    "feed_forward.w1": (FFN, DIM),
    "feed_forward.w2": (DIM, FFN),
    "feed_forward.w3": (FFN, DIM),
}


def chat_adapter(place: Path, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """An adapter file in the form of the release: float32 vectors under "model"; `changes` replace or add tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in MATRICES.items():
            tensors[f"layers.{layer}.{name}_bias"] = torch.randn(outputs, generator=generator) * 0.1
            tensors[f"layers.{layer}.{name}_scale"] = 1 + torch.randn(inputs, generator=generator) * 0.3
        for name in ("attention_norm", "ffn_norm"):
            tensors[f"layers.{layer}.{name}.weight"] = 1 + torch.randn(DIM, generator=generator) * 0.3
    torch.save({"model": tensors | changes}, place)
    return tensors


def v1_adapter(place: Path, *, heads: int = 4, num_layers: int = 2) -> dict[str, torch.Tensor]:
    """An adapter in the form of V1's files: random queries for the last layers, and a gate for each layer."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"adapter_query.weight": torch.randn(10 * num_layers, DIM, generator=generator)}
    for layer in range(LAYERS):
        gate = torch.randn(1, heads, 1, 1, generator=generator) if heads > 1 else torch.tensor([0.8])
        tensors[f"layers.{layer}.attention.gate"] = gate
    torch.save(tensors, place)
    return tensors
