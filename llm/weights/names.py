"""Tensor names of LLaMA in Meta's and Hugging Face's formats, the row order of q and k, and an opened LLaMA."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.files import Shape, check_names, check_shapes, count_blocks
from llama_adapter.runtime.text import shown_excerpt

# Matrices of a layer, with the sizes of their rows and columns: D model width, F feed-forward width.
MATRICES = {
    "attention.wq": ("D", "D"),
    "attention.wk": ("D", "D"),
    "attention.wv": ("D", "D"),
    "attention.wo": ("D", "D"),
    "feed_forward.w1": ("F", "D"),
    "feed_forward.w2": ("D", "F"),
    "feed_forward.w3": ("F", "D"),
}
# Matrices that may have a bias; wk, wv and the output never have one.
BIASED = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
# Our fused layers of a block, and Meta's names of their parts.
PARTS = {
    "attention.qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "attention.out": ("attention.wo",),
    "feed_forward.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.down": ("feed_forward.w2",),
}
ROTATED = ("attention.wq", "attention.wk")  # their rows have an order, see `half_split`
LAYER_NORMS = {"attention_norm": "attention_norm", "ffn_norm": "feed_forward_norm"}  # Meta's names, and ours
_SINGLE = {"embedding": "tok_embeddings", "norm": "norm", "head": "output"} | {v: k for k, v in LAYER_NORMS.items()}

# Sizes of the first LLaMAs, for hints.
WIDTHS = "7B is 4096 wide, 13B 5120, 30B 6656, 65B 8192"
DEPTHS = "7B has 32 layers, 13B 40, 30B 60, 65B 80"

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


def sizes_of(model: "LlamaSource | DecoderConfig") -> dict[str, Any]:
    """The arguments of `llama_shapes` for a model."""
    return {name: getattr(model, name) for name in ("vocab_size", "dim", "num_layers", "ffn_dim")}


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
    """Meta's name for a Hugging Face LLaMA key; None for a key that is not a tensor of a LLaMA."""
    if key in _HUGGINGFACE_TOP:
        return _HUGGINGFACE_TOP[key]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", key)
    if match is None or match[2] not in _HUGGINGFACE_LAYER:
        return None
    return f"layers.{match[1]}.{_HUGGINGFACE_LAYER[match[2]]}.weight"


def to_huggingface(name: str) -> str:
    """Inverse of `from_huggingface`."""
    match = re.fullmatch(r"(layers\.\d+)\.(.+)\.weight", name)
    if match is None:
        return next(theirs for theirs, ours in _HUGGINGFACE_TOP.items() if ours == name)
    layer = next(theirs for theirs, ours in _HUGGINGFACE_LAYER.items() if ours == match[2])
    return f"model.{match[1]}.{layer}.weight"


def meta_parts(name: str, config: DecoderConfig) -> list[str]:
    """Meta's names of the weights that a tensor of a decoder's state dict consists of; empty for other tensors."""
    if match := re.fullmatch(r"adapter\.kv\.(\d+)\.weight", name):
        layer = config.first_adapter_layer + int(match[1])
        return [f"layers.{layer}.attention.{part}.weight" for part in ("wk", "wv")]
    match = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name)
    parts = PARTS.get(match[2]) or (_SINGLE[match[2]],) if match else ()
    return [f"{match[1] or ''}{part}.weight" for part in parts] if match else []


def part_rows(path: str, config: DecoderConfig) -> tuple[int, ...]:
    """The rows of each part of a fused layer, see `PARTS`."""
    dim, heads, kv_heads, units = config.dim, config.attention_dim, config.kv_dim, config.ffn_dim
    return {
        "attention.qkv": (heads, kv_heads, kv_heads),
        "attention.out": (dim,),
        "feed_forward.gate_up": (units, units),
        "feed_forward.down": (dim,),
    }[path]


def half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a q or k tensor (D, ...) from Meta's order to half-split order.

    The rotary embedding rotates pairs of coordinates of a head: (2i, 2i + 1) in Meta's order, (i, i + H/2) here and in
    Hugging Face's order.
    """
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.transpose(1, 2).reshape(rows.shape)


def meta_order(rows: Tensor, num_heads: int) -> Tensor:
    """Inverse of `half_split`: the rows of a q or k tensor in Meta's order."""
    per_head = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return per_head.transpose(1, 2).reshape(rows.shape)


