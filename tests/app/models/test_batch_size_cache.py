"""What memory allowed is remembered for the very same circumstances, for a month, and never in anybody's way."""

import dataclasses
import datetime
import json
from pathlib import Path

import pytest

from llama_adapter.app.models.batch_size_cache import FILE_NAME, Setting

SETTING = Setting(
    model="0f1e",
    device="cuda:0 (H100)",
    dtype="bfloat16",
    precision="float",
    context=512,
    mode="eager",
    device_bytes=1 << 36,
)
DAY = datetime.date(2026, 11, 21)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the user's cache folder."""
    monkeypatch.setattr("llama_adapter.app.models.batch_size_cache.cache_folder", lambda: tmp_path)
    return tmp_path


def test_a_ceiling_is_remembered_and_the_newest_one_counts(folder: Path) -> None:
    assert SETTING.ceiling() == (None, "")
    assert SETTING.remember(16) == ""
    assert SETTING.remember(8) == ""
    assert SETTING.ceiling() == (8, "")
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"device": "cuda:1 (H100)"},
        {"dtype": "float16"},
        {"precision": "int8"},
        {"context": 1024},
        {"mode": "cuda_graph"},
        {"device_bytes": None},
    ],
)
def test_it_says_nothing_of_anything_else(folder: Path, change: dict[str, object]) -> None:
    other = dataclasses.replace(SETTING, **change)  # type: ignore[arg-type]
    SETTING.remember(8)
    assert other.ceiling() == (None, "")
    other.remember(2)
    assert (SETTING.ceiling(), other.ceiling()) == ((8, ""), (2, ""))


def test_it_is_forgotten_after_thirty_days_and_then_leaves_the_file(folder: Path) -> None:
    SETTING.remember(8, today=DAY)
    assert SETTING.ceiling(today=DAY + datetime.timedelta(days=30)) == (8, "")
    late = DAY + datetime.timedelta(days=31)
    assert SETTING.ceiling(today=late) == (None, "")
    dataclasses.replace(SETTING, model="other").remember(4, today=late)
    assert "0f1e" not in (folder / FILE_NAME).read_text()
    SETTING.remember(1, today=datetime.date(2099, 1, 1))  # by a wrong clock
    assert SETTING.ceiling(today=DAY) == (None, "")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b'{"format": "llama-adapter batch ceil',
        b"[]",
        b"[" * 100_000,
        b'{"format": "of somebody else", "ceilings": []}',
        b'{"format": "llama-adapter batch ceilings 1", "ceilings": 3}',
        b'{"format": "llama-adapter batch ceilings 1", "ceilings": [{"rows": 3}]}',
        b"rows",
    ],
    ids=range(9),
)
def test_a_file_that_cannot_be_understood_is_told_and_replaced(folder: Path, content: bytes) -> None:
    if content == b"rows":
        SETTING.remember(8)
        file = json.loads((folder / FILE_NAME).read_text())
        file["ceilings"][0]["rows"] = "8"
        content = json.dumps(file).encode()
    (folder / FILE_NAME).write_bytes(content)
    rows, note = SETTING.ceiling()
    assert rows is None
    assert FILE_NAME in note
    assert SETTING.remember(4) == ""
    assert SETTING.ceiling() == (4, "")


def test_without_a_place_to_keep_it_nothing_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / FILE_NAME).mkdir()
    rows, note = SETTING.ceiling()
    assert rows is None
    assert "ignored" in note
    assert "cannot be remembered" in SETTING.remember(4)

    def no_folder() -> Path:
        raise PermissionError("others may write to it")

    monkeypatch.setattr("llama_adapter.app.models.batch_size_cache.cache_folder", no_folder)
    assert "others may write to it" in SETTING.ceiling()[1]
    assert "others may write to it" in SETTING.remember(4)
