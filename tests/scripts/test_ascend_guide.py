"""The pages docs/ascend*.md agree with the program: their commands are accepted, and their errors are the program's.

So do the tables of errors in Chinese.
"""

import ast
import functools
import re
import runpy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import demo_bsz
from llama_adapter.app.command_line.main import build_parser
from llama_adapter.runtime.device_failures import CODES
from llama_adapter.runtime.devices import Capabilities, resolve_dtype, settle_mode
from llama_adapter.runtime.devices.npu import open_npu
from llama_adapter.runtime.devices.npu_load import explain_loading
from llama_adapter.runtime.devices.npu_operators import FAMILIES
from llama_adapter.runtime.errors import DeviceError, LlamaAdapterError
from llama_adapter.runtime.graphs.atc import explain_failure
from llama_adapter.runtime.graphs.om_failures import import_failed, opening_failed, running_failed
from llama_adapter.runtime.problems import RULES, describe

ROOT = Path(__file__).resolve().parents[2]
GUIDE, CHINESE, QUESTIONS = (
    "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob(pattern)))
    for pattern in ("ascend*.md", "zh/ascend*.md", "zh/faq.md")
)
PROGRAMS = ("llama-adapter", "python scripts/pth2onnx.py", "python demo_bsz.py")


def commands() -> list[str]:
    """This project's commands in the guide's code blocks, without comments and line breaks."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip().startswith(PROGRAMS)]


def failures(page: str) -> list[tuple[str, int]]:
    """The messages in a page's tables of failures, with their exit codes."""
    rows = [line.split("|") for table in tables_of_failures(page) for line in table.splitlines()]
    return [(message, int(code)) for _, _, code, cell, *_ in rows for message in re.findall(r"`([^`]+)`", cell)]


def tables_of_failures(page: str) -> list[str]:
    """The lines of each table without its head; there is one table per stage."""
    head = r"^\| (?:what happened \| exit|现象 \| 退出码) \|[^\n]*\n\| ---[^\n]*\n"
    return re.findall(head + r"((?:\|[^\n]*\n)+)", page, re.MULTILINE)


def parsers() -> dict[str, Callable[[list[str]], Any]]:
    export = runpy.run_path(str(ROOT / "scripts" / "pth2onnx.py"))["build_parser"]()
    makers = (build_parser().parse_args, export.parse_args, demo_bsz.parser().parse_args)
    return dict(zip(PROGRAMS, makers, strict=True))


@pytest.mark.parametrize("command", commands())
def test_commands_are_accepted(command: str) -> None:
    program = next(name for name in PROGRAMS if command.startswith(name))

    parsers()[program](shlex.split(command.removeprefix(program), comments=True))


def test_all_steps_are_shown() -> None:
    text = "\n".join(commands())
    for step in (*PROGRAMS, "export om", "doctor --environment", "doctor --encoder", "--print-command"):
        assert step in text


def test_commands_say_where_they_run() -> None:
    blocks = re.findall(r"^## A [^\n]*\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    place = None
    for line in lines:
        if line.startswith("```"):
            place = None
        if named := re.search(r"#.*\[(any machine|with CANN|with the card)\]", line):
            place = named[1]
        if line.startswith(PROGRAMS):
            assert place is not None, line
            assert "npu:0" not in line or place == "with the card", line
    assert len(blocks) == 3


# Complete messages, made by the program with all values filled in. Other messages are looked up in its sources.
Told = tuple[str, int]  # a message without backticks, and its exit code


def refused(call: Callable[[], object]) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        call()
    return caught.value


def errors_of_the_program() -> Iterator[BaseException]:
    two = SimpleNamespace(npu=SimpleNamespace(device_count=lambda: 2, is_available=lambda: True))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("llama_adapter.runtime.devices.npu.load_torch_npu", lambda: two)
        yield refused(lambda: open_npu(3))
    backend: Any = SimpleNamespace(
        name="npu:0 (Ascend310P3)", capabilities=Capabilities(dtypes=FAMILIES[1].dtypes, graph_modes=())
    )
    yield refused(lambda: resolve_dtype("bfloat16", backend=backend))
    yield refused(lambda: settle_mode("npugraph_ex", backend=backend, strict=True))
    yield from map(explain_loading, LOADING_ERRORS)
    for code in CODES:
        yield RuntimeError(f"NPU function error: aclrtSynchronizeStream, error code is {code}\nEZ9999: Inner Error!")
    yield RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.00 GiB total capacity)")
    yield MemoryError("no room")
    # An OM.
    failed = RuntimeError("load model from file failed")
    yield opening_failed(failed, said="", file="clip.om", soc="Ascend310P3", device=0)
    failed = RuntimeError("[207001]")
    yield running_failed(failed, said="", file="x.om", soc="", device=0, wanted="float16", given="uint8")
    for missing in ("ais_bench", "aclruntime", "ais_bench.infer"):
        yield import_failed(ModuleNotFoundError(name=missing))
    yield import_failed(ImportError("libascendcl.so: cannot open shared object file"))
    # ATC.
    for output in ("No module named 'sympy'", "soc_version Ascend1 is invalid", "E16002: x", "E10501: x"):
        yield explain_failure(output, returncode=1)


