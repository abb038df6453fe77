"""Factors, offsets and orders of rows that are folded into weights when they are read, so no forward pass has them.

Partial rotary embedding turns the first R coordinates of a head, in pairs (i, i + R/2). Here, the rows of q and k are
put in an order in which these pairs are (i, i + H/2), as if all coordinates were turned.
"""

# H head size, R rotated coordinates of a head

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.names import LAYER_NORMS, ROTATED, SplitTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Folds:
    """What a family computes with its weights. Names are those of Meta, without `layers.N.` and `.weight`."""

    scales: Mapping[str, float] = field(default_factory=dict)  # factors of matrices, of their biases, and of norms
    embedding_scale: float = 1.0  # factor of the embedding; not folded when it is read, see `LlamaSource`
    norm_offset: float = 0.0  # is added to the weights of all norms, before they are scaled


def folded(tensors: Mapping[str, SplitTensor], folds: Folds, config: DecoderConfig) -> dict[str, SplitTensor]:
    """The tensors of a LLaMA with `folds`, and with the order of rows of its partial rotary embedding.

    The rows of q and k must be in Hugging Face's order. A tensor to which nothing happens stays what it is.
    """
    return {name: tensor.changed(_change_of(name, folds, config)) for name, tensor in tensors.items()}


def _change_of(name: str, folds: Folds, config: DecoderConfig) -> "partial[Tensor] | None":
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)\.(?:weight|bias)", name)
    layer, part = (match[1], match[2]) if match else (None, name)
    scale = folds.scales.get(part, 1.0)
    offset = folds.norm_offset if part == "norm" or part in LAYER_NORMS else 0.0
    order_H = None
    if layer is not None and (part in ROTATED or part in ("attention.q_norm", "attention.k_norm")):
        order_H = _order(config, int(layer))
    if scale == 1 and not offset and order_H is None:
        return None
    return partial(_fold, scale=scale, offset=offset, order_H=order_H)


def _order(config: DecoderConfig, layer: int) -> Tensor | None:
    """The places of a head's coordinates in a file, (H,) int64; None if they stay where they are."""
    rotary, size = config.rotary_of(layer), config.head_dim
    if rotary is None or rotary.rotated(size) == size:
        return None
    turned, half, places_H = rotary.rotated(size) // 2, size // 2, torch.arange(size)
    pieces = (places_H[:turned], places_H[2 * turned : half + turned], places_H[turned : 2 * turned])
    return torch.cat([*pieces, places_H[half + turned :]])


def _fold(tensor: Tensor, *, scale: float, offset: float, order_H: Tensor | None) -> Tensor:
    values = tensor.float()
    if order_H is not None:
        values = values.reshape(-1, len(order_H), *values.shape[1:])[:, order_H].reshape(values.shape)
    if offset:
        values = values + offset
    return values if scale == 1 else values * scale
