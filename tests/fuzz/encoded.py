"""Prefix files, and past keys and values: rows and tokens are read as they were written, or refused with a sentence."""

import dataclasses
import io
from typing import Final

import numpy as np

from llama_adapter.app.pictures.prefixes import file as prefix_files
from llama_adapter.app.pictures.prefixes.file import PrefixFileError, PrefixRow, read_prefix_file
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.weights.past import read_past, write_pre_caches
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.vision.errors import PictureError
from tests.app.pictures.prefixes.test_file import ENCODING
from tests.app.pictures.prefixes.test_file import written as write_pictures
from tests.fuzz.mutators import (
    either,
    flipped,
    mutated_bytes,
    mutated_json,
    mutated_metadata,
    mutated_safetensors,
    words,
)
from tests.fuzz.target import Target, refused, scratch, written
from tests.llm import toys

_CONFIG: DecoderConfig = toys.CONFIG
_SHAPE = _CONFIG.num_layers, _CONFIG.num_heads, 3, _CONFIG.head_dim


def prefix_file(data: bytes) -> str:
    """A file of encoded pictures. Each of its rows is a picture of finite numbers, or an error of that picture."""
    path = written("prefixes.safetensors", data)
    prefix_files._read_head.cache_clear()  # files of one size that are written at once have the same time
    try:
        found = read_prefix_file(path)
    except PrefixFileError as error:
        return refused(error)
    outcomes = set()
    for number, entry in enumerate(found.entries):
        try:
            picture = PrefixRow(str(path), number, entry.digest).read(found)
        except PictureError as error:
            outcomes.add(refused(error))
        else:
            assert all(np.isfinite(tensor).all() for tensor in picture.tensors.values())
            assert {name: tensor.shape for name, tensor in picture.tensors.items()} == found.rows
    return f"ok {found.encoding.dtype} {' '.join(sorted(outcomes))}"


def past(data: bytes) -> str:
    """A `.npy` file of past keys and values. It has finite numbers, and leaves room for a prompt."""
    try:
        found = read_past(written("past.npy", data), _CONFIG)
    except CheckpointError as error:
        return refused(error)
    assert 0 < len(found) < _CONFIG.context
    assert all(np.isfinite(part).all() and part.dtype == np.float32 for part in found.parts)
    return f"ok {len(found)}"


def _prefixes() -> dict[str, bytes]:
    """One file of visual queries, and one that has keys and values too."""
    path, found = scratch() / "written.safetensors", {}
    for encoding in (ENCODING, dataclasses.replace(ENCODING, dtype="bfloat16", keeps="keys_values")):
        write_pictures(path, encoding)
        found[encoding.keeps] = path.read_bytes()
    return found


def _pasts() -> dict[str, bytes]:
    ones = np.ones(_SHAPE, np.float32)
    write_pre_caches(file := io.BytesIO(), PastKeyValues(ones, ones), _CONFIG)
    return {"whole": file.getvalue()}


# The encoding and the list of pictures.
_METADATA: Final = mutated_metadata(
    *words("name digest dtype precision exif reading keeps encoder vision fingerprint clip query version"),
    *words("float16 bfloat16 int8 upright ignore exact fast keys_values queries ../x"),
    *("1" * 64, [], {}, ["1" * 64, "a.png", 0], 2, -1, 2**63),
)
_HEADER: Final = mutated_safetensors(
    mutated_json(*words("F16 F32 BF16 dtype shape data_offsets queries keys values"), [0], [2, 3, 8], [0, 192], 2**63)
)
_NPY: Final = mutated_bytes(
    b"<f8", b"<f2", b">f4", b"|O", b"True", b"(3, 2, 4, 3, 8)", b"99999999999", b"(", b",", b"'V9'"
)
TARGETS = (
    Target("prefix-file", prefix_file, _prefixes, either(_METADATA, _HEADER, flipped)),
    Target("past", past, _pasts, either(_NPY, flipped)),
)
