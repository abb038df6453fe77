"""The Dockerfiles, checked without Docker: files, extras, versions, user, ports and commands."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from llama_adapter.app.command_line.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
GUIDE = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
SENT = [line[2:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:2] == "!/"]


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


class Instruction(NamedTuple):
    name: str
    value: str


def instructions(file: Path) -> list[Instruction]:
    """The instructions, without comments and with continued lines joined."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


def values(file: Path, name: str) -> list[str]:
    return [instruction.value.strip() for instruction in instructions(file) if instruction.name == name]


def test_instructions_are_known_and_lists_are_json(file: Path) -> None:
    names = {name for name, _ in instructions(file)}
    known = {"ARG", "FROM", "SHELL", "RUN", "COPY", "WORKDIR", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert names <= known
    assert instructions(file)[0].name == "ARG"
    for value in (*values(file, "SHELL"), *values(file, "ENTRYPOINT"), *values(file, "CMD")):
        assert all(isinstance(word, str) for word in json.loads(value))
    for value in values(file, "RUN"):
        subprocess.run(["bash", "-n", "-c", value], check=True)
        assert all("--no-cache-dir" in part for part in value.split("&&") if "pip install" in part)


def test_copied_files_exist_and_are_sent_to_docker(file: Path) -> None:
    copied = [source for value in values(file, "COPY") for source in shlex.split(value)[:-1]]

    assert all((ROOT / source).exists() for source in copied)
    assert set(copied) <= set(SENT)
    # The parts of the package, and the files that its metadata names.
    parts = {entry.readlink().name for entry in (ROOT / "llama_adapter").iterdir() if entry.is_symlink()}
    assert {*parts, "llama_adapter", "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)


def test_there_are_one_for_the_cpu_and_one_for_ascend_and_nothing_else_is_sent_to_docker() -> None:
    copied = {source for file in FILES for value in values(file, "COPY") for source in shlex.split(value)[:-1]}

    assert [file.stem for file in FILES] == ["ascend", "cpu"]
    assert set(SENT) == copied
    assert (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()[1] == "*"


def test_versions_are_those_of_the_project_and_extras_exist(file: Path) -> None:
    extras = re.findall(r'"[^"]+\[([\w,]+)\]"', " ".join(values(file, "RUN")))
    assert extras
    assert {extra for listed in extras for extra in listed.split(",")} <= EXTRAS.keys()
    defaults = dict(value.split("=", 1) for value in values(file, "ARG") if "=" in value)

    package, requirements = ("torch", PROJECT["dependencies"]) if file.stem == "cpu" else ("torch-npu", EXTRAS["npu"])
    (wanted,) = [one for one in map(Requirement, requirements) if one.name == package]
    assert defaults["TORCH"] in wanted.specifier
    if file.stem == "cpu":
        assert defaults["PYTHON"] in SpecifierSet(PROJECT["requires-python"])
        assert defaults["TORCH"] == torch.__version__.partition("+")[0]  # the version that the tests run with
    else:
        assert defaults["TORCH_NPU"] == defaults["TORCH"]  # torch-npu pins this version of torch
        assert set(re.findall(r"torch(?:-npu)?==([\d.]+\d)", GUIDE)) == {defaults["TORCH"]}


def test_a_user_who_is_not_root_serves_where_the_health_is_asked(file: Path) -> None:
    names = [name for name, _ in instructions(file)]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")
    assert values(file, "USER") == ["user"]
    (health,) = values(file, "HEALTHCHECK")
    assert f"http://127.0.0.1:{values(file, 'EXPOSE')[0]}/health" in health
    command = [*json.loads(values(file, "ENTRYPOINT")[0]), *json.loads(values(file, "CMD")[0])]
    options = build_parser().parse_args(command[command.index("llama-adapter") + 1 :])
    assert (options.host, str(options.port)) == ("0.0.0.0", values(file, "EXPOSE")[0])


def test_a_command_runs_with_the_libraries_of_the_driver() -> None:
    command = [ROOT / "docker" / "with-cann.sh", "sh", "-c", 'echo "$LD_LIBRARY_PATH" "$1"', "sh", "two words"]
    ran = subprocess.run(command, env={"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/mine"}, capture_output=True)

    libraries, _, argument = ran.stdout.decode().strip().partition(" ")
    assert argument == "two words"
    assert libraries.split(":")[0] == "/usr/local/Ascend/driver/lib64"
    assert libraries.split(":")[-1] == "/mine"
