"""Batch sizes that fitted into memory are kept per setting for 30 days. An unusable file never makes a run fail."""

import dataclasses
import datetime
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
    """A folder in place of the user's cache folder."""
    monkeypatch.setattr("llama_adapter.app.models.batch_size_cache.cache_folder", lambda: tmp_path)
    return tmp_path


def test_the_newest_batch_size_of_a_setting_is_remembered(folder: Path) -> None:
    assert SETTING.ceiling() == (None, "")
    assert (SETTING.remember(16), SETTING.remember(8)) == ("", "")
    assert SETTING.ceiling() == (8, "")
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]


def test_every_field_of_the_setting_counts(folder: Path) -> None:
    changes = {"model": "other", "device": "cuda:1 (H100)", "dtype": "float16", "precision": "int8", "context": 1024}
    SETTING.remember(8)
    for name, value in {**changes, "mode": "cuda_graph", "device_bytes": None}.items():
        other = dataclasses.replace(SETTING, **{name: value})  # type: ignore[arg-type]
        assert other.ceiling() == (None, "")
        other.remember(2)
        assert (SETTING.ceiling(), other.ceiling()) == ((8, ""), (2, ""))


def test_an_entry_expires_after_30_days_and_leaves_the_file(folder: Path) -> None:
    SETTING.remember(8, today=DAY)
    assert SETTING.ceiling(today=DAY + datetime.timedelta(days=30)) == (8, "")
    late = DAY + datetime.timedelta(days=31)
    assert SETTING.ceiling(today=late) == (None, "")
    dataclasses.replace(SETTING, model="other").remember(4, today=late)
    assert "0f1e" not in (folder / FILE_NAME).read_text()
    SETTING.remember(1, today=datetime.date(2099, 1, 1))  # written with a wrong clock
    assert SETTING.ceiling(today=DAY) == (None, "")


UNUSABLE = (
    "",
    "\udcff\udcfe",
    '{"format": "llama-adapter batch ceil',
    "[]",
    "[" * 100_000,
    '{"format": "of another program", "ceilings": []}',
    '{"format": "llama-adapter batch ceilings 1", "ceilings": 3}',
    '{"format": "llama-adapter batch ceilings 1", "ceilings": [{"rows": 3}]}',
    '{"format": "llama-adapter batch ceilings 1", "ceilings": [{"rows": "8", "date": "2026-11-21"}]}',
)


def test_an_unusable_file_is_noted_and_replaced(folder: Path) -> None:
    for content in UNUSABLE:
        (folder / FILE_NAME).write_bytes(content.encode(errors="surrogateescape"))
        rows, note = SETTING.ceiling()
        assert rows is None
        assert FILE_NAME in note
        assert SETTING.remember(4) == ""
        assert SETTING.ceiling() == (4, "")


def test_without_a_place_for_the_file_there_are_notes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / FILE_NAME).mkdir()
    assert SETTING.ceiling()[0] is None
    assert SETTING.ceiling()[1]
    assert SETTING.remember(4)

    def no_folder() -> Path:
        raise PermissionError("others may write to it")

    monkeypatch.setattr("llama_adapter.app.models.batch_size_cache.cache_folder", no_folder)
    assert "others may write to it" in SETTING.ceiling()[1]
    assert "others may write to it" in SETTING.remember(4)