@pytest.fixture(scope="module")
def told() -> list[Told]:
    problems = map(describe, errors_of_the_program())
    return [
        *((without_ticks(problem.sentence), int(problem.exit_code)) for problem in problems),
        # In the user's own program: a traceback, with Python's exit code for it.
        *((text.replace(HOLE, "torch_npu"), 1) for text in texts_of_torch() if "backend extension: " in text),
    ]


LOADING_ERRORS = (
    ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
    Exception("ASCEND_HOME_PATH : /opt/cann does not exist. Please run set_env.sh"),
    ImportError("/x/libtorch_npu.so: undefined symbol: _ZN3c10"),
    RuntimeError(  # the first line is that of torch_npu 2.13
        "Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can install the cpu version of "
        "PyTorch to use your npu device, or use the cuda device with 'export TORCH_DEVICE_BACKEND_AUTOLOAD=0'.\n"
        "[ERROR] (PID:1, Device:-1, RankID:-1) ERR00007 PTA feature not supported"
    ),
)
HOLE = "\0"  # stands for a value in an f-string


def templates(path: Path) -> set[tuple[str, str]]:
    """All strings in a source, f-strings with holes, each with the class of the error that it is raised as, or ""."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    classes = {
        id(node.args[0]): node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error")
        if node.args
    }
    found = set()
    for node in nodes:
        kind = classes.get(id(node), "")
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
            found.add((text, kind))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.add((node.value, kind))
    return found


@functools.cache
def texts_of_torch() -> list[str]:
    """The `templates` of the file that `import torch` runs, without backticks."""
    return [without_ticks(text) for text, _ in templates(Path(torch.__file__))]


def all_errors(kind: type[LlamaAdapterError]) -> set[type[LlamaAdapterError]]:
    """The class and all its imported subclasses."""
    return {kind}.union(*map(all_errors, kind.__subclasses__()))


@functools.cache
def texts_of_the_program() -> list[tuple[str, int | None]]:
    """The `templates` of all our files, without backticks.

    A text that is raised as one of our errors has an exit code.
    """
    files = [file for package in ("app", "llm", "runtime", "vision") for file in sorted((ROOT / package).rglob("*.py"))]
    codes = {name.rpartition(".")[2]: int(rule.exit_code) for name, rule in RULES.items()}
    codes |= {kind.__name__: int(kind.exit_code) for kind in all_errors(LlamaAdapterError)}
    return [(without_ticks(text), codes.get(kind)) for text, kind in sorted(set().union(*map(templates, files)))]


def without_ticks(text: str) -> str:
    """A message as the guide writes it, with backticks only around the whole."""
    return text.replace("`", "")


def whole_message(message: str) -> re.Pattern[str]:
    """The pattern that a whole text of the program must match to be this message of the guide.

    `...` in the guide stands for one character or more. A hole of a template matches only `...`.
    """
    return re.compile(".+".join(map(re.escape, message.split("..."))), re.DOTALL)


@pytest.mark.parametrize(("message", "code"), dict.fromkeys(failures(GUIDE) + failures(QUESTIONS)))
def test_messages_are_those_of_the_program(message: str, code: int, told: list[Told]) -> None:
    assert len(message.replace("...", "")) >= 20
    says = whole_message(message).fullmatch
    codes = {code for text, code in (*told, *texts_of_the_program()) if says(text)}
    assert codes
    assert codes - {None} == {code}


@pytest.mark.parametrize(
    "message",
    [
        "npu:0 (...) has no mode",
        "No device named npu:4; available: npu:0, npu:1",
        "torch_npu is not installed, and Ascend NPUs need it badly",
        "The OM clip.om is a symbolic link, which InferSession refuses",
        "An operator failed on the NPU: ... error code is 107002...",
    ],
)
def test_foreign_messages_are_detected(message: str, told: list[Told]) -> None:
    says = whole_message(message).fullmatch
    assert not any(says(text) for text, _ in (*told, *texts_of_the_program()))


def test_all_tables_of_failures_are_read() -> None:
    tables = tables_of_failures(GUIDE)

    assert len(tables) == 4
    assert len(failures(GUIDE)) >= sum(len(table.splitlines()) for table in tables) >= 35
    assert len(failures(QUESTIONS)) == 3


def test_the_guide_in_chinese_has_the_same_failures() -> None:
    assert failures(CHINESE) == failures(GUIDE)
