"""Imports point one way, devices are named in one place, and vendor packages are imported only when they are used."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("app", "llm", "vision", "scripts")

# Who may not import whom. Prefixes of dotted names; the first list is of importers, the second of the imported.
FORBIDDEN = [
    (("vision",), ("llm", "app", "scripts")),
    (("llm",), ("vision", "app", "scripts")),
    (("app",), ("scripts",)),
    (
        ("llama_adapter.llm.model",),
        (
            "llama_adapter.llm.runtime",
            "llama_adapter.llm.engine",
            "llama_adapter.llm.weights",
            "llama_adapter.llm.load",
        ),
    ),
    (
        ("llama_adapter.llm.weights",),
        ("llama_adapter.llm.runtime", "llama_adapter.llm.engine", "llama_adapter.llm.load"),
    ),
    (
        ("llama_adapter.llm.runtime",),
        ("llama_adapter.llm.engine", "llama_adapter.llm.weights", "llama_adapter.llm.load"),
    ),
    (("llama_adapter.llm.engine",), ("llama_adapter.llm.weights", "llama_adapter.llm.load")),
    (("app", "llm", "vision"), ("tests",)),
    # In app: files and memory know of no captioner, a captioner of no job or service, and nobody of the front ends.
    (
        ("llama_adapter.app.models",),
        (
            "llama_adapter.app.captioning.captioner",
            "llama_adapter.app.captioning.caption_loop",
            "llama_adapter.app.measuring",
            "llama_adapter.app.jobs",
            "llama_adapter.app.online",
        ),
    ),
    (
        ("llama_adapter.app.captioning.captioner", "llama_adapter.app.captioning.caption_loop"),
        ("llama_adapter.app.measuring", "llama_adapter.app.jobs", "llama_adapter.app.online"),
    ),
    (
        (
            "llama_adapter.app.captioning.captioner",
            "llama_adapter.app.models",
            "llama_adapter.app.measuring",
            "llama_adapter.app.doctor",
            "llama_adapter.app.jobs",
            "llama_adapter.app.scale",
            "llama_adapter.app.online",
        ),
        ("llama_adapter.app.cli", "llama_adapter.app.http_api", "llama_adapter.app.web"),
    ),
]
DEVICE_NAMES = ("cuda", "npu", "torch_npu", "onnxruntime", "acl", "ais_bench")
DEVICE_WORD = re.compile(rf"\b({'|'.join(DEVICE_NAMES)})\b", re.IGNORECASE)
# Those of app look for what is installed, in processes of its own; the peers are other programs, measured beside ours.
DEVICE_HOMES = (
    "llm/runtime/",
    "vision/backends/",
    "vision/export/",
    "app/doctor/environment.py",
    "app/doctor/probes.py",
    "scripts/peers/",
)
TELLERS = ("app/cli/",)  # may name devices to people, not use them
VENDOR_PACKAGES = ("torch_npu", "torchair", "acl", "ais_bench", "onnxruntime", "onnx", "triton")


def source_files() -> list[Path]:
    return [*(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))), ROOT / "demo_bsz.py"]


def imported(tree: ast.AST, *, module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            base = ".".join([*parts[: len(parts) - node.level], *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base if node.level else node.module}.{alias.name}"


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def wrong_imports(source: str, *, module: str) -> list[str]:
    """Imports that go against the direction."""
    return [
        f"line {line}: {module} imports {name}"
        for line, name in imported(ast.parse(source), module=module)
        for importers, targets in FORBIDDEN
        if is_within(module, importers) and is_within(name, targets)
    ]


def device_names(source: str, *, file: str) -> list[str]:
    """Identifiers and texts that name a device; docstrings and comments may."""
    if file.startswith(DEVICE_HOMES):
        return []
    tree = ast.parse(source)
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        names: list[str | None] = []
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
                names = [name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.alias(name=name, asname=other):
                names = [*name.split("."), other]
            case ast.ImportFrom(module=str(name)):
                names = [*name.split(".")]
            case ast.Constant(value=str(text)) if id(node) not in docstrings and not file.startswith(TELLERS):
                names = DEVICE_WORD.findall(text)
        found += [
            f"line {getattr(node, 'lineno', '?')}: {name}" for name in names if name and DEVICE_WORD.fullmatch(name)
        ]
    return found


def early_vendor_imports(source: str, *, module: str) -> list[str]:
    """Vendor packages imported when the module is, that is outside of functions."""
    tree = ast.parse(source)
    inside = {
        id(inner)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(function)
    }
    outside = ast.Module(
        body=[
            node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside
        ],
        type_ignores=[],
    )
    return [
        f"line {line}: {name}" for line, name in imported(outside, module=module) if is_within(name, VENDOR_PACKAGES)
    ]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_keeps_to_its_room(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    # The package itself counts as one of its modules, so that relative imports resolve.
    module = module_name(path) + (".__init__" if path.name == "__init__.py" else "")

    assert wrong_imports(source, module=module) == []
    assert device_names(source, file=path.relative_to(ROOT).as_posix()) == []
    assert early_vendor_imports(source, module=module) == []


def test_all_packages_are_looked_at() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in source_files()}

    kept = {
        "app/captioning/captioner.py",
        "llm/engine/engine.py",
        "llm/model/llama.py",
        "vision/encoder.py",
        "demo_bsz.py",
    }
    assert kept <= files


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("llama_adapter.vision.clip", "import llm"),
        ("llama_adapter.vision.clip", "from llama_adapter.llm.errors import LlamaAdapterError"),
        ("llama_adapter.llm.prompt", "def late():\n    from llama_adapter.vision import image"),
        ("llama_adapter.llm.prompt", "import llama_adapter.app.models.spec"),
        ("llama_adapter.vision.image", "from llama_adapter.app import spec"),
        ("llama_adapter.llm.model.llama", "from llama_adapter.runtime.devices.backend import Backend"),
        ("llama_adapter.llm.model.llama", "from ..runtime import backend"),
        ("llama_adapter.llm.model.llama", "from llama_adapter.llm import engine"),
        ("llama_adapter.llm.runners.eager", "import llama_adapter.llm.engine.engine"),
        ("llama_adapter.app.cli", "from scripts import train_embedded"),
    ],
)
def test_an_import_against_the_direction_is_found(module: str, source: str) -> None:
    assert len(wrong_imports(source, module=module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("llama_adapter.app.captioning.assemble", "import llama_adapter.llm.load\nfrom vision import encoder"),
        ("llama_adapter.llm.engine.engine", "from llama_adapter.llm.runners.eager import Executor"),
        ("llama_adapter.llm.runners.eager", "from llama_adapter.llm.model.kv import KVCache"),
        ("llama_adapter.llm.weights.meta", "from llama_adapter.llm.model import llama\nfrom . import names"),
        ("llama_adapter.vision.image", "import application"),
    ],
)
def test_an_import_with_the_direction_is_fine(module: str, source: str) -> None:
    assert wrong_imports(source, module=module) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize()",
        "device = 'cuda'",
        "device = f'cuda:{0}'",
        "def to(*, npu=0): pass",
        "tensor.npu()",
        "import onnxruntime",
        "from ais_bench.infer import interface",
        "if device.startswith('NPU'): pass",
    ],
)
def test_the_name_of_a_device_is_found(source: str) -> None:
    assert device_names(source, file="llm/engine/engine.py")
    assert not device_names(source, file="runtime/devices/backend.py")


@pytest.mark.parametrize("source", ['"""Not for cuda."""', "# cuda", "inputs = 'an input'", "barracuda = 1"])
def test_words_about_devices_are_fine(source: str) -> None:
    assert device_names(source, file="llm/engine/engine.py") == []


@pytest.mark.parametrize("file", TELLERS)
def test_texts_for_people_may_name_devices_and_code_beside_them_may_not(file: str) -> None:
    assert device_names("help='cpu or cuda'", file=file) == []
    assert device_names("torch.cuda", file=file)


@pytest.mark.parametrize(
    "source",
    ["import torch_npu", "try:\n    import onnxruntime\nexcept ImportError: pass", "if 1:\n from acl import rt"],
)
def test_an_early_import_of_a_vendor_package_is_found(source: str) -> None:
    assert len(early_vendor_imports(source, module="llama_adapter.runtime.devices.backend")) == 1


def test_a_vendor_package_may_be_imported_where_it_is_used() -> None:
    assert (
        early_vendor_imports("def open():\n    import torch_npu", module="llama_adapter.runtime.devices.backend") == []
    )
