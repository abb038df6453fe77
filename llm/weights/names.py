"""The tensor names of LLaMA as Meta, Hugging Face and this project write them, and the row order of q and k.

Names only: the tensors are read in `meta`, `huggingface` and `adapter`, and put together in `build`.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.files import list_keys
from llama_adapter.runtime.text import shown_excerpt

Shape = tuple[int, ...]
ADAPTER = "a LLaMA-Adapter file"

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


def num_layers_of(keys: Collection[str]) -> int:
    """One more than the highest layer number among keys of the form `layers.N.`; 0 without any.

    Raises CheckpointError where that is far more than there are keys, so that what is made for each layer stays in
    proportion to the file.
    """
    numbers = [int(match[1]) for key in keys if (match := re.match(r"layers\.([0-9]{1,18})\.", key))]
    highest = max(numbers, default=-1)
    if highest > 2 * len(keys):
        raise CheckpointError(
            f"The weights have a tensor `layers.{highest}.*`, and {len(keys)} tensors in all: too few for so many "
            "layers",
            hint="the file is damaged or was put together by hand; fetch it again",
        )
    return highest + 1


def what_is(keys: Collection[str]) -> str | None:
    """Say what kind of file has these keys; None if it is none that is known here."""
    if any(key.startswith(("clip.", "llama.tok_embeddings", "llma.tok_embeddings")) for key in keys):
        return "a checkpoint of the adapter's trainer"
    if any(key.startswith(("visual_blocks.", "adapter_query.", "visual_query.", "llama.", "llma.")) for key in keys):
        return ADAPTER
    if any(key.startswith(("visual.conv1.", "visual.transformer.", "vision_model.")) for key in keys):
        return "a CLIP"
    if "tok_embeddings.weight" in keys or any(key.startswith("layers.0.attention.w") for key in keys):
        return "LLaMA weights in Meta's form"
    if any(key.startswith("model.layers.") for key in keys):
        return "a language model in Hugging Face's form"
    return None


def check_layers(found: Collection[str], num_layers: int, *, config: Path) -> None:
    """Raise CheckpointError unless the names found are of so many layers, as `config` says."""
    layers = num_layers_of(found)
    if layers != num_layers:
        raise CheckpointError(
            f"`{config}` speaks of {num_layers} layers, the weights beside it have {layers}",
            hint="they come from LLaMAs of different size, or a file is missing; 7B has 32 layers, 13B has 40",
        )


def check_names(found: Collection[str], wanted: Collection[str], *, what: str, meaning: str) -> None:
    """Raise CheckpointError unless the names found are exactly the wanted ones; `meaning` explains a difference."""
    known, present = set(wanted), set(found)
    missing = [name for name in wanted if name not in present]
    unknown = [name for name in found if name not in known]
    if not missing and not unknown:
        return
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)} tensors ({list_keys(missing)})")
    if unknown:
        parts.append(f"has {len(unknown)} tensors that do not belong there ({list_keys(unknown)})")
    raise CheckpointError(f"{what} {' and '.join(parts)}", hint=meaning)


def check_shapes(found: Mapping[str, Shape], wanted: Mapping[str, Shape], *, what: str, meaning: str) -> None:
    """Raise CheckpointError at the first tensor whose shape is not the wanted one."""
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{what}: `{shown_excerpt(name)}` has the shape {list(found[name])}, where {list(shape)} is wanted",
                hint=meaning,
            )
