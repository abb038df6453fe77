"""The tensor names of LLaMA as Meta and Hugging Face write them, an opened LLaMA, and the row order of q and k."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.files import Shape, count_blocks

# Matrices of a layer and how their two sides are called below; D model width, F feed-forward width.
MATRICES = {
    "attention.wq": ("D", "D"),
    "attention.wk": ("D", "D"),
    "attention.wv": ("D", "D"),
    "attention.wo": ("D", "D"),
    "feed_forward.w1": ("F", "D"),
    "feed_forward.w2": ("D", "F"),
    "feed_forward.w3": ("F", "D"),
}
# wk, wv and the output never have one.
BIASED = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
LAYER_NORMS = ("attention_norm", "ffn_norm")

_HUGGINGFACE_LAYER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_HUGGINGFACE_TOP = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}


def llama_shapes(*, vocab_size: int, dim: int, num_layers: int, ffn_dim: int) -> dict[str, Shape]:
    """Meta's names of all tensors of a LLaMA and their shapes, in the file's order."""
    sides = {"D": dim, "F": ffn_dim}
    shapes: dict[str, Shape] = {"tok_embeddings.weight": (vocab_size, dim)}
    for layer in range(num_layers):
        for name, (rows, columns) in MATRICES.items():
            shapes[f"layers.{layer}.{name}.weight"] = (sides[rows], sides[columns])
        for name in LAYER_NORMS:
            shapes[f"layers.{layer}.{name}.weight"] = (dim,)
    return {**shapes, "norm.weight": (dim,), "output.weight": (vocab_size, dim)}


def from_huggingface(key: str) -> str | None:
    """Meta's name for a Hugging Face LLaMA key; None for a key that is no tensor of a LLaMA."""
    if key in _HUGGINGFACE_TOP:
        return _HUGGINGFACE_TOP[key]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", key)
    if match is None or match[2] not in _HUGGINGFACE_LAYER:
        return None
    return f"layers.{match[1]}.{_HUGGINGFACE_LAYER[match[2]]}.weight"


def half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a q or k tensor (D, ...) from Meta's order to the half-split one.

    Meta turns coordinates (2i, 2i + 1) of a head as a pair; here, as at Hugging Face, they are (i, i + H/2).
    """
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.transpose(1, 2).reshape(rows.shape)


def check_layers(found: Collection[str], num_layers: int, *, config: Path) -> None:
    """Raise CheckpointError unless the names are those of `num_layers` layers, as `config` says."""
    layers = count_blocks(found, "layers.", what=f"The weights beside `{config}`")
    if layers != num_layers:
        raise CheckpointError(
            f"`{config}` speaks of {num_layers} layers, the weights beside it have {layers}",
            hint="they come from LLaMAs of different size, or a file is missing; 7B has 32 layers, 13B has 40",
        )


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor in one or several parts that are joined along `axis`; nothing is copied before `read`."""

    parts: tuple[Tensor, ...]
    axis: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of the joined tensor."""
        if len(self.parts) == 1:
            return tuple(self.parts[0].shape)
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    def read(self) -> Tensor:
        """The joined tensor, in the type of the file; a view of the file if there is one part."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts, dim=self.axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSource:
    """A complete LLaMA: every tensor of `llama_shapes` is in `tensors`, with that shape.

    `half_split` says that the rows of wq and wk are in Hugging Face's order already.
    """

    name: str  # for messages and records: the folder
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    half_split: bool
    tensors: Mapping[str, SplitTensor]
    files: tuple[str, ...]  # paths of the tensor files, in order
