"""Opens LLaMA folders in Meta's format: `params.json` with one or several `consolidated.NN.pth`."""

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_adapter.llm.rotary import Rotary
from llama_adapter.llm.split import META_CUTS
from llama_adapter.llm.weights.names import (
    WIDTHS,
    LlamaSource,
    SplitTensor,
    check_layers,
    checked_config,
    checked_source,
)
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.tensor_files.files import (
    check_dense,
    check_names,
    read_tensor_file,
    require_numbers,
    what_is,
)
from llama_adapter.runtime.text import counted, shown_excerpt

# The axis along which the tensors of several shards are joined. Other tensors have a copy in each shard.
_AXES = {name: cut.axis for name, cut in META_CUTS.items()}
_EMBEDDING = "tok_embeddings.weight"
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads")
_FACTORS = ("norm_eps", "rope_theta")
# Entries without effect here: sizes that are read from the tensors, and limits of Meta's own program.
_HARMLESS = ("multiple_of", "ffn_dim_multiplier", "vocab_size", "max_batch_size", "max_seq_len")
# The scaled rotary embedding of Llama 3.1 and later. Meta's program has the factor 8 for all sizes; 1B and 3B, which
# alone are narrower than 8B, were trained with 32, as their Hugging Face folders say.
_SCALED = Rotary(scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
_WIDTH_OF_8B = 4096
_MEANING = "the folder is incomplete, or its files come from different models; compare it with the original"


def open_meta(folder: str | os.PathLike[str]) -> LlamaSource:
    """Open a folder with `params.json` and `consolidated.NN.pth`, memory-mapped; shards are joined when read.

    Raises CheckpointError for a missing or damaged file, a missing or doubled shard, unknown, missing or misshapen
    tensors, and models that are computed differently.
    """
    place = Path(folder)
    params = _read_params(place / "params.json")
    files = _shard_files(place)
    shards = [_read_shard(path) for path in files]
    for path, shard in zip(files[1:], shards[1:], strict=True):
        check_names(list(shard), list(shards[0]), what=f"`{path}`, beside `{files[0].name}`,", meaning=_MEANING)
    dim, num_layers = params["dim"], params["n_layers"]
    check_layers(shards[0], num_layers, prefix="layers.", config=place / "params.json")
    _check_shard_count(shards, dim=dim, place=place)
    kv_heads = params["n_kv_heads"]
    kv_rows = dim // params["n_heads"] * kv_heads
    tensors = {
        name: _join(name, [shard[name] for shard in shards], dim=dim, kv_rows=kv_rows, place=place)
        for name in shards[0]
    }
    factor = _SCALED.factor if dim >= _WIDTH_OF_8B else 32.0
    scaled = dataclasses.replace(_SCALED, theta=float(params["rope_theta"]), factor=factor)
    settings = {
        "vocab_size": _size(tensors, "output.weight", place),
        "dim": dim,
        "num_layers": num_layers,
        "ffn_dim": _size(tensors, "layers.0.feed_forward.w1.weight", place),
        "num_heads": params["n_heads"],
        "num_kv_heads": kv_heads,
        **{name: float(params[name]) for name in _FACTORS},
        "rotaries": (scaled,) if params.get("use_scaled_rope") else (),
    }
    config = checked_config(place, settings)
    source = checked_source(
        place, files, tensors, config=config, stated_in="params.json", meaning=_MEANING, half_split=False
    )
    _check_no_copies(files, [shard["layers.0.attention.wq.weight"] for shard in shards])
    return source


def _read_params(path: Path) -> dict[str, Any]:
    params = {"rope_theta": 10000.0, **{name: value for name, value in read_json(path).items() if value is not None}}
    params.setdefault("n_kv_heads", params.get("n_heads", 1))
    hint = "use the params.json of these weights"
    require_numbers(params, path=path, whole=_SIZES, real=_FACTORS, hint=hint)
    known = {*_SIZES, *_FACTORS, *_HARMLESS, "use_scaled_rope"}
    foreign = [name for name, value in params.items() if name not in known and value is not False]
    if foreign:
        raise CheckpointError(
            f"`{path}` has entries that may change how the model computes and are not supported: {list_keys(foreign)}",
            hint="LLaMA's own params.json has dim, multiple_of, n_heads, n_layers, norm_eps and vocab_size",
        )
    return params


def _shard_files(place: Path) -> list[Path]:
    numbered = {
        int(match[1]): path
        for path in sorted(place.glob("consolidated.*.pth"))
        if (match := re.fullmatch(r"consolidated\.(\d+)\.pth", path.name))
    }
    if not numbered:
        raise CheckpointError(
            f"`{place}` has a params.json but no `consolidated.00.pth`",
            hint="the weights themselves are missing",
        )
    absent = [f"consolidated.{number:02d}.pth" for number in range(len(numbered)) if number not in numbered]
    if absent:
        raise CheckpointError(
            f"`{place}` lacks {list_keys(absent)}, though it has `{numbered[max(numbered)].name}`",
            hint="copy the missing shard",
        )
    return [numbered[number] for number in sorted(numbered)]


def _read_shard(path: Path) -> dict[str, Tensor]:
    tensors = read_tensor_file(path).tensors
    if "tok_embeddings.weight" not in tensors:
        kind = what_is(list(tensors))
        raise CheckpointError(
            f"`{path}` is not a LLaMA in Meta's format" + (f": it is {kind}" if kind else ""),
            hint="it should hold `tok_embeddings.weight` and `layers.N.attention.wq.weight`; were two files swapped?",
        )
    tensors.pop("rope.freqs", None)  # the rotary table is computed from rope_theta
    check_dense(tensors, what=f"`{path}`")
    return tensors


def _check_shard_count(shards: list[dict[str, Tensor]], *, dim: int, place: Path) -> None:
    """Raise CheckpointError if the last shard is missing, or for another model's shards.

    A missing last shard leaves no gap in the names.
    """
    norm = shards[0].get("norm.weight")
    if norm is not None and tuple(norm.shape) != (dim,):
        raise CheckpointError(
            f"The params.json of `{place}` says width {dim}, its weights have width {norm.numel()}",
            hint=f"params.json and weights come from LLaMAs of different sizes; {WIDTHS}",
        )
    query = shards[0].get("layers.0.attention.wq.weight")
    if query is None or query.ndim != 2 or not 0 < query.shape[0] <= dim or dim % query.shape[0]:
        return  # reported by name or shape later
    wanted = dim // query.shape[0]
    if wanted != len(shards):
        raise CheckpointError(
            f"`{place}` has {counted(len(shards), 'shard')} instead of {wanted}: each holds {query.shape[0]} of "
            f"{dim} rows",
            hint=f"copy those that are missing, up to `consolidated.{wanted - 1:02d}.pth`, or remove another model's",
        )


def _check_no_copies(files: list[Path], parts: list[Tensor]) -> None:
    """Refuse two copies of one shard, whose names and shapes are all correct. Comparing one matrix is enough."""
    for (one, part), (other, its) in itertools.combinations(zip(files, parts, strict=True), 2):
        if torch.equal(part, its):
            raise CheckpointError(
                f"`{other}` holds the same part of the model as `{one.name}`",
                hint="one was copied over the other; download both again",
            )


def _join(name: str, parts: list[Tensor], *, dim: int, kv_rows: int, place: Path) -> SplitTensor:
    match = re.fullmatch(r"(?:layers\.\d+\.)?(.+)\.weight", name)
    axis = _AXES.get(match[1]) if match else None
    if axis is not None and all(part.ndim == 2 for part in parts):
        if name == _EMBEDDING and parts[0].shape[1] < dim:
            axis = 1  # Llama 3 has the tokens of the embedding divided, earlier models its columns
        if name.endswith((".wk.weight", ".wv.weight")) and kv_rows and len(parts[0]) * len(parts) > kv_rows:
            parts = _without_copies(parts, num_copies=len(parts[0]) * len(parts) // kv_rows)
        if len({part.shape[1 - axis] for part in parts}) == 1:
            return SplitTensor(tuple(parts), axis)
    elif all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts[1:]):
        return SplitTensor((parts[0],))
    raise CheckpointError(f"The shards in `{place}` disagree about `{shown_excerpt(name)}`", hint=_MEANING)


def _without_copies(parts: list[Tensor], *, num_copies: int) -> list[Tensor]:
    """The different heads of keys or values, where more shards than heads hold copies of their neighbours' heads.

    An empty list if they do not.
    """
    firsts = parts[::num_copies]
    are_copies = all(torch.equal(part, firsts[index // num_copies]) for index, part in enumerate(parts))
    return firsts if are_copies else []


def _size(tensors: Mapping[str, SplitTensor], name: str, place: Path) -> int:
    if name not in tensors or len(tensors[name].shape) != 2:
        raise CheckpointError(f"LLaMA in `{place}` lacks the matrix `{name}`", hint=_MEANING)
    return tensors[name].shape[0]
