"""Sidecars are read as they were written. Damaged ones, and OM files that the runtime refuses, are errors."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs import sidecar as module
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.sidecar import OmSidecar, check_om_file, read_sidecar, sidecar_path, write_sidecar
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig

SIDECAR = OmSidecar(
    card=EncoderCard(
        name="tiny",
        vision=VisionConfig(
            clip=ClipConfig(image_size=4, patch_size=2, width=4, num_layers=1, num_heads=1, output_dim=4),
            query=QueryConfig(num_queries=2, width=4, depth=1, num_heads=1, mlp_dim=4, output_dim=3),
            channel_order="bgr",
        ),
        dtype="float16",
        opset=18,
        fingerprint={"clip": "00", "query": "11"},
    ).to_graph(),
    input=Port(dtype="float16", shape=(-1, 4, 4, 3)),
    batch_sizes=(1, 4),
    has_gears=True,
    soc_version="Ascend310P3",
    precision_mode="mixed_float16",
    sha256="aa",
    onnx_sha256="bb",
)


# Words from Python's own errors, which must not appear in our messages.
PYTHON = re.compile(r"NoneType|__init__|object has|argument|subscript|'(dict|list|int|str)'|codec|recursion|digit")


@pytest.fixture
def om(tmp_path: Path) -> Path:
    path = tmp_path / "clip.om"
    path.write_bytes(b"om")
    path.chmod(0o640)
    return path


def test_a_sidecar_is_read_as_it_was_written(om: Path) -> None:
    assert read_sidecar(om) is None

    for sidecar in (dataclasses.replace(SIDECAR, card=None), SIDECAR):
        assert write_sidecar(om, sidecar.to_json()) == sidecar_path(om) == om.with_name("clip.om.json")
        assert read_sidecar(om) == sidecar
    assert sorted(file.name for file in om.parent.iterdir()) == ["clip.om", "clip.om.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"batch_sizes": []},
        {"batch_sizes": [4, 1]},
        {"batch_sizes": [0]},
        {"has_gears": False},
        {"card": {}},
        {"input": {"dtype": "float16", "shape": [-1, 4, 4, 3]}},
        {"input": {"dtype": "float16", "shape": [-1, 4, 4, 3], "layout": "NCHW"}},
        {"unknown": "value"},
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b"{}",
        b"9" * 5000,
    ],
)
def test_a_damaged_sidecar_is_an_error_with_its_name(om: Path, change: dict[str, Any] | bytes) -> None:
    content = change if isinstance(change, bytes) else json.dumps(json.loads(SIDECAR.to_json()) | change).encode()
    sidecar_path(om).write_bytes(content)

    with pytest.raises(GraphError, match=r"clip\.om\.json") as caught:
        read_sidecar(om)

    assert not PYTHON.search(caught.value.message)


@pytest.mark.parametrize(
    ("shape", "layout"), [((1, 4, 4, 3), "NHWC"), ((-1, 3, 4, 4), "NCHW"), ((1, 4, 4, 4), "ND"), ((1, 48), "ND")]
)
def test_the_layout_is_in_the_file_by_name(om: Path, shape: tuple[int, ...], layout: str) -> None:
    write_sidecar(om, dataclasses.replace(SIDECAR, input=Port(dtype="float32", shape=shape)).to_json())

    written = json.loads(sidecar_path(om).read_text())["input"]

    assert written == {"dtype": "float32", "layout": layout, "shape": list(shape)}


def test_every_field_of_another_type_is_refused(om: Path) -> None:
    told = 0
    for path in places(json.loads(SIDECAR.to_json())):
        for odd in (None, 3.5, "odd", [1], {"odd": 1}, True, 10**4000):
            values = json.loads(SIDECAR.to_json())
            holder = values
            for step in path[:-1]:
                holder = holder[step]
            if type(holder[path[-1]]) is type(odd) or (path == ("card",) and odd is None):
                continue
            holder[path[-1]] = odd
            sidecar_path(om).write_text(json.dumps(values))
            with pytest.raises(GraphError) as caught:
                read_with_card(om)
            assert not PYTHON.search(caught.value.message), caught.value.message
            told += 1
    assert told > 100


def read_with_card(om: Path) -> None:
    sidecar = read_sidecar(om)
    assert sidecar is not None
    assert sidecar.card is not None
    EncoderCard.from_graph(sidecar.card, file=str(om))


def places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a JSON document."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.om", "does not exist"),
        ("link.om", "symbolic link"),
        ("folder.om", "no regular file"),
        *((name, "has characters that InferSession refuses") for name in ("my clip.om", "clip+.om", "clip\u00e9.om")),
        *((name, r"does not end in \.om") for name in ("clip.om.bak", "clip", "clip.OM")),
        *((name, "too long") for name in ("x" * 300 + ".om", "x/" * 32 + "x.om")),
        ("clip.onnx", "is an ONNX file, where an OM is wanted"),
    ],
)
def test_a_file_that_the_runtime_refuses_is_an_error(om: Path, name: str, said: str) -> None:
    om.with_name("link.om").symlink_to(om)
    om.with_name("folder.om").mkdir()

    with pytest.raises(GraphError, match=said) as caught:
        check_om_file(om.parent / name)

    assert name != "link.om" or str(om.resolve()) in caught.value.hint


@pytest.mark.parametrize(
    ("mode", "said"),
    [*((mode, "can be written by others") for mode in (0o660, 0o602, 0o777)), (0o040, "lacks the right to be read")],
)
def test_a_file_with_other_rights_is_refused(om: Path, mode: int, said: str) -> None:
    om.chmod(mode)

    with pytest.raises(GraphError, match=said) as caught:
        check_om_file(om)

    assert "chmod 640" in caught.value.hint


def test_an_empty_and_a_huge_file_are_refused(om: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OM_BYTES", 1)
    with pytest.raises(GraphError, match="2 bytes"):
        check_om_file(om)

    om.write_bytes(b"")
    with pytest.raises(GraphError, match="is empty"):
        check_om_file(om)


def test_a_file_of_another_user_and_group_is_refused(om: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: om.stat().st_uid + 1)
    monkeypatch.setattr(os, "getegid", lambda: om.stat().st_gid + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [])
    with pytest.raises(GraphError, match="belongs to another user"):
        check_om_file(om)

    monkeypatch.setattr(os, "getgroups", lambda: [om.stat().st_gid])
    check_om_file(om)
