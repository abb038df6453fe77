"""Merges LoRA folders of Hugging Face PEFT into the weights of a LLaMA, in float32 and tensor by tensor.

A LoRA changes wk and wv as weights: an adapter's own keys and values are computed with the merged weights.
"""

# O outputs, I inputs, R rank

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.names import (
    LlamaSource,
    SplitTensor,
    llama_shapes,
    meta_order,
    narrowed,
    to_huggingface,
)
from llama_adapter.llm.weights.peft_config import CONFIG, PeftConfig, read_config
from llama_adapter.runtime.errors import CheckpointError, UsageError
from llama_adapter.runtime.tensor_files.files import (
    Shape,
    check_dense,
    check_names,
    check_shapes,
    list_keys,
    read_tensor_file,
)
from llama_adapter.runtime.text import shown_excerpt

_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_KEY: Final = re.compile(
    r"base_model\.model\.(.+?)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector|base_layer|modules_to_save|weight)"
    r"(?:\.(?!weight$|bias$)([^.]+))?(?:(?<!\.weight)\.weight)?"
)
_WHOLE_KINDS: Final = ("base_layer", "modules_to_save", "weight")  # names of a module's whole weight
_EMBEDDING, _HEAD = "tok_embeddings.weight", "output.weight"
_ENDS: Final = {"embedding.weight": _EMBEDDING, "head.weight": _HEAD}  # their names in a decoder's state dict
_ROTATED: Final = re.compile(r".*\.attention\.w[qk]\.weight")
_MEANING: Final = "the folder is damaged, or was trained on another model; save it again with PEFT's `save_pretrained`"
_OTHERS: Final = {
    "lora_model_state.pdparams": "Paddle's LoRA is not read: merge it there with `merge_lora_params.py`, or save its "
    "factors as a PEFT folder in safetensors",
    "*.ckpt": "LoRA of MindFormers is not read: merge it there with `transform_ckpt_lora`, or save its factors as a "
    "PEFT folder in safetensors",
    "manifest.json": "it is a bundle, which goes with --model",
}
# The matrices in each of our fused weights.
_FUSED: Final = {
    "attention.qkv": ("attention.wq", "attention.wk", "attention.wv"),
    "attention.out": ("attention.wo",),
    "feed_forward.gate_up": ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.down": ("feed_forward.w2",),
}


