"""Names of the tensors of towers and visual blocks in files, from tensor_names.toml, and tensors under our names."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.files import check_dense, check_names

MEANING = "the file is damaged, or another model; the released adapters want OpenAI's ViT-L/14"
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The names of a module's tensors in a kind of files; see tensor_names.toml."""

    tensors: Mapping[str, Sequence[str]]
    parts: Mapping[str, str]
    blocks: str
    block_parts: Mapping[str, str]
    qkv: Sequence[str]
    mark: str = ""
    switches: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)
    unused: str = ""

    def names(self, num_blocks: int, found: Collection[str] = ()) -> Names:
        """Our name -> the file's names of all tensors, without optional ones that are not `found`.

        Several tensors of the file are concatenated along their rows.
        """
        names: Names = {}
        for ours, parts in self.tensors.items():
            kept = tuple(name.rstrip("?") for name in parts if not name.endswith("?") or name[:-1] in found)
            names |= {ours: kept} if kept else {}
        for kind in ("weight", "bias"):
            names |= {f"{ours}.{kind}": (f"{theirs}.{kind}",) for ours, theirs in self.parts.items()}
            for block in range(num_blocks):
                ours_prefix, prefix = f"blocks.{block}.", f"{self.blocks}{block}."
                names[f"{ours_prefix}attention.qkv.{kind}"] = tuple(prefix + part.format(kind) for part in self.qkv)
                for ours, theirs in self.block_parts.items():
                    names[f"{ours_prefix}{ours}.{kind}"] = (f"{prefix}{theirs}.{kind}",)
        return names

    def scale_names(self, num_blocks: int) -> dict[str, str]:
        """Our name of a part of a block -> the file's name of the factors of its outputs."""
        return {
            f"blocks.{block}.{ours}": f"{self.blocks}{block}.{theirs}"
            for block in range(num_blocks)
            for ours, theirs in self.scales.items()
        }


LAYOUTS: Mapping[str, Layout] = {
    kind: Layout(**names)
    for kind, names in tomllib.loads(Path(__file__).with_name("tensor_names.toml").read_text(encoding="utf-8")).items()
}


def translate(
    found: Mapping[str, Tensor], names: Names, *, what: str, scales: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """The tensors listed in `names`, and no others, under our names.

    Several parts are concatenated along their rows; a first dimension of 1 in front of a matrix is left out. Weights
    and biases of the parts in `scales` are multiplied by the factors of their outputs.
    """
    scales = scales or {}
    wanted = [*(theirs for parts in names.values() for theirs in parts), *scales.values()]
    check_names(found, wanted, what=what, meaning=MEANING)
    check_dense({theirs: found[theirs] for theirs in wanted}, what=what)
    state = {}
    for ours, parts in names.items():
        tensors = [found[theirs].squeeze(0) if found[theirs].ndim == 3 else found[theirs] for theirs in parts]
        is_qkv = ".qkv." in ours
        if any(tensor.shape[not is_qkv :] != tensors[0].shape[not is_qkv :] for tensor in tensors):
            raise CheckpointError(f"{what}: {list_keys(parts)} differ in shape", hint=MEANING)
        state[ours] = (
            tensors[0]
            if len(tensors) == 1
            else torch.cat([tensor if tensor.ndim else tensor[None] for tensor in tensors])
        )
    for ours, theirs in scales.items():
        factors = found[theirs].float()
        for name in (f"{ours}.weight", f"{ours}.bias"):
            if factors.shape != state[name].shape[:1]:
                raise CheckpointError(f"{what}: `{theirs}` and `{name}` differ in shape", hint=MEANING)
            value = state[name]
            state[name] = (value.float() * factors.view(-1, *(1,) * (value.ndim - 1))).to(value.dtype)
    return state
