"""The wheel with compiled kernels: its content, the systems that it runs on, and that it needs no compiler."""

import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.kernels import prebuilt
from llama_adapter.runtime.kernels.compiling import compile_kernels
from llama_adapter.runtime.kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet, choose_instructions
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.kernels.prebuilt import find_prebuilt
from scripts.build_wheel import GLIBC, MACHINES, main
from scripts.wheel_hook import PLACE
from tests.runtime.kernels import test_linear as linear_tests

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTIONS = choose_instructions()
MACHINE = platform.machine() if platform.machine() in MACHINES else "x86_64"
PICTURE = next(path for path in sorted(sample_pictures().iterdir()) if path.suffix == ".png")

pytestmark = pytest.mark.slow
on_this_machine = pytest.mark.skipif(isinstance(INSTRUCTIONS, str), reason=str(INSTRUCTIONS))


def compile_for_tests(command: list[str], target: Path) -> None:
    """Compile for this machine's processor as for users, and for other processors without optimisation."""
    own = INSTRUCTIONS.options(INSTRUCTIONS.extras()) if isinstance(INSTRUCTIONS, InstructionSet) else []
    is_own = command[-len(own) :] == own
    if not is_own:
        at = command.index("-O3")
        command = [*command[:at], "-O0", "-fno-sanitize=all", *command[at + 1 :]]
    compile_kernels(command, target)


@pytest.fixture(name="wheel", scope="module")
def wheel_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.build_wheel.compile_kernels", compile_for_tests)
        patch.setattr("sys.argv", ["build_wheel", "--machine", MACHINE, "--out", str(out)])
        main()
    (found,) = out.iterdir()
    return found


@pytest.fixture(name="libraries", scope="module")
def libraries_fixture(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The unpacked libraries."""
    folder = tmp_path_factory.mktemp("libraries")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{PLACE}/")]
        return [Path(archive.extract(name, folder)) for name in names]


def test_the_wheel_says_for_which_machine_it_is(wheel: Path) -> None:
    tag = f"py3-none-manylinux_2_17_{MACHINE}"
    with zipfile.ZipFile(wheel) as archive:
        (described,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(described).decode().splitlines()

    assert wheel.stem.endswith(f"-{tag}")
    assert {"Root-Is-Purelib: false", f"Tag: {tag}"} <= set(lines)


def test_it_has_a_library_for_each_kind_of_processor(libraries: list[Path]) -> None:
    own = [instructions for instructions in INSTRUCTION_SETS if instructions.machine == MACHINE]
    wanted = [instructions.variant(extras) for instructions in own for extras in instructions.variants()]

    assert sorted(path.name.split("-")[0] for path in libraries) == sorted(wanted)


def test_its_libraries_need_an_old_c_library_and_nothing_else(libraries: list[Path]) -> None:
    for path in libraries:
        content = path.read_bytes()
        needed = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"\0GLIBC_([0-9.]+)(?=\0)", content)}
        others = set(re.findall(rb"\0((?:lib|ld-)[\w.+-]+\.so[.\d]*)(?=\0)", content))

        assert needed
        assert max(needed)[:2] <= GLIBC
        assert others <= {b"libc.so.6", b"libm.so.6", b"libpthread.so.0"}


@on_this_machine
@pytest.mark.parametrize("kind", linear_tests.KINDS.values(), ids=linear_tests.KINDS)
def test_its_rows_have_the_same_bits_alone_and_among_others(
    kind: torch.dtype, libraries: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(INSTRUCTIONS, InstructionSet)
    monkeypatch.setattr(prebuilt, "FOLDER", libraries[0].parent)
    path = find_prebuilt(INSTRUCTIONS)
    assert path is not None
    library = Library(path)
    before = torch.get_num_threads()
    try:
        linear_tests.test_a_row_has_the_same_bits_alone_and_among_others_and_by_any_number_of_threads(
            kind, 768, library
        )
    finally:
        torch.set_num_threads(before)
    linear_tests.test_a_layer_equals_the_one_it_is_made_of(kind, (30, 9000), 70, True, library)


@pytest.fixture(name="python", scope="module")
def python_fixture(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel and its required packages, but without packages for compiling."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    others = folder / "others"
    others.mkdir()
    for entry in (entry for path in sys.path if Path(path).name == "site-packages" for entry in Path(path).iterdir()):
        if not re.match("ziglang|llama_adapter|llama-adapter", entry.name) and not (others / entry.name).exists():
            (others / entry.name).symlink_to(entry)
    (site / "others.pth").write_text(str(others))
    return folder / "bin" / "python"


def run(python: Path, folder: Path, *arguments: str) -> str:
    """Run Python without a compiler and without a cache of kernels; returns what it prints."""
    (folder / "no-programs").mkdir(exist_ok=True)
    variables = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
    variables |= {"PATH": str(folder / "no-programs"), "XDG_CACHE_HOME": str(folder / "cache")}
    ran = subprocess.run([python, *arguments], cwd=folder, env=variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@on_this_machine
def test_a_new_environment_without_a_compiler_has_the_kernels(python: Path, tmp_path: Path) -> None:
    assert isinstance(INSTRUCTIONS, InstructionSet)
    site = next(python.parents[1].glob("lib/python*/site-packages"))
    program = (
        "import llama_adapter; print(llama_adapter.__file__);"
        "from llama_adapter.runtime.kernels.compiling import compilers; print(list(compilers()));"
        "captioner = llama_adapter.Captioner.load();"
        f"print(captioner.generate([{str(PICTURE)!r}])[0].text); print(captioner.info.operators);"
        "from llama_adapter.app.command_line.doctor.probes import look_at_kernels; print(look_at_kernels()['found'])"
    )

    said = run(python, tmp_path, "-c", program).splitlines()

    assert said[0] == str(site / "llama_adapter" / "__init__.py")
    assert said[1] == "[]"
    assert said[3] == f"native {INSTRUCTIONS.name}"
    assert said[2] == Captioner.load().generate([PICTURE])[0].text
    variant = INSTRUCTIONS.variant(INSTRUCTIONS.extras())
    assert said[4].startswith(f"{variant} (prebuilt, {site / PLACE}/{variant}-")
    assert not list((tmp_path / "cache").glob("**/kernels-*"))
