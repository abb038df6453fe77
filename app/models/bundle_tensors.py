"""The tensors in the files of a bundle, checked against its manifest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from llama_adapter.app.models.bundle_manifest import (
    DAMAGED,
    LLM,
    VISION,
    decoder_file,
    num_ranks_of,
    packed_layout,
    stored_precision,
)
from llama_adapter.app.models.packed_weights import Stored, TakePacked
from llama_adapter.app.models.sketch import HalfConfig, expected_forms, num_layers
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.devices import DTYPES
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes.files import check_tensors
from llama_adapter.runtime.tensor_files.files import read_metadata, read_safetensors
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.config import VisionConfig


def stored_tensors(manifest: Mapping[str, Any], *, take_packed: TakePacked | None = None) -> Stored:
    """How the tensors in a bundle's files are stored; `take_packed` is that of `stream_bundle`."""
    return Stored(
        layout=packed_layout(manifest),
        precision=stored_precision(manifest),
        dtype=DTYPES[manifest["dtype"]],
        take_packed=take_packed,
    )


def read_half(path: Path, config: HalfConfig, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of encoder or decoder, mapped from its file.

    Raises CheckpointError unless names, shapes and types match the configuration. A configuration with more layers than
    the file has tensors is refused before its module is built.
    """
    state = read_safetensors(path)
    if num_layers(config) > len(state):
        raise CheckpointError(
            f"`{path}` has {len(state)} tensors, and its configuration speaks of {num_layers(config):,} layers",
            hint=DAMAGED,
        )
    forms = expected_forms(
        config,
        dtype=DTYPES[manifest["dtype"]],
        precision=stored_precision(manifest),
        packed=packed_layout(manifest),
    )
    check_tensors(state, forms=forms, path=path, hint=DAMAGED)
    return state


def read_vision(place: Path, config: VisionConfig, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """The encoder's tensors, as `read_half`. A bundle for texts has none, and an empty `vision` in its manifest."""
    return read_half(place / VISION, config, manifest) if manifest["vision"] else {}


def read_decoder(
    place: Path, decoder: DecoderConfig, manifest: Mapping[str, Any], *, rank: int = 0
) -> dict[str, Tensor]:
    """As `read_half`, for the decoder, or for a rank's part of a split decoder.

    Raises CheckpointError also for the part of another rank, which may have the same shapes.
    """
    count = num_ranks_of(manifest)
    if count == 1:
        return read_half(place / LLM, decoder, manifest)
    path = place / decoder_file(rank, count)
    state, said = read_half(path, decoder.share(rank, count), manifest), read_metadata(path)
    if said.get("rank") != str(rank) or said.get("num_ranks") != str(count):
        told = f"rank {said['rank']} of {said.get('num_ranks')}" if "rank" in said else "no rank"
        raise CheckpointError(
            f"`{path}` holds the part of {shown_excerpt(told)}, where rank {rank} of {count} is wanted",
            hint="files were mixed up: copy the folder again, and keep the files' names",
        )
    return state
