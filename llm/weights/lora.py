"""Merges LoRA folders of PEFT, PaddleNLP and MindFormers into the weights of a LLaMA, in float32, tensor by tensor.

A LoRA changes wk and wv as weights: an adapter's own keys and values are computed with the merged weights.
"""

# O outputs, I inputs, R rank

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, Norms
from llama_adapter.llm.weights.names import (
    FOLDED,
    ROTATED,
    LlamaSource,
    half_split,
    llama_shapes,
    meta_order,
    meta_parts,
    meta_tensors,
    to_huggingface,
)
from llama_adapter.llm.weights.neighbour_lora import read_neighbour_lora
from llama_adapter.llm.weights.peft_config import CONFIG, MERGE, PeftConfig, read_config
from llama_adapter.runtime.errors import CheckpointError, UsageError
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.files import Shape, check_dense, check_names, check_shapes, read_tensor_file
from llama_adapter.runtime.text import shown_excerpt

_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_KEY: Final = re.compile(
    r"base_model\.model\.(.+?)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector|base_layer|modules_to_save|weight)"
    r"(?:\.(?!weight$|bias$)([^.]+))?(?:(?<!\.weight)\.weight)?"
)
# Other names of whole weights and of the embedding's factors, which make the transposed weight.
_SAME: Final = {
    "base_layer": "weight",
    "modules_to_save": "weight",
    "lora_embedding_A": "lora_B",
    "lora_embedding_B": "lora_A",
}
# What stands before the names of a language model's modules in a model that sees pictures, in place of `model.`.
_INSIDE: Final = re.compile(r"model\.language_model\.|language_model\.(?=model\.|lm_head\.)|model\.text_model\.")
# Files with further weights that a training changed: of LLaVA and programs like it, LongLoRA, and ms-swift.
_FURTHER: Final = ("non_lora*.bin", "non_lora*.safetensors", "trainable_params.bin", "vit.safetensors")
_EMBEDDING, _HEAD = "tok_embeddings.weight", "output.weight"
_ENDS: Final = (_EMBEDDING, _HEAD)
_FACTORS: Final = {"scales": "scales of its adapter", FOLDED: "factors of its family"}  # labels of what no LoRA fits
_MEANING: Final = "the folder is damaged, or was trained on another model or on fused matrices"