class Update(NamedTuple):
    """A low-rank update: W + scale * left @ right; with DoRA, each row or column then gets the length `magnitude`."""

    left_OR: Tensor
    right_RI: Tensor
    scale: float
    magnitude: Tensor | None
    axis: int  # along which DoRA measures lengths: 1 for linear layers, 0 for the embedding

    def added(self, weight: Tensor) -> Tensor:
        """The weight with this update, a new tensor in float32."""
        merged = torch.addmm(weight.float(), self.left_OR.float(), self.right_RI.float(), alpha=self.scale)
        if self.magnitude is None:
            return merged
        lengths = torch.linalg.vector_norm(merged, dim=self.axis, keepdim=True)
        return merged.mul_(self.magnitude.float().reshape(lengths.shape) / lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFolder:
    """A LoRA folder, opened, for a LLaMA of known sizes. Tensors have Meta's names, rows Hugging Face's order."""

    path: Path
    weight: float
    base: str | None
    ties_weights: bool
    files: tuple[str, ...]
    updates: Mapping[str, Update]
    whole: Mapping[str, Tensor]  # tensors that replace those of the LLaMA

    @property
    def label(self) -> str:
        """Name and weight, for a manifest."""
        return f"lora:{shown_excerpt(self.path.resolve().name, length=80)}={self.weight:g}"


def split_weight(text: str) -> tuple[Path, float]:
    """The folder and the weight in FOLDER[=WEIGHT]. Raises UsageError for a weight that is no number."""
    folder, sign, number = text.rpartition("=")
    if not sign or Path(text).is_dir():
        return Path(text), 1.0
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not folder or not abs(weight) < 1e6:
        raise UsageError(
            f"lora is FOLDER or FOLDER=WEIGHT, got `{shown_excerpt(text)}`", hint="a weight is a number such as 0.5"
        )
    return Path(folder), weight


def open_loras(
    texts: Iterable[str], *, vocab_size: int, dim: int, num_layers: int, ffn_dim: int
) -> tuple[LoraFolder, ...]:
    """Open LoRA folders, each FOLDER or FOLDER=WEIGHT, for a LLaMA of these sizes.

    Raises CheckpointError for a folder that is damaged, that fits another model, or whose LoRA is computed in a way
    that is not supported; every tensor must be known, and every module that the config targets must be there.
    """
    shapes = llama_shapes(vocab_size=vocab_size, dim=dim, num_layers=num_layers, ffn_dim=ffn_dim)
    return tuple(_open(*split_weight(text), shapes=shapes) for text in texts)


def merged_source(source: LlamaSource, loras: Sequence[LoraFolder]) -> LlamaSource:
    """The LLaMA with LoRA merged, when a tensor is read. Raises CheckpointError for folders that cannot be summed."""
    if not loras:
        return source
    tensors = dict(source.tensors)
    is_tied = tensors[_EMBEDDING].parts[0].data_ptr() == tensors[_HEAD].parts[0].data_ptr()
    if tied := [lora for lora in loras if is_tied and lora.ties_weights]:
        raise CheckpointError(
            f"The LoRA `{tied[0].path}` keeps embedding and head equal (ensure_weight_tying), which is not supported",
            hint="merge it with PEFT, and name the result as --llama-dir",
        )
    changes = _Changes(loras, read=lambda name: source.tensors[name].read())
    for name in changes.names:
        heads = None if source.half_split or not _ROTATED.fullmatch(name) else source.num_heads
        tensors[name] = _MergedTensor(
            parts=tensors[name].parts, axis=tensors[name].axis, change=changes.of(name, heads)
        )
    return dataclasses.replace(source, tensors=tensors)


def merged_state(
    stream: Callable[[], Iterable[tuple[str, Tensor]]], loras: Sequence[LoraFolder], config: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a whole decoder's state dict with LoRA merged, which are float32; others are left as they are.

    Raises CheckpointError for folders that cannot be summed, or that replace or rescale weights which contain the
    LoRA or the norms of an adapter.
    """
    for lora in loras:
        scaled = [name for name, one in lora.updates.items() if one.magnitude is not None and name != _EMBEDDING]
        mixed = scaled if config.separate_adapter_kv else []
        if mixed or (mixed := [name for name in lora.whole if name not in _ENDS.values()]):
            raise CheckpointError(
                f"The LoRA `{lora.path}` replaces or rescales {list_keys([to_huggingface(name) for name in mixed])}, "
                "and the bundle's weights contain its adapter's changes already",
                hint="name the LLaMA that the bundle was made of as --llama-dir, and its adapter as --adapter",
            )
    is_compared = any(lora.whole for lora in loras)
    ends = {_ENDS[name]: tensor for name, tensor in stream() if name in _ENDS} if is_compared else {}
    return _merge_state(stream(), _Changes(loras, read=ends.__getitem__), config)


def _merge_state(
    tensors: Iterable[tuple[str, Tensor]], changes: "_Changes", config: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        parts = _parts_of(name, config)
        if not any(part in changes.names for part in parts):
            yield name, tensor
            continue
        rows = zip(parts, tensor.chunk(len(parts)), strict=True)
        merged = [changes.of(part)(one) if part in changes.names else one.float() for part, one in rows]
        yield name, merged[0] if len(merged) == 1 else torch.cat(merged)


def _parts_of(name: str, config: DecoderConfig) -> list[str]:
    """Meta's names of the matrices in a tensor of a decoder's state dict."""
    if (top := _ENDS.get(name)) is not None:
        return [top]
    if match := re.fullmatch(r"adapter\.kv\.(\d+)\.weight", name):
        layer = config.first_adapter_layer + int(match[1])
        return [f"layers.{layer}.attention.{part}.weight" for part in ("wk", "wv")]
    match = re.fullmatch(r"(layers\.\d+)\.(\w+\.\w+)\.weight", name)
    return [f"{match[1]}.{part}.weight" for part in _FUSED.get(match[2], ())] if match else []


@dataclass(frozen=True, slots=True)
class _MergedTensor(SplitTensor):
    """A tensor with a change that is computed at every read, of the whole tensor."""

    change: Callable[[Tensor], Tensor] = torch.clone

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def read(self, cut: tuple[int, range] | None = None) -> Tensor:
        merged = self.change(SplitTensor(self.parts, self.axis).read())
        return merged if cut is None else narrowed(merged, cut)


class _Changes:
    """What a list of folders changes, checked: changes of a tensor are summed, and all but sums stand alone."""

    def __init__(self, loras: Sequence[LoraFolder], *, read: Callable[[str], Tensor]) -> None:
        self._loras = loras
        self._whole: dict[str, Tensor] = {}
        for lora in loras:
            for name, tensor in lora.whole.items():
                # PEFT stores the embedding and the head beside their factors, mostly unchanged.
                if name not in _ENDS.values() or not _is_equal(tensor, read(name)):
                    self._require_alone(lora, name, "the whole weight of")
                    self._whole[name] = tensor
            for name, update in lora.updates.items():
                if update.magnitude is not None:
                    self._require_alone(lora, name, "DoRA for")
        self.names = {*self._whole, *(name for lora in loras for name in lora.updates)}

    def of(self, name: str, meta_heads: int | None = None) -> Callable[[Tensor], Tensor]:
        """The change of a tensor, as a function. With `meta_heads`, its rows are in Meta's order."""

        def ordered(rows: Tensor) -> Tensor:
            return rows if meta_heads is None else meta_order(rows, meta_heads)

        def change(weight: Tensor) -> Tensor:
            if name in self._whole:
                weight = ordered(self._whole[name])
            for lora in self._loras:
                if (update := lora.updates.get(name)) is not None:
                    magnitude = None if update.magnitude is None else ordered(update.magnitude)
                    scale = update.scale * lora.weight
                    weight = update._replace(left_OR=ordered(update.left_OR), scale=scale, magnitude=magnitude).added(
                        weight
                    )
            return weight.float()

        return change

    def _require_alone(self, lora: LoraFolder, name: str, what: str) -> None:
        others = [one for one in self._loras if one is not lora and (name in one.updates or name in one.whole)]
        if lora.weight == 1 and not others:
            return
        reason = f"`{others[0].path}` changes it too" if others else f"its weight is {lora.weight:g}"
        raise CheckpointError(
            f"The LoRA `{lora.path}` has {what} `{to_huggingface(name)}`, which is not summed, and {reason}",
            hint="give it alone, with weight 1; or merge one folder first with PEFT",
        )


def _is_equal(stored: Tensor, own: Tensor) -> bool:
    return stored.shape == own.shape and torch.equal(stored.to(own.dtype), own)


def _open(folder: Path, weight: float, *, shapes: Mapping[str, Shape]) -> LoraFolder:
    if not (folder / CONFIG).exists():
        problem = f"has no {CONFIG}" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        others = (hint for pattern, hint in _OTHERS.items() if folder.is_dir() and any(folder.glob(pattern)))
        raise CheckpointError(
            f"`{folder}` is no LoRA folder: it {problem}",
            hint=next(others, f"name the folder that PEFT's `save_pretrained` wrote, with {CONFIG} and {_WEIGHTS[0]}"),
        )
    config = read_config(folder)
    path = next((folder / name for name in _WEIGHTS if (folder / name).exists()), folder / _WEIGHTS[0])
    tensors = read_tensor_file(path).tensors
    check_dense(tensors, what=f"`{path}`")
    found = _by_module(tensors, path=path)
    names = {to_huggingface(name).removesuffix(".weight"): name for name in shapes}
    linear = [module for module, name in names.items() if len(shapes[name]) == 2 and name != _EMBEDDING]
    targeted = config.targeted(linear, [to_huggingface(_EMBEDDING).removesuffix(".weight")])
    saved = config.saved(list(names))
    wanted: dict[str, Shape] = {}
    for module in targeted:
        wanted |= _factor_shapes(module, shapes[names[module]], config, is_embedding=names[module] == _EMBEDDING)
    for module, name in names.items():
        is_optional = name in _ENDS.values() and f"{module}.weight" in found
        if module in saved or is_optional:
            wanted[f"{module}.weight"] = shapes[name]
    what = f"The LoRA `{path}`"
    if not wanted:
        raise CheckpointError(f"{what} changes nothing: its {CONFIG} targets no module of a LLaMA", hint=_MEANING)
    check_names(list(found), list(wanted), what=what, meaning=_MEANING)
    check_shapes({key: tuple(tensor.shape) for key, tensor in found.items()}, wanted, what=what, meaning=_MEANING)
    if broken := [key for key, tensor in found.items() if not bool(tensor.isfinite().all())]:
        raise CheckpointError(
            f"{what} holds numbers that are not finite, in {list_keys(broken)}",
            hint="its training diverged, or the file is damaged; take another checkpoint of it",
        )
    return LoraFolder(
        path=folder,
        weight=weight,
        base=config.base,
        ties_weights=config.entries["ensure_weight_tying"],
        files=(str(folder / CONFIG), str(path)),
        updates={names[module]: _update(module, found, config) for module in targeted},
        whole={names[key.removesuffix(".weight")]: one for key, one in found.items() if key.endswith(".weight")},
    )


def _by_module(tensors: Mapping[str, Tensor], *, path: Path) -> dict[str, Tensor]:
    """The tensors by module and kind, such as `model.norm.weight` and `lm_head.lora_A`; unknown names are kept."""
    found: dict[str, Tensor] = {}
    adapters: set[str | None] = set()
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        name = key
        if match is not None:
            adapters |= {match[3]} - {None}
            name = f"{match[1]}.{'weight' if match[2] in _WHOLE_KINDS else match[2]}"
        if name in found or len(adapters) > 1:
            raise CheckpointError(
                f"`{path}` holds several adapters, or a tensor twice (`{shown_excerpt(key)}`)",
                hint="save each adapter to a folder of its own, with PEFT's `save_pretrained`",
            )
        found[name] = tensor
    return found


def _factor_shapes(module: str, shape: Shape, config: PeftConfig, *, is_embedding: bool) -> dict[str, Shape]:
    rank, (rows, columns) = config.rank_of(module), shape
    if is_embedding:
        found: dict[str, Shape] = {
            f"{module}.lora_embedding_A": (rank, rows),
            f"{module}.lora_embedding_B": (columns, rank),
        }
    else:
        found = {f"{module}.lora_A": (rank, columns), f"{module}.lora_B": (rows, rank)}
    return found | (
        {f"{module}.lora_magnitude_vector": (columns if is_embedding else rows,)} if config.entries["use_dora"] else {}
    )


def _update(module: str, found: Mapping[str, Tensor], config: PeftConfig) -> Update:
    scale, magnitude = config.scale_of(module), found.get(f"{module}.lora_magnitude_vector")
    if f"{module}.lora_A" in found:
        return Update(found[f"{module}.lora_B"], found[f"{module}.lora_A"], scale, magnitude, 1)
    # The embedding's factors make the transposed weight.
    left, right = found[f"{module}.lora_embedding_A"].T, found[f"{module}.lora_embedding_B"].T
    return Update(left, right, scale, magnitude, 0)
