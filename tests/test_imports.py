"""Devices are named in one part of the code.

Import directions are contracts in pyproject.toml; `lint-imports` checks them.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "llm", "runtime", "vision", "scripts")
DEVICE_NAMES = ("cuda", "npu", "torch_npu", "onnxruntime", "acl", "ais_bench")
DEVICE_WORD = re.compile(rf"\b({'|'.join(DEVICE_NAMES)})\b", re.IGNORECASE)
# Folders of devices and exported graphs, doctor's look at the installation, and code that measures other programs.
DEVICE_HOMES = (
    "app/models/graph_export/",
    "llm/exported/onnx_program.py",
    "runtime/devices/",
    "runtime/device_failures.py",
    "runtime/device_names.py",
    "runtime/graphs/",
    "app/command_line/doctor/environment.py",
    "app/command_line/doctor/probes.py",
    "scripts/gpu_round.py",
    "scripts/gpu_trace.py",
    "scripts/peers/",
)
TEXTS_FOR_PEOPLE = ("app/command_line/",)  # may name devices in texts, but not use them


def source_files() -> list[str]:
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [*(path.relative_to(ROOT).as_posix() for path in found), "demo_bsz.py"]


def device_names(source: str, *, file: str) -> list[str]:
    """Identifiers and strings that name a device; docstrings and comments are left out."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {
        id(node.value) for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found: list[str] = []
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names = [name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.alias(name=name, asname=other):
                names = [*name.split("."), other or ""]
            case ast.ImportFrom(module=str(name)):
                names = name.split(".")
            case ast.Constant(value=str(text)) if id(node) not in docstrings and not file.startswith(TEXTS_FOR_PEOPLE):
                names = DEVICE_WORD.findall(text)
            case _:
                names = []
        found += [name for name in names if DEVICE_WORD.fullmatch(name)]
    return found


@pytest.mark.slow
def test_devices_are_named_in_their_rooms_alone() -> None:
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in source_files()}
    named = {file: device_names(source, file=file) for file, source in sources.items()}

    assert {file: names for file, names in named.items() if names and not file.startswith(DEVICE_HOMES)} == {}
    assert all(any(named[file] for file in named if file.startswith(home)) for home in DEVICE_HOMES)


@pytest.mark.parametrize(
    ("source", "names", "file"),
    [
        ("import torch\ntorch.cuda.synchronize()", ["cuda"], "llm/engine/engine.py"),
        ("device = f'cuda:{0}'", ["cuda"], "llm/engine/engine.py"),
        ("def to(*, npu=0): pass", ["npu"], "llm/engine/engine.py"),
        ("import onnxruntime", ["onnxruntime"], "llm/engine/engine.py"),
        ("from ais_bench.infer import interface", ["ais_bench"], "llm/engine/engine.py"),
        ("if device.startswith('NPU'): pass", ["NPU"], "llm/engine/engine.py"),
        *((text, [], "llm/engine/engine.py") for text in ('"""Not for cuda."""', "# cuda", "'input'", "barracuda = 1")),
        *(("help='cpu or cuda'", [], file) for file in TEXTS_FOR_PEOPLE),
        *(("torch.cuda", ["cuda"], file) for file in TEXTS_FOR_PEOPLE),
    ],
)
def test_names_of_devices_are_found_and_words_about_them_are_fine(source: str, names: list[str], file: str) -> None:
    assert device_names(source, file=file) == names