class Change(NamedTuple):
    """A LoRA's change of a weight: it is replaced by `whole`, if that is given, and scale * left @ right is added.

    With DoRA, each row (`axis` 1), or column of the embedding (0), then gets the length `magnitude`.
    """

    whole: Tensor | None
    left_OR: Tensor | None
    right_RI: Tensor | None
    scale: float
    magnitude: Tensor | None
    axis: int

    def applied(self, weight: Tensor) -> Tensor:
        """The changed weight in float32."""
        weight = (weight if self.whole is None else self.whole).float()
        if self.left_OR is None or self.right_RI is None:
            return weight
        merged = torch.addmm(weight, self.left_OR.float(), self.right_RI.float(), alpha=self.scale)
        if self.magnitude is None:
            return merged
        lengths = torch.linalg.vector_norm(merged, dim=self.axis, keepdim=True)
        return merged.mul_(self.magnitude.float().reshape(lengths.shape) / lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFolder:
    """A LoRA folder, opened, for a LLaMA of known sizes. Tensors have Meta's names, rows Hugging Face's order."""

    path: Path
    weight: float
    config: PeftConfig
    files: tuple[str, ...]
    changes: Mapping[str, Change]

    @property
    def label(self) -> str:
        """Name and weight, for a manifest."""
        return f"lora:{shown_excerpt(self.path.resolve().name, length=80)}={self.weight:g}"


def open_loras(
    texts: Iterable[str], config: DecoderConfig, *, contained: Collection[str] | None = None, name: str = ""
) -> tuple[LoraFolder, ...]:
    """Open LoRA folders, each FOLDER or FOLDER=WEIGHT, for a LLaMA with this configuration.

    `contained` is what the weights of the bundle `name` contain, as in its manifest; None: it is in no bundle.

    Raises CheckpointError for a folder that is damaged, that fits another model, or whose LoRA is computed in a way
    that is not supported; every tensor must be known, and every module that the config targets must be there. Raises it
    for a bundle too whose weights contain factors, or changes of its adapter that a LoRA replaces or rescales. Raises
    UsageError for a weight that is no number.
    """
    names = {
        to_huggingface(name, norms=config.norms).removesuffix(".weight"): (name, shape)
        for name, shape in llama_shapes(config).items()
    }
    loras = tuple(_open(*_split_weight(text), names=names, is_bundle=contained is not None) for text in texts)
    if loras and contained:
        _require_unmixed(loras, config, contained, name)
    return loras


def _require_unmixed(loras: Sequence[LoraFolder], config: DecoderConfig, contained: Collection[str], name: str) -> None:
    hint = "name the LLaMA that the bundle was made of as --llama-dir"
    hint += ", and its adapter as --adapter" if {"gates", "scales"} & {*contained} else ""
    if factors := [what for label, what in _FACTORS.items() if label in contained]:
        what = " and ".join(factors)
        raise CheckpointError(
            f"The weights of the bundle `{name}` contain {what}, so no LoRA is merged into them", hint=hint
        )
    for lora in loras if "gates" in contained else ():
        if mixed := [
            to_huggingface(name, norms=config.norms)
            for name, change in lora.changes.items()
            if name not in _ENDS
            and (change.whole is not None or (change.magnitude is not None and config.separate_adapter_kv))
        ]:
            raise CheckpointError(
                f"The LoRA `{lora.path}` replaces or rescales {list_keys(mixed)}, and the bundle's weights contain its "
                "adapter's changes already",
                hint=hint,
            )


def merged_source(source: LlamaSource, loras: Sequence[LoraFolder]) -> LlamaSource:
    """The LLaMA with LoRA merged, when a tensor is read. Raises CheckpointError for folders that cannot be summed."""
    if not loras:
        return source
    tensors = dict(source.tensors)
    plain = {name: dataclasses.replace(tensor, change=None) for name, tensor in tensors.items()}
    tying = [lora for lora in loras if lora.config.entries["ensure_weight_tying"]]
    ends = plain[_EMBEDDING], plain[_HEAD]
    if tying and (ends[0].parts[0] is ends[1].parts[0] or torch.equal(*(one.read().float() for one in ends))):
        raise CheckpointError(
            f"The LoRA `{tying[0].path}` keeps embedding and head equal (ensure_weight_tying), which is not supported",
            hint="merge it with PEFT, and name the result as --llama-dir",
        )
    for name, changes in _summed(loras, read=lambda name: plain[name].read(), norms=source.config.norms).items():
        heads = ROTATED.get(re.sub(r"^layers\.\d+\.|\.weight$", "", name), "")
        is_in_meta_order = not source.half_split and bool(heads)
        change = partial(_applied, changes, meta_heads=getattr(source.config, heads) if is_in_meta_order else None)
        tensors[name] = plain[name].changed(change).changed(tensors[name].change)
    return dataclasses.replace(source, tensors=tensors)


def merged_state(
    stream: Callable[[], Iterable[tuple[str, Tensor]]], loras: Sequence[LoraFolder], config: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a whole decoder's state dict with LoRA merged, which are float32; others are left as they are.

    Raises CheckpointError for folders that cannot be summed.
    """

    def read(wanted: str) -> Tensor:
        return next(tensor for name, tensor in stream() if meta_parts(name, config) == [wanted])

    changes = _summed(loras, read=read, norms=config.norms)

    def merged(name: str, tensor: Tensor) -> Tensor:
        parts = meta_tensors(name, tensor, config)
        if not parts.keys() & changes.keys():
            return tensor
        rows = [_applied(changes.get(part, ()), one) for part, one in parts.items()]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    return ((name, merged(name, tensor)) for name, tensor in stream())


def _applied(changes: Sequence[Change], weight: Tensor, *, meta_heads: int | None = None) -> Tensor:
    """The changed weight in float32. With `meta_heads`, its rows are in Meta's order."""
    if meta_heads is not None:
        return meta_order(_applied(changes, half_split(weight, meta_heads)), meta_heads)
    for change in changes:
        weight = change.applied(weight)
    return weight.float()


def _summed(loras: Sequence[LoraFolder], *, read: Callable[[str], Tensor], norms: Norms) -> dict[str, list[Change]]:
    """The changes of each tensor, with the weights of their folders. Only low-rank products may be several."""
    found: dict[str, list[Change]] = {}
    for lora in loras:
        for name, change in lora.changes.items():
            # PEFT stores the embedding and the head beside their factors, mostly unchanged.
            if change.whole is not None and name in _ENDS:
                own = read(name)
                change = change._replace(whole=None if torch.equal(change.whole.to(own.dtype), own) else change.whole)
            others = [one for one in loras if one is not lora and name in one.changes]
            is_sum = change.whole is None and change.magnitude is None
            if not is_sum and (others or lora.weight != 1):
                reason = f"`{others[0].path}` changes it too" if others else f"its weight is {lora.weight:g}"
                raise CheckpointError(
                    f"The LoRA `{lora.path}` has {'DoRA' if change.whole is None else 'the whole weight'} for "
                    f"`{to_huggingface(name, norms=norms)}`, which is not summed, and {reason}",
                    hint="give it alone, with weight 1; or merge one folder first with PEFT",
                )
            if change.whole is not None or change.left_OR is not None:
                found.setdefault(name, []).append(change._replace(scale=change.scale * lora.weight))
    return found


def _split_weight(text: str) -> tuple[Path, float]:
    """The folder and the weight in FOLDER[=WEIGHT]."""
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


def _open(folder: Path, weight: float, *, names: Mapping[str, tuple[str, Shape]], is_bundle: bool) -> LoraFolder:
    """Open a folder. `names` are the modules of the LLaMA, with Meta's names and the shapes of their weights."""
    if (folder / CONFIG).exists():
        config = read_config(folder)
        path = next((folder / name for name in _WEIGHTS if (folder / name).exists()), folder / _WEIGHTS[0])
        tensors = read_tensor_file(path).tensors
        check_dense(tensors, what=f"`{path}`")
        files: tuple[Path, ...] = (folder / CONFIG, path)
        found = _by_module(tensors, path=path)
        further = sorted(one for pattern in _FURTHER for one in folder.glob(pattern) if one.is_file())
        if more := [one.name for one in further if _has_tensors(one)]:
            raise CheckpointError(
                f"`{folder}` has {list_keys(more)} beside its LoRA, with further trained weights, which are not read",
                hint="merge all of them with the program that trained them, and name the result as --llama-dir",
            )
    elif (other := read_neighbour_lora(folder, names)) is not None:
        config, files, path, found = other.config, other.files, other.files[-1], dict(other.tensors)
    else:
        problem = f"has no {CONFIG}" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        paths = sorted((*folder.glob(f"*/{CONFIG}"), *folder.glob(f"*/*/{CONFIG}")))
        inner = list_keys([str(path.parent.relative_to(folder)) for path in paths])
        raise CheckpointError(
            f"`{folder}` is no LoRA folder: it {problem}{f', and its folders {inner} have one' if inner else ''}",
            hint=f"name the folder that PEFT's `save_pretrained` wrote, with {CONFIG} and {_WEIGHTS[0]}, or that of "
            "PaddleNLP or MindFormers; a bundle is a --model",
        )
    if (inside := next(filter(None, map(_INSIDE.match, found)), None)) is not None:
        replaced = "^" if inside[0] == "language_model." else r"^model\."  # in transformers 4, the head is inside too
        names = {re.sub(replaced, inside[0], module): one for module, one in names.items()}
    targeted, saved = config.changed({module: shape for module, (_, shape) in names.items()})
    wanted: dict[str, Shape] = {}
    for module, (name, shape) in names.items():
        if module in targeted:
            rank, (rows, columns) = config.rank_of(module), shape
            wanted |= {f"{module}.lora_A": (rank, columns), f"{module}.lora_B": (rows, rank)}
            if config.entries["use_dora"]:
                wanted[f"{module}.lora_magnitude_vector"] = (columns if name == _EMBEDDING else rows,)
        if module in saved or (name in _ENDS and f"{module}.weight" in found):
            wanted[f"{module}.weight"] = shape
    what = f"The LoRA `{path}`"
    meaning = _MEANING
    if files[0].name == CONFIG:
        meaning += f"; save it again with PEFT's `save_pretrained`; for added tokens, biases or a tower, {MERGE}"
    if not wanted:
        raise CheckpointError(
            f"{what} changes nothing: its {config.path.name} targets no module of a LLaMA", hint=meaning
        )
    shapes = {key: tuple(tensor.shape) for key, tensor in found.items()}
    ends = {f"{module}.{kind}" for module, (name, _) in names.items() if name in _ENDS for kind in ("weight", "lora_B")}
    if is_bundle and any(shapes[key][:1] != wanted[key][:1] for key in ends & shapes.keys() & wanted.keys()):
        meaning += "; for rows of padding, which a bundle lacks, name the LLaMA that it was made of as --llama-dir"
    check_names(list(found), list(wanted), what=what, meaning=meaning)
    check_shapes(shapes, wanted, what=what, meaning=meaning)
    if broken := [key for key, tensor in found.items() if not bool(tensor.isfinite().all())]:
        raise CheckpointError(
            f"{what} holds numbers that are not finite, in {list_keys(broken)}",
            hint="its training diverged, or the file is damaged; take another checkpoint of it",
        )
    changes = {
        names[module][0]: Change(
            whole=found.get(f"{module}.weight"),
            left_OR=found.get(f"{module}.lora_B"),
            right_RI=found.get(f"{module}.lora_A"),
            scale=config.scale_of(module),
            magnitude=found.get(f"{module}.lora_magnitude_vector"),
            axis=0 if names[module][0] == _EMBEDDING else 1,
        )
        for module in dict.fromkeys(key.rpartition(".")[0] for key in wanted)
    }
    return LoraFolder(path=folder, weight=weight, config=config, files=tuple(map(str, files)), changes=changes)


def _has_tensors(further: Path) -> bool:
    try:
        return bool(read_tensor_file(further).tensors)
    except CheckpointError as error:
        hint = "take it out of the folder if no weights are in it"
        raise CheckpointError(f"Beside the LoRA is a file that cannot be read: {error.message}", hint=hint) from None


def _by_module(tensors: Mapping[str, Tensor], *, path: Path) -> dict[str, Tensor]:
    """The tensors by module and kind, such as `model.norm.weight` and `lm_head.lora_A`; unknown names are kept."""
    found: dict[str, Tensor] = {}
    adapters: set[str] = set()
    for key, tensor in tensors.items():
        if key.endswith(".original_module.weight"):  # before training; the trained one may be there twice
            continue
        name, match = key, _KEY.fullmatch(key)
        if match is not None:
            adapters |= {match[3]} - {None}
            name = f"{match[1]}.{_SAME.get(match[2], match[2])}"
        if len(adapters) > 1 or (name in found and not (name.endswith(".weight") and torch.equal(found[name], tensor))):
            raise CheckpointError(
                f"`{path}` holds several adapters, or a tensor twice (`{shown_excerpt(key)}`)",
                hint="save each adapter to a folder of its own, with PEFT's `save_pretrained`",
            )
        is_transposed = match is not None and match[2].startswith("lora_embedding")
        found[name] = tensor.transpose(0, -1) if is_transposed else tensor
    return found
