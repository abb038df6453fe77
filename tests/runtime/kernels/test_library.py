"""The kernels are compiled once, kept where only the user writes, and done without where they cannot be had."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.devices.packed import PackedLinear
from llama_adapter.runtime.kernels import library as native
from llama_adapter.runtime.kernels.library import Library, cache_folder, compiled, compilers, find_library


@pytest.fixture(name="cache", autouse=True)
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find_library.cache_clear()
    yield tmp_path / "cache" / "llama-adapter"
    find_library.cache_clear()


@pytest.fixture(name="fit_machine")
def fit_machine_fixture() -> None:
    if native._unfit_machine() or next(compilers(), None) is None:
        pytest.skip("the kernels cannot be made on this machine")


@pytest.mark.slow
@pytest.mark.usefixtures("fit_machine")
def test_the_library_is_compiled_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = next(compilers())
    first = compiled(compiler)
    assert first.parent == cache
    assert [path.name for path in cache.iterdir()] == [first.name]

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was compiled again"))
    assert compiled(compiler) == first
    assert Library(first).takes(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("fit_machine")
def test_changed_sources_are_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(Path(native.__file__).parent, tmp_path / "native")
    before = compiled(next(compilers()))
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native" / "library.py"))
    with (tmp_path / "native" / "vector.h").open("a") as file:
        file.write("/* changed */\n")

    assert compiled(next(compilers())) != before


def test_without_a_compiler_the_reason_says_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")
    monkeypatch.setattr(native, "compilers", lambda: iter(()))

    finding = find_library()

    assert finding.library is None
    assert "gcc" in finding.reason
    assert "ziglang" in finding.reason


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text(
        "#!/bin/sh\necho 'note: wait for it' >&2\necho 'kernels.c:1: error: no such machine' >&2\nexit 1\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")

    assert "error: no such machine" in find_library().reason
    assert str(broken) in find_library().reason


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -O2")
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")

    assert "/nowhere/cc" in find_library().reason


def test_a_command_whose_quotation_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc 'x")
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")

    assert find_library().library is None
    assert "gcc" in find_library().reason


def test_a_compiler_that_fails_in_no_known_encoding_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_bytes(b"#!/bin/sh\nprintf 'error: \\377 bad' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")

    assert "error: \N{REPLACEMENT CHARACTER} bad" in find_library().reason


def test_a_compiler_that_does_not_end_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 300, stderr=b"waiting for a licence")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")
    monkeypatch.setattr(native, "compilers", lambda: iter([["cc"]]))

    assert find_library().reason == "`cc` could not make them: waiting for a licence"


def test_where_one_compiler_fails_the_next_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(compiler: list[str]) -> Path:
        if compiler == ["no-headers"]:
            raise OSError("stdlib.h: No such file")
        return Path("made by", *compiler)

    monkeypatch.setattr(native, "_unfit_machine", lambda: "")
    monkeypatch.setattr(native, "compilers", lambda: iter([["no-headers"], ["with-headers"]]))
    monkeypatch.setattr(native, "compiled", made)
    monkeypatch.setattr(native, "Library", lambda path: path)

    assert find_library().library == Path("made by/with-headers")


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")
    monkeypatch.setattr(native, "compilers", lambda: iter([["cc"]]))

    assert "XDG_CACHE_HOME" in find_library().reason


def test_a_cache_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)

    with pytest.raises(PermissionError, match="another user"):
        cache_folder()


def test_what_the_compiler_made_must_be_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    liar = tmp_path / "liar-cc"
    liar.write_text(
        f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('-o') + 1], 'wb').write(b'no library')\n"
    )
    liar.chmod(0o755)
    monkeypatch.setenv("CC", str(liar))
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")

    assert find_library().library is None
    assert "could not make them" in find_library().reason


def test_a_cache_that_others_may_write_to_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    monkeypatch.setattr(native, "_unfit_machine", lambda: "")
    monkeypatch.setattr(native, "compilers", lambda: iter([["cc"]]))

    with pytest.raises(PermissionError):
        cache_folder()
    assert "others may write" in find_library().reason


def test_the_cache_is_the_users_own(cache: Path) -> None:
    assert cache_folder() == cache
    assert cache.stat().st_uid == os.getuid()
    assert cache.stat().st_mode & 0o777 == 0o700


def test_processors_without_the_instructions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native.sys, "platform", "linux")
    monkeypatch.setattr(native, "_processor_flags", lambda: frozenset({"avx512f", "avx512bw", "avx2"}))

    assert find_library().reason == "this processor has no avx512vl, avx512dq"


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "arm64")])
def test_other_machines_are_told_apart(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native.sys, "platform", system)

    assert f"this is {system} on {machine}" in find_library().reason


def test_without_kernels_the_cpu_computes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_unfit_machine", lambda: "another machine")
    module = nn.Sequential(nn.Linear(16, 16))
    backend = CpuBackend()

    backend.prepare(module)

    assert isinstance(module[0], PackedLinear)
    assert backend.kernels is None
