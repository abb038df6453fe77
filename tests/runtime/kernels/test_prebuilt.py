"""Prebuilt kernels are used if they match the sources and are intact; otherwise the kernels are compiled."""

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llama_adapter.runtime.kernels import compiling, instruction_sets, prebuilt
from llama_adapter.runtime.kernels.compiling import compilers
from llama_adapter.runtime.kernels.instruction_sets import CHOICE, INSTRUCTION_SETS, InstructionSet, choose_instructions
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.runtime.kernels.prebuilt import find_prebuilt, name_prebuilt

INSTRUCTIONS = choose_instructions()
COMPILER = next(compilers(), None)


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for prebuilt libraries, with an empty cache and without a compiler."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "/nowhere/cc")
    find_library.cache_clear()
    yield folder
    find_library.cache_clear()


def put(file: Path, folder: Path) -> Path:
    """Copy the library as a prebuilt one for this processor."""
    return name(Path(shutil.copy(file, folder)))


def name(path: Path) -> Path:
    assert isinstance(INSTRUCTIONS, InstructionSet)
    return name_prebuilt(path, INSTRUCTIONS, INSTRUCTIONS.extras())


def fill_cache(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the compiler available, with its kernels already in the cache."""
    assert COMPILER is not None
    monkeypatch.setenv("CC", shlex.join(COMPILER))
    cache = Path(os.environ["XDG_CACHE_HOME"], "llama-adapter")
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(shutil.copy(made, cache))


def test_a_prebuilt_library_needs_no_compiler_and_comes_before_a_compiled_one(
    made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(INSTRUCTIONS, InstructionSet)
    path = put(made, folder)

    finding = find_library()

    assert finding.library is not None, finding.reason
    assert finding.library.instruction_set == INSTRUCTIONS.name
    assert finding.variant == INSTRUCTIONS.variant(INSTRUCTIONS.extras())
    assert finding.origin == f"prebuilt, {path}"
    assert not Path(os.environ["XDG_CACHE_HOME"]).exists()
    fill_cache(made, monkeypatch)
    find_library.cache_clear()
    assert find_library().origin == f"prebuilt, {path}"


def test_a_prebuilt_library_of_other_sources_is_not_taken(
    made: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(made, folder)
    shutil.copytree(compiling.FOLDER, tmp_path / "sources")
    monkeypatch.setattr(compiling, "FOLDER", tmp_path / "sources")
    with (tmp_path / "sources" / "vector.h").open("a") as file:
        file.write("/* changed */\n")

    finding = find_library()

    assert finding.library is None
    assert "`/nowhere/cc` could not make them" in finding.reason
    assert f"not the prebuilt ones: `{folder}` has no {INSTRUCTIONS[0]}" in finding.reason


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    other = path.with_name("other")
    make(other)
    name(other)


def make_empty_library(path: Path) -> None:
    assert COMPILER is not None
    subprocess.run([*COMPILER, "-shared", "-x", "c", "/dev/null", "-o", str(path)], check=True)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (cut, "is damaged: install the package again"),
        (lambda path: replace(path, lambda other: other.write_text("no library")), "file too short|invalid ELF"),
        (lambda path: replace(path, make_empty_library), "kernels_packed_bytes"),
    ],
    ids=["truncated", "no library", "another library"],
)
def test_a_prebuilt_library_that_does_not_load_is_replaced_and_explained(
    made: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(put(made, folder))
    without = find_library()
    find_library.cache_clear()
    cached = fill_cache(made, monkeypatch)

    finding = find_library()

    assert without.library is None
    assert finding.library is not None
    assert f", {cached}; not the prebuilt ones: " in finding.origin
    for told in (without.reason, finding.origin):
        assert any(part in told for part in reason.split("|")), told


def test_each_processor_has_a_library_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    avx512, avx2, neon = INSTRUCTION_SETS
    for instructions in INSTRUCTION_SETS:
        for extras in instructions.variants():
            (folder / "made").write_text(instructions.variant(extras))
            name_prebuilt(folder / "made", instructions, extras)
    assert len(list(folder.iterdir())) == 9
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def found(*flags: str, wanted: str = "") -> str:
        monkeypatch.setenv(CHOICE, wanted)
        monkeypatch.setattr(instruction_sets, "processor_flags", lambda: frozenset(flags))
        instructions = choose_instructions()
        assert isinstance(instructions, InstructionSet)
        path = find_prebuilt(instructions)
        assert path is not None
        return path.read_text()

    everything = (*avx512.needed, *avx512.optional, *avx2.needed)
    assert found(*avx2.needed) == "avx2"
    assert found(*avx2.needed, "avx_vnni") == "avx2+avx_vnni"
    assert found(*avx512.needed, *avx2.needed) == "avx512"
    assert found(*{*avx512.needed, *avx2.needed} - {"avx512_vnni"}) == "avx2"
    assert found(*everything) == "avx512+avx512_bf16+amx_int8"
    assert found(*{*everything} - {"amx_int8"}) == "avx512+avx512_bf16"
    assert found(*everything, wanted="avx2") == "avx2"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert found(*neon.needed) == "neon"
    assert found(*neon.needed, "asimddp") == found(*neon.needed, "asimddp", "bf16") == "neon+asimddp"
    assert found(*neon.needed, "asimddp", "i8mm") == "neon+asimddp+i8mm"
    assert found(*neon.needed, *neon.optional) == "neon+asimddp+i8mm+bf16"
