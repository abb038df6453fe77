"""The package `llama_adapter` as installed by users: one import name, and a clear error if its links are missing."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import llama_adapter

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("app", "assets", "llm", "runtime", "vision")


def run(*arguments: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source distribution, by kind."""
    folder = tmp_path_factory.mktemp("dist")
    ran = run("-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder), cwd=ROOT, path=ROOT)
    assert ran.returncode == 0, ran.stderr
    return {kind: next(folder.glob(f"*.{end}")) for kind, end in (("wheel", "whl"), ("sdist", "tar.gz"))}


def needs(one: Distribution, extras: Iterable[str]) -> list[Requirement]:
    """What a distribution requires here, with these extras."""
    found = map(Requirement, one.requires or ())
    return [it for it in found if it.marker is None or any(it.marker.evaluate({"extra": e}) for e in ("", *extras))]


def installed_for(one: Distribution, *extras: str) -> list[Distribution]:
    """The distributions of this environment that another one requires, in versions that it allows."""
    found, left = dict[Requirement, Distribution](), needs(one, extras)
    while left:
        if (wanted := left.pop()) not in found:
            found[wanted] = importlib.metadata.distribution(wanted.name)
            assert wanted.specifier.contains(found[wanted].version, prereleases=True), wanted
            left += needs(found[wanted], wanted.extras)
    return list(found.values())


@pytest.mark.slow
def test_an_sdist_installs_as_the_wheel_and_captions_beside_what_it_requires(
    built: dict[str, Path], tmp_path: Path
) -> None:
    """The environment has links to packages that are installed here, because installing them takes a minute."""
    shutil.copy(next((ROOT / "assets" / "pictures").glob("*.png")), tmp_path / "picture.png")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def command(*words: str) -> str:
        ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    command(sys.executable, "-m", "venv", "--without-pip", "fresh")
    (packages,) = (tmp_path / "fresh").glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", "--quiet")
    # Most modules are never imported, so they are not compiled.
    command(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "made", str(built["sdist"]))
    (made,) = map(str, (tmp_path / "made").iterdir())
    command(*pip, "--python", "fresh/bin/python", "install", "--no-deps", "--no-compile", made)
    with zipfile.ZipFile(built["wheel"]) as archive:
        for name in archive.namelist():
            assert name.endswith("/RECORD") or (packages / name).read_bytes() == archive.read(name), name
        assert {name for name in archive.namelist() if name.startswith("llama_adapter/")} == {
            str(path.relative_to(packages)) for path in (packages / "llama_adapter").rglob("*") if path.is_file()
        }

    (own,) = importlib.metadata.distributions(path=[str(packages)])
    for one in installed_for(own, "serve"):
        for top in {file.parts[0] for file in one.files or ()} - {"..", "llama_adapter"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(one.locate_file(top))
    assert json.loads(command("fresh/bin/llama-adapter", "caption", "picture.png", "--quiet"))["text"].startswith("a ")
    command("fresh/bin/python", "-c", "import llama_adapter.app.serving.http_api.api")


@pytest.mark.slow
def test_a_wheel_installs_nothing_but_llama_adapter(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        files = set(archive.namelist())
    names = {tuple(name.split("/")[:2]) for name in files}

    version = llama_adapter.__version__
    assert {name[0] for name in names} == {"llama_adapter", f"llama_adapter-{version}.dist-info"}
    assert {name[1] for name in names if name[0] == "llama_adapter"} >= {*FOLDERS, "__init__.py", "py.typed"}
    data = ("app/models/named/catalogue.yaml", "app/command_line/flags.json", "assets/start-tower.safetensors")
    assert files >= {f"llama_adapter/{name}" for name in data}


@pytest.fixture(scope="module")
def site(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built["wheel"]) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow
def test_a_wheel_describes_itself_and_accepts_the_torch_of_a_notebook(site: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(site)])
    (torch,) = (line for line in distribution.requires or () if re.match(r"torch\b(?!-)", line) and "extra" not in line)

    assert (ROOT / "README.md").read_text(encoding="utf-8") in distribution.metadata.get_payload()
    assert Requirement(torch).specifier.contains("2.11.0")
    assert Requirement(torch).specifier.contains("2.13.0+cpu")
    assert not Requirement(torch).specifier.contains("2.14.0")  # later versions of torch bring CUDA even to a CPU
    assert {"heif", "onnx", "serve", "web"} <= set(distribution.metadata.get_all("Provides-Extra", []))


@pytest.mark.slow
def test_a_wheel_has_the_demo_and_hints_beside_modules_of_the_same_names(site: Path, tmp_path: Path) -> None:
    for name in ("app", "llm", "vision", "runtime"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user was imported')")
    shutil.copy(next((ROOT / "assets" / "pictures").glob("*.png")), tmp_path / "picture.png")
    flags = ("--pic-file-path", "picture.png", "--infer-loop", "1", "--no-score")
    program = "import llama_adapter; from llama_adapter.runtime.extras import *; print(install_hint('web'))"
    demo = run("-m", "llama_adapter.demo_bsz", *flags, cwd=tmp_path, path=site)
    hint = run("-c", f"{program}; print(llama_adapter.__file__)", cwd=tmp_path, path=site)

    assert demo.returncode == 0, demo.stderr
    assert re.match(r"\[result\]: picture\.png: \w", demo.stdout)
    assert hint.stdout == f"pip install 'llama-adapter[web]'\n{site / 'llama_adapter' / '__init__.py'}\n"


def test_a_checkout_without_links_says_so(tmp_path: Path) -> None:
    package = tmp_path / "llama_adapter"
    package.mkdir()
    shutil.copy(ROOT / "llama_adapter" / "__init__.py", package)
    for name in FOLDERS:  # git writes links in this form on systems without links
        (package / name).write_text(f"../{name}")

    ran = run("-c", "import llama_adapter", cwd=tmp_path, path=tmp_path)

    assert ran.returncode == 1
    assert "core.symlinks=true" in ran.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("changed", "said"), [("platform = 'win32'", "inside WSL 2"), ("version_info = 3, 10", "Python 3.11 or newer")]
)
def test_windows_and_old_pythons_are_refused_before_links_and_modules_are_missed(changed: str, said: str) -> None:
    ran = run("-c", f"import sys; sys.{changed}; import llama_adapter", cwd=ROOT, path=ROOT)

    assert ran.returncode == 1
    assert said in ran.stderr.splitlines()[-1]


def test_make_needs_a_python_that_torch_has_and_completes_an_environment(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"

    def make(*program: str) -> tuple[int, str]:
        python.write_text("\n".join(["#!/bin/sh", *program]))
        python.chmod(0o755)
        command = ["make", "-s", f"PYTHON={python}", ".venv/bin/pip"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return ran.returncode, ran.stderr

    for version in ((3, 10, 9), (3, 15, 0)):
        code, said = make(f'exec "{sys.executable}" -c "import sys; sys.version_info = {version}; $2"')
        assert (code, (tmp_path / ".venv").exists()) == (2, False)
        assert said.startswith(f"error: {python} is not Python 3.11 to 3.14; name another")
    unfinished = ('[ "$2" = venv ] || exit 0', "mkdir -p .venv/bin; touch .venv/bin/python")
    assert make(*unfinished, "exit 1")[0] == 2, "as on Debian without python3-venv"
    assert make(*unfinished, "touch .venv/bin/pip")[0] == 0
    assert make("exit 1")[0] == 0, "it is made once"


def test_every_public_name_is_listed_and_there_and_no_other() -> None:
    assert {*llama_adapter.__all__} <= {*dir(llama_adapter)}
    for name in llama_adapter.__all__:
        assert getattr(llama_adapter, name) is not None, name
    with pytest.raises(AttributeError, match="Captoner"):
        _ = llama_adapter.Captoner
