"""The user's cache folder is a folder that only the user can write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_adapter.runtime.user_cache import cache_folder, read_own


@pytest.fixture(name="cache")
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llama-adapter"


def no_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # ignored
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
        (file_above_it, FileExistsError, "cache` is not a folder"),
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
    umask = os.umask(0)
    try:
        assert cache_folder() == cache
    finally:
        os.umask(umask)
    for folder in (cache, cache.parent):
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.getuid(), 0o700)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    if owner == 0:
        os.chown(path, 12345, -1)
    else:  # only root may give files away
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)


def put_a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def put_a_pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


# Ways in which another user could have written a file, or could change it after it is read.
NOT_OUR_OWN = {
    "another user's": give_away,
    "written by the group": lambda path, _: path.chmod(0o660),
    "written by all": lambda path, _: path.chmod(0o606),
    "a link": put_a_link,
    "a pipe": put_a_pipe,
}


@pytest.mark.parametrize("spoil", NOT_OUR_OWN.values(), ids=NOT_OUR_OWN)
def test_a_file_that_another_user_can_write_is_not_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    path = tmp_path / "kernels.so"
    path.write_bytes(b"machine code")
    path.chmod(0o644)
    assert read_own(path) == b"machine code"

    spoil(path, monkeypatch)

    with pytest.raises(OSError, match=r"not a regular file of this user|symbolic links"):
        read_own(path)