def check_layers(found: Collection[str], num_layers: int, *, config: Path) -> None:
    """Raise CheckpointError unless the names have `num_layers` layers, the number in the file `config`."""
    layers = count_blocks(found, "layers.", what=f"The weights beside `{config}`")
    if layers != num_layers:
        raise CheckpointError(
            f"`{config}` says {num_layers} layers, the weights beside it have {layers}",
            hint=f"they come from LLaMAs of different sizes, or a file is missing; {DEPTHS}",
        )


def check_heads(config: Mapping[str, object], heads: str, kv_heads: str, *, folder: Path) -> None:
    """Raise CheckpointError for grouped-query attention. `heads` and `kv_heads` are entries of `config`."""
    found = config.get(kv_heads)
    if found is not None and found != config[heads]:
        raise CheckpointError(
            f"The LLaMA in `{folder}` shares keys among heads ({kv_heads} {shown_excerpt(str(found))}, {heads} "
            f"{config[heads]}); only models with as many key heads as query heads are supported",
            hint="LLaMA 7B, 13B, 30B and 65B and LLaMA-2 7B and 13B are supported; LLaMA-2 70B and LLaMA 3 are not",
        )


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor in one or several parts that are joined along `axis`. Nothing is copied before `read`."""

    parts: tuple[Tensor, ...]
    axis: int = 0
    change: Callable[[Tensor], Tensor] | None = None  # makes a tensor in float32 of the joined one

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result of `read`."""
        return self.parts[0].dtype if self.change is None else torch.float32

    @property
    def shape(self) -> Shape:
        """Shape of the joined tensor."""
        if len(self.parts) == 1:
            return tuple(self.parts[0].shape)
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    def read(self, cut: tuple[int, range] | None = None) -> Tensor:
        """The joined tensor in `dtype`. With `cut`, only a range of its rows (axis 0) or columns (1).

        The result is a view of the file if it comes from one part and is not changed. Other parts are not read.
        """
        if self.change is not None:
            changed = self.change(SplitTensor(self.parts, self.axis).read())
            return changed if cut is None else narrowed(changed, cut)
        pieces = list(self.parts)
        if cut is not None and cut[0] != self.axis:
            pieces = [narrowed(part, cut) for part in self.parts]
        elif cut is not None:
            pieces, start = [], 0
            for part in self.parts:
                stop = start + part.shape[self.axis]
                first, last = max(cut[1].start, start), min(cut[1].stop, stop)
                if first < last:
                    pieces.append(part.narrow(self.axis, first - start, last - first))
                start = stop
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.axis)


def narrowed(tensor: Tensor, cut: tuple[int, range]) -> Tensor:
    """A range of rows (axis 0) or columns (1), as a view."""
    axis, places = cut
    return tensor.narrow(axis, places.start, len(places))


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSource:
    """A complete LLaMA. `tensors` has every tensor of `llama_shapes`, with this shape."""

    name: str  # for messages and records: the folder
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float
    half_split: bool  # whether the rows of wq and wk are in Hugging Face's order
    tensors: Mapping[str, SplitTensor]
    files: tuple[str, ...]  # paths of the tensor files, in order
    # Biases of a bundle's adapter, for an adapter that has none. Names and order of rows are as in `tensors`.
    biases: Mapping[str, Tensor] = field(default_factory=dict)


def checked_source(
    folder: Path,
    files: Sequence[Path],
    tensors: Mapping[str, SplitTensor],
    *,
    sizes: Mapping[str, int],
    config: str,
    meaning: str,
    half_split: bool,
    **settings: Any,
) -> LlamaSource:
    """The LLaMA of `tensors`. `sizes` are the arguments of `llama_shapes`, `settings` are the other fields.

    Raises CheckpointError, with `meaning` as hint, for a missing, unknown or misshapen tensor. `config` is the name of
    the file that states the sizes.
    """
    wanted = llama_shapes(**sizes)
    check_names(list(tensors), list(wanted), what=f"LLaMA in `{folder}`", meaning=meaning)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(shapes, wanted, what=f"LLaMA in `{folder}` does not fit its {config}", meaning=meaning)
    paths = tuple(map(str, files))
    return LlamaSource(name=str(folder), tensors=tensors, files=paths, half_split=half_split, **{**sizes, **settings})
