"""Tensor names of LLaMA in Meta's and Hugging Face's formats, the row order of q and k, and an opened LLaMA."""

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, Norms
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.files import Shape, check_names, check_shapes, count_blocks
from llama_adapter.runtime.tensor_files.gguf_files import Blocks

# Matrices of a layer, with the sizes of their rows and columns: D model width, F feed-forward width, Q width of all
# query heads together, K of all heads of keys.
MATRICES = {
    "attention.wq": ("Q", "D"),
    "attention.wk": ("K", "D"),
    "attention.wv": ("K", "D"),
    "attention.wo": ("D", "Q"),
    "feed_forward.w1": ("F", "D"),
    "feed_forward.w2": ("D", "F"),
    "feed_forward.w3": ("F", "D"),
}
# Matrices that may have a bias in an adapter's file; wk, wv and the output never have one there.
BIASED = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
# Our fused layers of a block, and Meta's names of their parts.
PARTS = {
    "attention.qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "attention.out": ("attention.wo",),
    "feed_forward.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.down": ("feed_forward.w2",),
}
# Matrices whose rows have an order, see `half_split`, and the number of their heads in a configuration.
ROTATED = {"attention.wq": "num_heads", "attention.wk": "num_kv_heads"}
# Norms of a layer under names like Meta's, and ours; `norm_shapes` has those of a model.
LAYER_NORMS = {
    "attention_norm": "attention_norm",
    "ffn_norm": "feed_forward_norm",
    "attention_out_norm": "attention_out_norm",
    "ffn_out_norm": "feed_forward_out_norm",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
}
FOLDED: Final = "folded"  # label of models whose weights contain `Folds`
_SINGLE = {"embedding": "tok_embeddings", "norm": "norm", "head": "output"} | {v: k for k, v in LAYER_NORMS.items()}

# Sizes of the first LLaMAs, for hints.
WIDTHS = "7B is 4096 wide, 13B 5120, 30B 6656, 65B 8192"
DEPTHS = "7B has 32 layers, 13B 40, 30B 60, 65B 80"

_HUGGINGFACE_LAYER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
_HUGGINGFACE_NORMS: Mapping[Norms, Mapping[str, str]] = {
    "before": {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"},
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_out_norm",
    },
    "after": {"post_attention_layernorm": "attention_out_norm", "post_feedforward_layernorm": "ffn_out_norm"},
}
_HUGGINGFACE_TOP = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}


def matrix_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Meta's names of the matrices of a layer, without `.weight`, and their shapes."""
    sides = {"D": config.dim, "F": config.ffn_dim, "Q": config.attention_dim, "K": config.kv_dim}
    return {name: (sides[rows], sides[columns]) for name, (rows, columns) in MATRICES.items()}


def norm_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """The names of the norms of a layer, as in `LAYER_NORMS` and without `.weight`, and their shapes."""
    before, behind = ["attention_norm", "ffn_norm"], ["attention_out_norm", "ffn_out_norm"]
    names = {"before": before, "both": before + behind, "after": behind}[config.norms]
    shapes: dict[str, Shape] = dict.fromkeys(names, (config.dim,))
    if config.qk_norm != "none":
        widths = (config.attention_dim, config.kv_dim) if config.qk_norm == "all" else (config.head_dim,) * 2
        shapes |= {"attention.q_norm": (widths[0],), "attention.k_norm": (widths[1],)}
    return shapes


def llama_shapes(config: DecoderConfig, *, biased: Collection[str] = ()) -> dict[str, Shape]:
    """Meta's names of all tensors of a LLaMA and their shapes, in the file's order; `biased` matrices have a bias."""
    shapes: dict[str, Shape] = {"tok_embeddings.weight": (config.vocab_size, config.dim)}
    matrices, norms = matrix_shapes(config), norm_shapes(config)
    for layer in range(config.num_layers):
        for name, shape in {**matrices, **norms}.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
        shapes |= {f"layers.{layer}.{name}.bias": matrices[name][:1] for name in biased}
    return {**shapes, "norm.weight": (config.dim,), "output.weight": (config.vocab_size, config.dim)}


