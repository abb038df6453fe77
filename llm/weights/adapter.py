"""Opens adapter files (releases and trainer checkpoints), splits their tensors by owner, and checks the LLaMA part.

`vision.weights` reads the visual part.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.weights.names import (
    BIASED,
    WIDTHS,
    llama_shapes,
    matrix_shapes,
    norm_shapes,
)
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys
from llama_adapter.runtime.tensor_files.files import (
    ADAPTER,
    Shape,
    check_dense,
    check_names,
    check_shapes,
    count_blocks,
    read_tensor_file,
    what_is,
)

_VISUAL = (
    "visual_blocks.",
    "clip_proj.",
    "clip_proj_norm.",
    "visual_proj.",
    "visual_proj_norm.",
    "visual_query.",
)
_GATE = re.compile(r"layers\.\d+\.attention\.gate")
TEXT_QUERIES = 10  # per layer of an adapter of LLaMA-Adapter V1; a constant in its program
_MATRIX = r"layers\.\d+\.(?:attention\.w[qkvo]|feed_forward\.w[123])"
_NORM = r"(?:layers\.\d+\.(?:(?:attention|ffn)(?:_out)?|attention\.[qk])_norm|norm)"
_BASE = re.compile(rf"(?:{_MATRIX}|{_NORM}|tok_embeddings|output)\.weight")
_CHAT = re.compile(rf"({_MATRIX})_(bias|scale)")  # of every linear layer: added to its outputs, multiplies its inputs
HEAD = "output.weight"
_MEANING = "the file is damaged, or belongs to another LLaMA or version of the adapter"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFile:
    """An adapter file. Every tensor of the file is in exactly one of the four parts."""

    name: str  # path, for messages
    queries: Tensor  # `adapter_query.weight`, (adapter layers * num_queries, dim); for chat adapters (0, dim)
    visual: Mapping[str, Tensor]  # names as in the file
    llama: Mapping[str, Tensor]  # names without the prefix `llama.`
    clip: Mapping[str, Tensor]  # names without the prefix `clip.`
    declares: Mapping[str, Any]  # the config in the file; empty if it has none
    is_chat: bool = False  # whether it is a chat adapter of LLaMA-Adapter V2, which has no queries

    @property
    def dim(self) -> int:
        """Width of the LLaMA that the adapter was trained on."""
        return int(self.queries.shape[1])

    @property
    def sees_pictures(self) -> bool:
        """Whether it has a visual part.

        Otherwise it is an adapter for texts: of LLaMA-Adapter V1, or a chat adapter.
        """
        return bool(self.visual)

    @property
    def num_queries(self) -> int:
        """Query tokens per layer; 0 for chat adapters."""
        if self.sees_pictures:
            return int(self.visual["visual_query.weight"].shape[0])
        return 0 if self.is_chat else TEXT_QUERIES

    @property
    def num_adapter_layers(self) -> int:
        """Number of adapter layers, which are the last layers of the model; 0 for chat adapters."""
        return 0 if self.is_chat else int(self.queries.shape[0]) // self.num_queries

    @property
    def has_lora(self) -> bool:
        """Whether the file has low-rank updates."""
        return any(".lora_" in name for name in self.llama)


def open_adapter(path: str | os.PathLike[str], *, for_texts: bool = False) -> AdapterFile:
    """Open an adapter release ({"model", "config"}), a trainer checkpoint, or a plain dictionary of tensors.

    With `for_texts`, adapters without a visual part are accepted too: the queries and gates of LLaMA-Adapter V1, and
    the biases, scales and norms of chat adapters of LLaMA-Adapter V2. Raises CheckpointError if the file is missing,
    damaged or not an accepted adapter, or if it has unknown tensors.
    """
    file = read_tensor_file(Path(path))
    return adapter_of(file.tensors, name=str(Path(path)), declares=file.config, for_texts=for_texts)


def adapter_of(
    tensors: Mapping[str, Tensor], *, name: str, declares: Mapping[str, Any], for_texts: bool = False
) -> AdapterFile:
    """As `open_adapter`, from the tensors and the config of a file. `name` is used in messages."""
    if for_texts and any(map(_CHAT.fullmatch, tensors)):
        return _chat_adapter(tensors, name=name, declares=declares)
    if for_texts and "adapter_query.weight" in tensors and any(map(_GATE.fullmatch, tensors)):
        return _text_adapter(tensors, name=name, declares=declares)
    lacking = [name for name in ("adapter_query.weight", "visual_query.weight") if name not in tensors]
    if lacking:
        kind = what_is(list(tensors))
        problem = "is no LLaMA-Adapter file" + (f": it is {kind}" if kind else "")
        if kind == ADAPTER:
            problem = f"is a LLaMA-Adapter file without {list_keys(lacking)}, so it cannot see pictures"
        raise CheckpointError(
            f"`{name}` {problem}",
            hint="a multimodal adapter has `adapter_query.weight`, `visual_query.weight` and `visual_blocks.*`; "
            "were two files swapped?",
        )
    # CLIP has integer tensors; the vision half checks them.
    check_dense({key: value for key, value in tensors.items() if not key.startswith("clip.")}, what=f"`{name}`")
    adapter = _split(tensors, name=name, declares=declares)
    queries, visual_query = adapter.queries, adapter.visual["visual_query.weight"]
    if queries.ndim != 2 or visual_query.ndim != 2 or not len(queries) or not len(visual_query):
        raise CheckpointError(f"The queries in `{name}` are not matrices", hint=_MEANING)
    if len(queries) % len(visual_query):
        raise CheckpointError(
            f"`{name}` has {len(queries)} adapter queries, not a multiple of its {len(visual_query)} visual queries",
            hint=_MEANING,
        )
    return adapter


def _text_adapter(tensors: Mapping[str, Tensor], *, name: str, declares: Mapping[str, Any]) -> AdapterFile:
    """An adapter of LLaMA-Adapter V1, whose tensors have names as in Meta's LLaMA.

    A checkpoint of its trainer also contains the tensors of the LLaMA.
    """
    queries = tensors["adapter_query.weight"]
    llama = _of_llama({key: value for key, value in tensors.items() if key != "adapter_query.weight"}, name=name)
    check_dense({"adapter_query.weight": queries}, what=f"`{name}`")
    if queries.ndim != 2 or not len(queries) or len(queries) % TEXT_QUERIES:
        raise CheckpointError(
            f"`{name}` has adapter queries {list(queries.shape)}, where {TEXT_QUERIES} for each layer are wanted",
            hint=_MEANING,
        )
    return AdapterFile(name=name, queries=queries, visual={}, llama=llama, clip={}, declares=declares)


def _chat_adapter(tensors: Mapping[str, Tensor], *, name: str, declares: Mapping[str, Any]) -> AdapterFile:
    """A chat adapter of LLaMA-Adapter V2. One file has the whole vectors for any number of devices."""
    if "adapter_query.weight" in tensors:
        raise CheckpointError(
            f"`{name}` has adaption prompts (`adapter_query.weight`) beside the biases and scales of a chat adapter, "
            "which is not supported",
            hint="the released chat adapter, chat_llama65b_bias_scale_norm_tuning_v1.pth, has none",
        )
    llama = _of_llama(tensors, name=name)
    # The inputs of wq are as wide as the model, and so are the outputs of wo.
    vectors = [value for key, value in llama.items() if re.search(r"attention\.(w[qkv]_scale|w[qkvo]_bias)$", key)]
    if not vectors:
        raise CheckpointError(f"`{name}` has biases or scales for no attention layer", hint=_MEANING)
    queries = torch.zeros(0, vectors[0].numel())
    return AdapterFile(name=name, queries=queries, visual={}, llama=llama, clip={}, declares=declares, is_chat=True)


def _of_llama(tensors: Mapping[str, Tensor], *, name: str) -> dict[str, Tensor]:
    """The tensors of a file with names of Meta's LLaMA, gates, biases and scales.

    Raises CheckpointError for tensors with other names.
    """
    check_dense(tensors, what=f"`{name}`")
    known = (_GATE, _BASE, _CHAT)
    unknown = [key for key in tensors if key != "rope.freqs" and not any(one.fullmatch(key) for one in known)]
    if unknown:
        raise CheckpointError(f"`{name}` has unknown tensors: {list_keys(unknown)}", hint=_MEANING)
    return {key: value for key, value in tensors.items() if key != "rope.freqs"}


def _split(tensors: Mapping[str, Tensor], *, name: str, declares: Mapping[str, Any]) -> AdapterFile:
    visual, llama, clip = {}, {}, {}
    unknown, twice = [], []
    for key, tensor in tensors.items():
        owner, _, rest = key.partition(".")
        if owner in ("llama", "llma"):  # older trainers wrote llma
            if rest in llama:
                twice.append(key)
            llama[rest] = tensor
        elif owner == "clip":
            clip[rest] = tensor
        elif key.startswith(_VISUAL):
            visual[key] = tensor
        elif key != "adapter_query.weight":
            unknown.append(key)
    if unknown or twice:
        problem = f"unknown tensors: {list_keys(unknown)}" if unknown else f"duplicate tensors: {list_keys(twice)}"
        raise CheckpointError(f"`{name}` has {problem}", hint=_MEANING)
    llama.pop("rope.freqs", None)  # the rotary table is computed from rope_theta
    queries = tensors["adapter_query.weight"]
    return AdapterFile(name=name, queries=queries, visual=visual, llama=llama, clip=clip, declares=declares)


def check_fits(adapter: AdapterFile, config: DecoderConfig, *, llama: str) -> None:
    """Raise CheckpointError unless the LLaMA part of the adapter is complete and fits the LLaMA of this name.

    Gates are required; in chat adapters, biases and scales are. Biases, norms, LoRA, new gates and base matrices are
    optional, but each kind must be complete.
    """
    num_layers = config.num_layers
    made_for = count_blocks(adapter.llama, "layers.", what=f"The adapter `{adapter.name}`")
    if adapter.dim != config.dim or made_for != num_layers or adapter.num_adapter_layers > num_layers:
        raise CheckpointError(
            f"The adapter `{adapter.name}` needs a LLaMA of width {adapter.dim} and "
            f"{max(made_for, adapter.num_adapter_layers)} layers, and `{llama}` has width {config.dim} and "
            f"{num_layers} layers",
            hint=f"use the LLaMA that the adapter was trained on; {WIDTHS}",
        )
    wanted = _wanted(adapter, config)
    base = llama_shapes(config)
    if any(name in adapter.llama for name in base if "norm" not in name and name != HEAD):
        wanted |= base
    elif HEAD in adapter.llama:  # the adapter was trained together with the output head
        wanted[HEAD] = base[HEAD]
    what = f"The LLaMA part of the adapter `{adapter.name}`"
    # Gates of layers without adapter have no effect and are optional.
    idle = [f"layers.{layer}.attention.gate" for layer in range(num_layers - adapter.num_adapter_layers)]
    names = [name for name in wanted if name not in idle or name in adapter.llama]
    check_names(list(adapter.llama), names, what=what, meaning=_MEANING)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.llama.items()}
    check_shapes(shapes, {name: wanted[name] for name in names}, what=what, meaning=_MEANING)


def _wanted(adapter: AdapterFile, config: DecoderConfig) -> dict[str, Shape]:
    """Names and shapes of all kinds of tensors that the file contains or declares."""
    found = adapter.llama
    has_lora = adapter.has_lora or adapter.declares.get("w_lora") is True
    has_biases = adapter.declares.get("w_bias") is True or any(name.endswith(".bias") for name in found)
    has_new_gates = has_lora and any(name.endswith(".new_gate") for name in found)
    has_layer_norms = any("_norm." in name for name in found)
    # The trainer of chat adapters does not train the last norm.
    has_norm = "norm.weight" in found or (has_layer_norms and not adapter.is_chat)
    has_layer_norms = has_layer_norms or (has_norm and not adapter.is_chat)
    # Read from a tensor: the public extraction script always writes 16 into the config.
    factors = (tensor for name, tensor in found.items() if re.search(r"\.lora_\w+_l1\.weight$", name))
    rank = next((int(tensor.shape[0]) for tensor in factors if tensor.ndim), 0)
    wanted: dict[str, Shape] = {}
    matrices, norms = matrix_shapes(config), norm_shapes(config)
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        gate = f"{prefix}attention.gate"
        # The first release of LLaMA-Adapter V1 has one gate for all heads.
        is_single = not adapter.sees_pictures and gate in found and found[gate].numel() == 1
        wanted[gate] = tuple(found[gate].shape) if is_single else (1, config.num_heads, 1, 1)
        if has_new_gates:
            wanted[f"{prefix}attention.new_gate"] = (1, 1, 1, 1)
        if has_biases:
            wanted |= {f"{prefix}{name}.bias": matrices[name][:1] for name in BIASED}
        for name, (rows, columns) in matrices.items() if adapter.is_chat else ():
            wanted |= {f"{prefix}{name}_bias": (rows,), f"{prefix}{name}_scale": (columns,)}
        if has_layer_norms:
            wanted |= {f"{prefix}{name}.weight": shape for name, shape in norms.items()}
        if has_lora:
            for name, (rows, columns) in matrices.items():
                l1, l2 = lora_names(prefix + name)
                wanted |= {l1: (rank, columns), l2: (rows, rank)}
    if has_norm:
        wanted["norm.weight"] = (config.dim,)
    return wanted


def lora_names(matrix: str) -> tuple[str, str]:
    """Names of the two low-rank factors of a matrix such as `layers.N.attention.wq`."""
    head, _, name = matrix.rpartition(".")
    return f"{head}.lora_{name}_l1.weight", f"{head}.lora_{name}_l2.weight"
