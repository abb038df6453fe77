"""The kernels are compiled once and cached where only the user can write. Without kernels, torch computes."""

import errno
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from torch import nn

from llama_adapter.runtime import user_cache
from llama_adapter.runtime.devices import CpuBackend
from llama_adapter.runtime.devices.cpu import PackedLinear
from llama_adapter.runtime.kernels import compiling, instruction_sets
from llama_adapter.runtime.kernels import library as native
from llama_adapter.runtime.kernels.compiling import compiled
from llama_adapter.runtime.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet, choose_instructions
from llama_adapter.runtime.kernels.library import Library, find_library
from tests.runtime.test_user_cache import NOT_OUR_OWN


@pytest.fixture(name="cache", autouse=True)
def cache_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find_library.cache_clear()
    yield tmp_path / "cache" / "llama-adapter"
    find_library.cache_clear()


@pytest.fixture(name="fit")
def fit_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a processor that the kernels support."""
    best = INSTRUCTION_SETS[0]
    monkeypatch.setattr(instruction_sets, "processor_flags", lambda: frozenset({*best.needed, *best.optional}))
    monkeypatch.setattr(native, "choose_instructions", lambda: best)


def use_compiler(path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    path.write_bytes(source.encode("latin-1"))
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def test_the_library_is_compiled_once_and_again_for_changed_sources(
    made: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Path] = []
    monkeypatch.setattr(compiling, "compile_kernels", lambda _, target: targets.append(shutil.copy(made, target)))
    instructions = choose_instructions()
    assert isinstance(instructions, InstructionSet)
    first = compiled(["cc"], instructions)
    assert list(cache.iterdir()) == [first]
    assert compiled(["cc"], instructions) == first
    assert len(targets) == 1
    assert Library(first).instruction_set == instructions.name

    shutil.copytree(compiling.FOLDER, tmp_path / "native")
    monkeypatch.setattr(compiling, "FOLDER", tmp_path / "native")
    with (tmp_path / "native" / "vector.h").open("a") as file:
        file.write("/* changed */\n")
    assert compiled(["cc"], instructions) != first
    assert len(targets) == 2


NOT_TAKEN = {
    "written by all": NOT_OUR_OWN["written by all"],
    "empty": lambda path, _: os.truncate(path, 0),  # loading this file or the next one would end the process
    "cut short": lambda path, _: os.truncate(path, 6_000),
}


@pytest.mark.parametrize("spoil", NOT_TAKEN.values(), ids=NOT_TAKEN)
def test_a_library_that_is_damaged_or_that_another_user_can_write_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    made: list[Path] = []

    def compile_kernels(_: object, target: Path) -> None:
        target.write_bytes(b"machine code" * 1000)
        made.append(target)

    monkeypatch.setattr(compiling, "compile_kernels", compile_kernels)
    path = compiled(["cc"], INSTRUCTION_SETS[0])
    with monkeypatch.context() as patch:
        spoil(path, patch)

    again = compiled(["cc"], INSTRUCTION_SETS[0])

    assert len(made) == 2
    assert again.read_bytes() == b"machine code" * 1000


def test_a_compiled_library_is_private_whatever_the_umask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_kernels", lambda _, target: target.write_bytes(b"machine code"))
    umask = os.umask(0)
    try:
        path = compiled(["cc"], INSTRUCTION_SETS[0])
    finally:
        os.umask(umask)

    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "#!/bin/sh\necho 'note: wait for it' >&2\necho 'kernels.c:1: error: no such machine' >&2\nexit 1\n",
            "no such",
        ),
        ("#!/bin/sh\nprintf 'error: \\377 bad' >&2\nexit 1\n", "error: \N{REPLACEMENT CHARACTER} bad"),
        ("#!/bin/sh\nexit 7\n", "could not make them: returned non-zero exit status 7."),
        (
            f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('-o') + 1], 'wb').write(b'no library')\n",
            "could not make them",
        ),
    ],
    ids=["fails", "fails in another encoding", "fails in silence", "makes something else"],
)
@pytest.mark.usefixtures("fit")
def test_a_failing_compiler_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    use_compiler(tmp_path / "broken-cc", monkeypatch, source)

    finding = find_library()

    assert finding.library is None
    assert reason in finding.reason
    assert str(tmp_path / "broken-cc") in finding.reason


@pytest.mark.usefixtures("fit")
def test_a_compiler_that_does_not_start_or_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("/nowhere/cc -O2", "gcc 'x"):
        monkeypatch.setenv("CC", command)
        find_library.cache_clear()
        assert find_library().library is None
        assert command.split()[0] in find_library().reason
    find_library.cache_clear()

    monkeypatch.setattr(native, "compilers", lambda: iter([["cc"]]))
    for error, reason in (
        (subprocess.TimeoutExpired("cc", 300, stderr=b"waiting for a licence"), "waiting for a licence"),
        (OSError(errno.ENOEXEC, "Exec format error"), "Exec format error"),
    ):
        run = mock.Mock(side_effect=error)
        monkeypatch.setattr(subprocess, "run", run)
        find_library.cache_clear()
        assert reason in find_library().reason
        assert run.call_count == 1, "fewer flags do not help"


@pytest.mark.usefixtures("fit")
def test_the_compiler_gets_no_option_that_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = INSTRUCTION_SETS[0]
    flag, new = list(best.optional.items())[-1]
    source = (
        f"#!{sys.executable}\nimport sys\n*options, _, _, target, _ = sys.argv\n"
        f"if '{new.split()[0]}' in options: sys.exit('error: unrecognized option')\n"
        "open(target, 'w').write(' '.join(options))\n"
    )
    use_compiler(tmp_path / "old-cc", monkeypatch, source)
    monkeypatch.setattr(native, "Library", lambda path: path.read_text().split())

    finding = find_library()

    used = best.options(list(best.optional)[:-1])
    assert finding.library == [str(tmp_path / "old-cc"), *compiling.FLAGS, *used]
    assert finding.origin.endswith(f".so; without {flag}")


@pytest.mark.parametrize(
    ("too_new", "maker", "used"),
    [
        ({"old": "i8mm", "new": ""}, "new", 3),  # all instructions of another compiler are better
        ({"old": "asimddp", "new": "bf16"}, "new", 2),
        ({"old": "i8mm", "new": "asimddp"}, "old", 1),
        ({"old": "asimddp", "new": "asimddp"}, "old", 0),
    ],
)
def test_instructions_that_no_compiler_knows_are_left_out(
    too_new: dict[str, str], maker: str, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(compiler: list[str], _: InstructionSet, extras: tuple[str, ...]) -> Path:
        if too_new[compiler[0]] in extras:
            raise subprocess.CalledProcessError(1, compiler, stderr="unrecognized option")
        return Path(*compiler)

    neon = INSTRUCTION_SETS[-1]
    flags = tuple(neon.optional)
    monkeypatch.setattr(instruction_sets, "processor_flags", lambda: frozenset({*neon.needed, *flags}))
    monkeypatch.setattr(native, "choose_instructions", lambda: neon)
    monkeypatch.setattr(native, "compilers", lambda: iter([["old"], ["new"]]))
    monkeypatch.setattr(native, "compiled", made)
    monkeypatch.setattr(native, "Library", lambda path: path)

    finding = find_library()

    assert (finding.library, finding.variant) == (Path(maker), neon.variant(flags[:used]))
    assert finding.origin == f"compiled by `{maker}`, {maker}" + "".join(f"; without {flag}" for flag in flags[used:])


@pytest.mark.parametrize("is_prebuilt", [False, True])
@pytest.mark.usefixtures("fit")
def test_amx_is_not_named_where_the_system_refuses_it(is_prebuilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_prebuilt", lambda _: Path("made") if is_prebuilt else None)
    monkeypatch.setattr(native, "compiled", lambda *_: Path("made"))
    for uses_amx, variant in ((True, "avx512+avx512_bf16+amx_int8"), (False, "avx512+avx512_bf16")):
        monkeypatch.setattr(native, "Library", mock.Mock(return_value=SimpleNamespace(uses_amx=uses_amx)))
        find_library.cache_clear()
        assert find_library().variant == variant
        assert find_library().origin.endswith("; the system refuses amx_int8") == (not uses_amx)


@pytest.mark.usefixtures("fit")
def test_compilers_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(compiler: list[str], _: InstructionSet, extras: tuple[str, ...]) -> Path:
        if compiler == ["no-headers"]:
            raise OSError("stdlib.h: No such file")
        return Path("made by", *compiler)

    monkeypatch.setattr(native, "compilers", lambda: iter([["no-headers"], ["with-headers"]]))
    monkeypatch.setattr(native, "compiled", made)
    monkeypatch.setattr(native, "Library", lambda path: SimpleNamespace(path=path, uses_amx=False))
    library = find_library().library
    assert isinstance(library, SimpleNamespace)
    assert library.path == Path("made by/with-headers")

    find_library.cache_clear()
    monkeypatch.setattr(native, "compilers", lambda: iter(()))
    assert find_library().library is None
    assert "gcc" in find_library().reason
    assert "ziglang" in find_library().reason


@pytest.mark.usefixtures("fit")
def test_an_unsafe_cache_is_replaced_by_a_temporary_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_cache, "_fault", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(compiling, "compile_kernels", lambda _, target: target.write_bytes(b"machine code"))
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    path = compiled(["cc"], INSTRUCTION_SETS[0])

    temporary = path.parent.parent
    assert (temporary.parent, temporary.stat().st_mode & 0o777) == (tmp_path, 0o700)
    assert os.environ["XDG_CACHE_HOME"] == str(temporary)  # of processes that this one starts
    assert user_cache.is_temporary()
    assert user_cache.cache_note().startswith("compiled kernels are kept for this run only: others may write to")
    assert not list(cache.iterdir())
    assert compiled(["cc"], INSTRUCTION_SETS[0]) == path


@pytest.mark.usefixtures("fit")
def test_without_any_place_no_compiler_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder(**_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", no_folder)
    monkeypatch.setattr(native, "compilers", lambda: pytest.fail("a compiler was asked"))
    cache.parent.write_text("")

    assert find_library().reason.startswith("there is no place to keep them: ")

    cache.parent.unlink()
    find_library.cache_clear()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "is mounted noexec" in find_library().reason


@pytest.mark.usefixtures("fit")
def test_on_a_full_disk_no_compiler_runs_and_what_is_cached_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compile_kernels", lambda _, target: target.write_bytes(b"machine code"))
    path = compiled(["cc"], INSTRUCTION_SETS[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    monkeypatch.setattr(compiling, "compile_kernels", lambda *_: pytest.fail("a compiler runs"))

    assert compiled(["cc"], INSTRUCTION_SETS[0]) == path
    assert "is full" in find_library().reason


@pytest.mark.parametrize(
    ("system", "machine", "reason"),
    [
        ("linux", "x86_64", "this processor has no fma, f16c"),
        ("linux", "aarch64", "this processor has no asimd"),
        ("linux", "riscv64", "this is linux on riscv64"),
        ("darwin", "arm64", "this is darwin on arm64"),
    ],
)
def test_on_other_machines_torch_computes(
    system: str, machine: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(instruction_sets.CHOICE, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(instruction_sets, "processor_flags", lambda: frozenset({"avx512f", "avx512bw", "avx2"}))
    module, backend = nn.Sequential(nn.Linear(16, 16)), CpuBackend()

    backend.prepare(module)

    assert reason in find_library().reason
    assert isinstance(module[0], PackedLinear)
    assert backend.kernels is None


def test_without_proc_no_instruction_is_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(instruction_sets.CHOICE, raising=False)
    monkeypatch.setattr(instruction_sets, "processor_flags", frozenset)

    assert find_library().reason == "/proc/cpuinfo does not say which instructions this processor has"