def from_huggingface(key: str, *, norms: Norms = "before") -> str | None:
    """Meta's name for the key of a tensor of a LLaMA in Hugging Face's format; None for other keys.

    Families with other `norms` use the same words for norms in other places.
    """
    if key in _HUGGINGFACE_TOP:
        return _HUGGINGFACE_TOP[key]
    match = re.fullmatch(r"model\.(layers\.\d+)\.(.+)\.(weight|bias)", key)
    name = {**_HUGGINGFACE_LAYER, **_HUGGINGFACE_NORMS[norms]}.get(match[2]) if match else None
    return f"{match[1]}.{name}.{match[3]}" if match and name else None


def to_huggingface(name: str, *, norms: Norms = "before") -> str:
    """Inverse of `from_huggingface`."""
    match = re.fullmatch(r"(layers\.\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return next(theirs for theirs, ours in _HUGGINGFACE_TOP.items() if ours == name)
    names = {**_HUGGINGFACE_LAYER, **_HUGGINGFACE_NORMS[norms]}
    layer = next(theirs for theirs, ours in names.items() if ours == match[2])
    return f"model.{match[1]}.{layer}.{match[3]}"


def meta_parts(name: str, config: DecoderConfig) -> list[str]:
    """Meta's names of the tensors that a tensor of a decoder's state dict consists of; empty for other tensors."""
    if match := re.fullmatch(r"adapter\.kv\.(\d+)\.weight", name):
        layer = config.first_adapter_layer + int(match[1])
        return [f"layers.{layer}.attention.{part}.weight" for part in ("wk", "wv")]
    match = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(weight|bias)", name)
    parts = PARTS.get(match[2]) or (_SINGLE[match[2]],) if match else ()
    return [f"{match[1] or ''}{part}.{match[3]}" for part in parts] if match else []


def part_rows(path: str, config: DecoderConfig) -> tuple[int, ...]:
    """The rows of each part of a fused layer, see `PARTS`."""
    shapes = matrix_shapes(config)
    return tuple(shapes[part][0] for part in PARTS[path])


def meta_tensors(name: str, tensor: Tensor, config: DecoderConfig) -> dict[str, Tensor]:
    """The rows of a tensor of a whole decoder's state dict by the names of `meta_parts`, as views."""
    parts, path = meta_parts(name, config), re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", name)
    if path in PARTS:
        return dict(zip(parts, torch.split(tensor, list(part_rows(path, config))), strict=True))
    return dict(zip(parts, tensor.chunk(max(1, len(parts))), strict=False))


def half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a q or k tensor (heads * H, ...) from Meta's order to half-split order.

    The rotary embedding rotates pairs of coordinates of a head: (2i, 2i + 1) in Meta's order, (i, i + H/2) here and in
    Hugging Face's order.
    """
    per_head = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return per_head.transpose(1, 2).reshape(rows.shape)


def meta_order(rows: Tensor, num_heads: int) -> Tensor:
    """Inverse of `half_split`: the rows of a q or k tensor in Meta's order."""
    per_head = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return per_head.transpose(1, 2).reshape(rows.shape)


def to_half_split(name: str, rows: Tensor, config: DecoderConfig) -> Tensor:
    """The rows of a matrix or bias, by its name such as `attention.wk`, from Meta's order to half-split order."""
    return half_split(rows, getattr(config, ROTATED[name])) if name in ROTATED else rows


def to_meta_order(name: str, rows: Tensor, config: DecoderConfig) -> Tensor:
    """Inverse of `to_half_split`."""
    return meta_order(rows, getattr(config, ROTATED[name])) if name in ROTATED else rows


def check_layers(found: Collection[str], num_layers: int, *, prefix: str, config: Path) -> None:
    """Raise CheckpointError unless names with a number after `prefix` have `num_layers` layers, as `config` says."""
    layers = count_blocks(found, prefix, what=f"The weights beside `{config}`")
    if layers != num_layers:
        others = "" if layers else f"; they have {list_keys([*found]) or 'no tensors'}"
        cause = "they come from LLaMAs of different sizes" if layers else "a program has changed the tensors' names"
        raise CheckpointError(
            f"`{config}` says {num_layers} layers, the weights beside it have {layers}{others}",
            hint=f"{cause}, or a file is missing{f'; {DEPTHS}' if layers else ''}",
        )


Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A tensor in one or several parts that are joined along `axis`. Nothing is copied before `read`."""

    parts: tuple[Tensor | Blocks, ...]
    axis: int = 0
    change: Change | None = None  # makes a tensor in float32 of the joined one

    def changed(self, change: Change | None) -> "SplitTensor":
        """The tensor with another change after its own."""
        both = change if self.change is None or change is None else partial(_in_order, self.change, change)
        return replace(self, change=both or self.change)

    @property
    def is_made(self) -> bool:
        """Whether every `read` computes new numbers. Otherwise they may be a view of the file."""
        return self.change is not None or isinstance(self.parts[0], Blocks)

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
            pieces = [part.narrow(cut[0], cut[1].start, len(cut[1])) for part in self.parts]
        elif cut is not None:
            pieces, start = [], 0
            for part in self.parts:
                stop = start + part.shape[self.axis]
                first, last = max(cut[1].start, start), min(cut[1].stop, stop)
                if first < last:
                    pieces.append(part.narrow(self.axis, first - start, last - first))
                start = stop
        values = [piece.read() if isinstance(piece, Blocks) else piece for piece in pieces]
        return values[0] if len(values) == 1 else torch.cat(values, dim=self.axis)


def split_rows(
    tensor: Tensor | Blocks, config: DecoderConfig, parts: Sequence[str], *, num_groups: int = 1
) -> dict[str, SplitTensor]:
    """The `parts`, by Meta's names such as `attention.wq`, of a matrix or bias with the rows of all of them, as views.

    Each of its groups has an equal share of every part.
    """
    shapes, pieces, start = matrix_shapes(config), dict[str, list[Tensor | Blocks]](), 0
    for _, part in itertools.product(range(num_groups), parts):
        count = shapes[part][0] // num_groups
        pieces.setdefault(part, []).append(tensor.narrow(0, start, count))
        start += count
    return {part: SplitTensor(tuple(several)) for part, several in pieces.items()}


def _in_order(first: Change, second: Change, tensor: Tensor) -> Tensor:
    return second(first(tensor))


def narrowed(tensor: Tensor, cut: tuple[int, range]) -> Tensor:
    """A range of rows (axis 0) or columns (1), as a view."""
    axis, places = cut
    return tensor.narrow(axis, places.start, len(places))


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSource:
    """A complete LLaMA. `tensors` has every tensor of `llama_shapes` with its shape, and biases if there are any."""

    name: str  # for messages and records: the folder
    config: DecoderConfig  # without adapter; its context has no meaning
    half_split: bool  # whether the rows of wq and wk are in Hugging Face's order
    tensors: Mapping[str, SplitTensor]
    files: tuple[str, ...]  # paths of the tensor files, in order
    embedding_scale: float = 1.0  # factor of the embedding, rounded to the dtype of the computation, as in Gemma
    contained: tuple[str, ...] | None = None  # what a bundle's weights contain, as in its manifest; None: no bundle

    @property
    def merged(self) -> tuple[str, ...]:
        """What is, or will be when it is read, in the weights, for a manifest."""
        contained = self.contained or ()
        is_changed = self.embedding_scale != 1 or any(tensor.change is not None for tensor in self.tensors.values())
        return (FOLDED, *contained) if is_changed and FOLDED not in contained else contained


def checked_config(folder: Path, settings: Mapping[str, Any]) -> DecoderConfig:
    """The configuration of the LLaMA in a folder; `settings` are arguments. Raises CheckpointError for bad values."""
    try:
        return DecoderConfig(**settings)
    except ValueError as error:
        raise CheckpointError(
            f"The sizes of the LLaMA in `{folder}` are invalid: {error}",
            hint="its configuration is damaged or belongs to another model; copy it again",
        ) from None


def checked_source(
    folder: Path,
    files: Sequence[Path],
    tensors: Mapping[str, SplitTensor],
    *,
    config: DecoderConfig,
    stated_in: str,
    meaning: str,
    half_split: bool,
    biased: Collection[str] = (),
    embedding_scale: float = 1.0,
) -> LlamaSource:
    """The LLaMA of `tensors`, whose configuration comes from the file `stated_in`. `biased` matrices must have a bias.

    Raises CheckpointError, with `meaning` as hint, for a missing, unknown or misshapen tensor.
    """
    wanted = llama_shapes(config, biased=biased)
    check_names(list(tensors), list(wanted), what=f"LLaMA in `{folder}`", meaning=meaning)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(shapes, wanted, what=f"LLaMA in `{folder}` does not fit its {stated_in}", meaning=meaning)
    paths = tuple(map(str, files))
    return LlamaSource(
        name=str(folder),
        config=config,
        tensors=tensors,
        files=paths,
        half_split=half_split,
        embedding_scale=embedding_scale,
    )
