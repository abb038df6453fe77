"""The card of an exported decoder is read as it was written, or refused with a sentence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.llm.exported.card import CARD_FILE, read_card
from llama_adapter.runtime.errors import GraphError
from tests.llm import exported, toys

CARD = dataclasses.replace(
    exported.CARD,
    decoder=toys.CONFIG.to_dict(),
    fingerprint={"clip": "0 1"},
    files={"decoder.onnx": "0"},
    gears=({"rows": 1},),
    picture_format=exported.PICTURES,
    vision={"clip": {"image_size": 8}},
)


def test_a_card_is_read_as_it_was_written(tmp_path: Path) -> None:
    CARD.write(tmp_path)
    assert read_card(tmp_path) == CARD


@pytest.mark.parametrize("without", [("picture_format", "vision"), ("vision",)])
def test_a_card_of_an_early_export_is_read(without: tuple[str, ...], tmp_path: Path) -> None:
    card = dataclasses.replace(CARD, **dict.fromkeys(without))
    card.write(tmp_path)
    assert not {*without} & json.loads((tmp_path / CARD_FILE).read_text()).keys()
    assert read_card(tmp_path) == card


@pytest.mark.parametrize(
    "content",
    [
        {"files": {"decoder.onnx": 1}},
        {"files": {"decoder.onnx": None}},
        {"fingerprint": {"clip": [1]}},
        {"gears": (1,)},
        {"gears": ({"rows": "x"},)},
        {"gears": (None,)},
        {"dtype": "int4"},
        {"decoder": {}},
        {"decoder": {**CARD.decoder, "dim": "x"}},
        {"settings": 7},
        {"template": "other"},
        {"picture_format": {"token": "<image>"}},
        {"vision": [1]},
        {"picture_format": {**dataclasses.asdict(exported.PICTURES), "token_id": "7"}},
        *(b"", b"[" * 100_000, b"\xff\0", b"null", b'{"version": ' + b"9" * 5000 + b"}"),
    ],
    ids=lambda content: repr(content)[:40],
)
def test_a_card_with_a_value_of_another_kind_is_refused(content: dict[str, Any] | bytes, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / CARD_FILE).write_bytes(content)
    else:
        dataclasses.replace(CARD, **content).write(tmp_path)
    with pytest.raises(GraphError, match=r"decoder\.json` cannot be read"):
        read_card(tmp_path)
