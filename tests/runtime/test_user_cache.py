"""The user's cache folder is a folder that only the user can write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_adapter.runtime.user_cache import cache_folder


@pytest.fixture(name="cache")
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llama-adapter"


def no_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)


def other_owner(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)


def open_to_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)


def file_in_its_place(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.write_text("")


def file_above_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.write_text("")


@pytest.mark.parametrize(
    ("spoil", "kind", "reason"),
    [
        (no_home, FileNotFoundError, "XDG_CACHE_HOME"),
        (other_owner, PermissionError, "another user"),
        (open_to_all, PermissionError, "others may write"),
        (file_in_its_place, FileExistsError, "cache/llama-adapter` is not a folder"),
        (file_above_it, NotADirectoryError, "cache` is not a folder"),
    ],
)
def test_an_unsafe_cache_is_refused(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    kind: type[OSError],
    reason: str,
) -> None:
    spoil(cache, monkeypatch)

    with pytest.raises(kind, match=reason):
        cache_folder()


def test_the_cache_is_private_to_the_user(cache: Path) -> None:
    assert cache_folder() == cache
    assert (cache.stat().st_uid, cache.stat().st_mode & 0o777) == (os.getuid(), 0o700)
