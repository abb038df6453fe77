"""Prefix files return the numbers and names that were written, and damage is detected."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.pictures.prefixes.file import (
    Encoding,
    PrefixFileError,
    PrefixRow,
    StoredPicture,
    check_keys_values,
    read_first_file,
    read_prefix_file,
    write_prefixes,
)
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig
from llama_adapter.vision.errors import PictureError

Q, D = 3, 8
ENCODING = Encoding(
    name="tiny",
    digest="ab" * 32,
    vision=VisionConfig(
        clip=ClipConfig(image_size=28, patch_size=14, width=8, num_layers=1, num_heads=1, output_dim=8),
        query=QueryConfig(num_queries=Q, width=8, depth=1, num_heads=1, mlp_dim=8, output_dim=D),
    ),
    fingerprint={"clip": "0 1", "query": "0 1"},
    dtype="float32",
    precision="float",
    exif="upright",
    reading="exact",
    transparency="white",
    encoder=None,
)
DIGESTS = ("1" * 64, "2" * 64)
NAMES = ("a.jpg", "\udcff \u00e9\n.png")  # including bytes that are not UTF-8


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Random numbers that `dtype` represents exactly."""
    whole = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    if dtype == "bfloat16":
        return (whole.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return whole.astype(dtype).astype(np.float32)


def written(path: Path, encoding: Encoding = ENCODING) -> list[StoredPicture]:
    """Write two pictures, with keys and values of 4 layers and 2 heads if the encoding has them."""
    queries = numbers(2, Q, D, dtype=encoding.dtype)
    keys, values = numbers(2, 2, 4, 2, Q, D // 2, dtype=encoding.dtype)
    rows = zip(queries, keys, values, strict=True)
    pictures = [StoredPicture(*(row[:1] if encoding.keeps == "queries" else row)) for row in rows]
    write_prefixes(path, encoding, list(zip(DIGESTS, NAMES, pictures, strict=True)))
    return pictures


@pytest.mark.parametrize("keeps", ["queries", "keys_values"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_read_back_exactly(dtype: str, keeps: Any, tmp_path: Path) -> None:
    encoding = replace(ENCODING, dtype=dtype, keeps=keeps)
    pictures = written(tmp_path / "x.safetensors", encoding)
    file = read_prefix_file(tmp_path / "x.safetensors")

    assert file.encoding == encoding
    assert [(entry.digest, entry.name) for entry in file.entries] == list(zip(DIGESTS, NAMES, strict=True))
    for row, (digest, picture) in enumerate(zip(DIGESTS, pictures, strict=True)):
        read = PrefixRow(str(tmp_path / "x.safetensors"), row, digest).read(file)
        assert read.tensors.keys() == picture.tensors.keys()
        for name, tensor in picture.tensors.items():
            np.testing.assert_array_equal(read.tensors[name], tensor)


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    pictures = written(tmp_path / "x.safetensors")

    tensors = load_file(tmp_path / "x.safetensors")

    np.testing.assert_array_equal(tensors["queries"], np.stack([one.query_QD for one in pictures]))


def changed_head(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + length])
    change(head)
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def encoding_with(**values: Any) -> Callable[[dict[str, Any]], object]:
    def change(head: dict[str, Any]) -> None:
        metadata = head["__metadata__"]
        metadata["llama_adapter_prefixes"] = json.dumps(json.loads(metadata["llama_adapter_prefixes"]) | values)

    return change


HEADS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no metadata": lambda head: head.pop("__metadata__"),
    "another version": encoding_with(version=2),
    "another dtype in the head": encoding_with(dtype="float16"),
    "unknown dtype": encoding_with(dtype="int4"),
    "unknown setting": encoding_with(exif="sideways"),
    "unknown field": encoding_with(more=1),
    "kept keys are missing": encoding_with(keeps="keys_values"),
    "another dtype": lambda head: head["queries"].update(dtype="F16"),
    "another number of pictures": lambda head: head["queries"].update(shape=[3, Q, D]),
    "another width": lambda head: head["queries"].update(shape=[2, Q, D // 2], data_offsets=[0, 2 * Q * D // 2 * 4]),
    "no shape": lambda head: head["queries"].update(shape=[]),
    "other place": lambda head: head["queries"].update(data_offsets=[4, 4 + 2 * Q * D * 4]),
    "another tensor": lambda head: head.update(other=head["queries"]),
    "one picture listed": lambda head: head["__metadata__"].update(pictures=json.dumps([[DIGESTS[0], "a", 1]])),
    "no list of pictures": lambda head: head["__metadata__"].update(pictures="[}"),
    "a digest that is none": lambda head: head["__metadata__"].update(pictures=json.dumps([["../x", "a", 1]] * 2)),
}
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in its head": lambda data: data[:100],
    "cut in its numbers": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "a head of any size": lambda data: b"\xff" * 8 + data[8:],
    "a picture": lambda data: b"\xff\xd8\xff\xe0" + b"\0" * 500,
}


def test_damage_is_told(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    told = {}
    for name in (*HEADS, *BYTES):
        written(path := tmp_path / "x.safetensors")
        if name in HEADS:
            changed_head(path, HEADS[name])
        else:
            path.write_bytes(BYTES[name](path.read_bytes()))
        with pytest.raises(PrefixFileError) as caught:
            read_prefix_file(path)
        assert caught.value.hint.endswith("`llama-adapter encode --overwrite`")
        told[name] = caught.value.message.replace(str(tmp_path), "")

    assert told == snapshot


def test_a_row_that_is_not_the_pictures_is_an_error_of_that_picture(tmp_path: Path) -> None:
    written(path := tmp_path / "x.safetensors")
    first = read_prefix_file(path)

    def code(row: int, digest: str, wanted: Encoding = ENCODING, *, at: Path = path) -> str:
        with pytest.raises(PictureError) as caught:
            PrefixRow(str(at), row, digest).read(replace(first, encoding=wanted))
        return caught.value.code

    assert code(0, DIGESTS[1]) == code(2, DIGESTS[0]) == code(2**70, DIGESTS[0]) == "truncated"
    assert code(0, DIGESTS[0], replace(ENCODING, digest="cd" * 32)) == "unsupported"
    assert code(0, DIGESTS[0], replace(ENCODING, dtype="float16")) == "unsupported"
    assert code(0, DIGESTS[0], at=tmp_path / "none.safetensors") == "missing"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # a byte of the last row
    path.write_bytes(data)
    assert code(1, DIGESTS[1]) == "truncated"
    assert PrefixRow(str(path), 0, DIGESTS[0]).read(first).query_QD.shape == (Q, D)


def test_keys_and_values_fit_the_model_and_all_files_are_alike(tmp_path: Path) -> None:
    encoding = replace(ENCODING, keeps="keys_values")
    first, second = tmp_path / "prefixes-00000.safetensors", tmp_path / "prefixes-00001.safetensors"
    [picture, _] = written(first, encoding)
    decoder = DecoderConfig(
        vocab_size=8, dim=D, num_layers=4, num_heads=2, ffn_dim=8, norm_eps=1e-5, num_adapter_layers=4, num_queries=Q
    )
    check_keys_values(str(tmp_path), decoder)

    for other in (replace(decoder, num_adapter_layers=3), replace(decoder, head_dim=0, num_kv_heads=0, num_heads=1)):
        with pytest.raises(
            PrefixFileError, match=r"prefixes-00000.safetensors` holds keys and values of 4 layers, 2 h"
        ):
            check_keys_values(str(tmp_path), other)
    for part in (tuple(one[:3] for one in picture.keys_values), tuple(one.reshape(4, 1, Q, D) for one in picture[1:])):
        write_prefixes(second, encoding, [(DIGESTS[0], "a", StoredPicture(picture.query_QD, *part))])
        with pytest.raises(PictureError, match="and keys and values of 4 layers, 2 heads") as caught:
            PrefixRow(str(second), 0, DIGESTS[0]).read(read_first_file(str(tmp_path)))
        assert caught.value.code == "unsupported"


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_numbers_that_are_not_finite_are_an_error_of_their_picture(number: float, tmp_path: Path) -> None:
    pictures = [StoredPicture(np.full((Q, D), value, np.float32)) for value in (number, 1.0)]
    write_prefixes(path := tmp_path / "x.safetensors", ENCODING, list(zip(DIGESTS, NAMES, pictures, strict=True)))
    first = read_prefix_file(path)

    with pytest.raises(PictureError, match=r"Row 0 of `.*` has numbers that are not finite"):
        PrefixRow(str(path), 0, DIGESTS[0]).read(first)
    assert PrefixRow(str(path), 1, DIGESTS[1]).read(first).query_QD[0, 0] == 1.0
