"""The table of errors is complete, and errors are told in its form."""

import ast
import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.errors import RULES, Exit, UsageError, describe, format_problem, rule_for, run_guarded
from llm.errors import CheckpointError, DeviceError, LlmError, PromptTooLongError
from tests.app.golden import ROOT
from vision.errors import PictureError


def error_classes() -> list[str]:
    """Names of all classes of errors that our packages define."""
    names = []
    for package in ("app", "llm", "vision"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and any(
                    isinstance(base, ast.Name) and base.id.endswith(("Error", "Exception")) for base in node.bases
                ):
                    names.append(f"{module}.{node.name}")
    return names


@pytest.mark.parametrize("name", error_classes())
def test_every_error_of_ours_is_in_the_table(name: str) -> None:
    assert name in RULES


def test_the_errors_of_all_three_packages_were_found() -> None:
    assert {name.split(".")[0] for name in error_classes()} == {"app", "llm", "vision"}


@pytest.mark.parametrize("name", RULES)
def test_every_name_in_the_table_is_a_class(name: str) -> None:
    module, _, kind = name.rpartition(".")
    error_class = getattr(importlib.import_module(module), kind)

    assert issubclass(error_class, BaseException)
    # That is how errors are looked up.
    assert f"{error_class.__module__}.{error_class.__qualname__}" == name


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (UsageError("x"), 2, 400),
        (PromptTooLongError(9, 8), 2, 400),
        (DeviceError("x"), 2, 500),
        (CheckpointError("x"), 1, 500),
        (LlmError("x"), 1, 500),
        (PictureError("empty", "x"), 3, 400),
        (ValueError("x"), 2, 400),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 1, 500),
        (BrokenPipeError(), 0, 500),
        (MemoryError(), 1, 503),
        (torch.OutOfMemoryError("x"), 1, 503),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, 503),
        (RuntimeError("x"), 1, 500),
        (KeyboardInterrupt(), 130, 503),
    ],
)
def test_errors_have_their_codes(error: BaseException, code: int, status: int) -> None:
    rule = rule_for(error)

    assert (rule.exit_code, rule.http_status) == (code, status)


def test_a_class_that_is_not_listed_counts_as_its_nearest_base() -> None:
    class Late(CheckpointError):
        pass

    assert rule_for(Late("x")) == RULES["llm.errors.CheckpointError"]


def test_the_hint_of_an_error_comes_before_that_of_the_table() -> None:
    assert describe(CheckpointError("x", hint="copy it")).hint == "copy it"
    assert describe(CheckpointError("x")).hint == RULES["llm.errors.CheckpointError"].hint


def test_sentence_and_hint_stand_apart() -> None:
    assert format_problem(describe(UsageError("no", hint="yes"))) == "error: no\n\nhint: yes"
    assert format_problem(describe(UsageError("no"))) == "error: no"


def test_a_full_disk_is_named_with_its_file() -> None:
    problem = describe(OSError(errno.ENOSPC, "No space left on device", "answers.jsonl"))

    assert problem.sentence == "No space left on device: `answers.jsonl`"


def test_too_little_memory_suggests_a_smaller_batch() -> None:
    assert describe(torch.OutOfMemoryError("tried to allocate 2 GiB")).hint == "try a smaller --batch-size"


def test_an_unexpected_error_is_not_taken_for_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(lambda: [][1]) == Exit.FAILED
    assert capsys.readouterr().err.startswith("error: Unexpected IndexError: list index out of range\n\nhint: ")


def test_an_interruption_is_told_in_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_guarded(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_exit_codes_are_those_of_the_documentation() -> None:
    assert [int(code) for code in Exit] == [0, 1, 2, 3, 130]


CLOSED = ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"]


def run_with(redirection: str, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A Python program with streams redirected as the shell does it."""
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", program, *arguments],
        capture_output=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("closed", CLOSED)
def test_no_file_takes_the_place_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from app.errors import run_guarded\n"
        "def action():\n"
        "    with open(sys.argv[1], 'wb') as file:\n"
        "        os.write(1, b'prose')\n"
        "        os.write(2, b'prose')\n"
        "        print('prose', sys.stdout.isatty(), sys.stderr.isatty(), file=sys.stderr)\n"
        "        print('prose', flush=True)\n"
        "    return 7\n"
        "sys.exit(run_guarded(action))\n"
    )
    file = tmp_path / "answers.jsonl"

    ran = run_with(closed, program, str(file))

    assert ran.returncode == 7
    assert file.read_bytes() == b""


@pytest.mark.parametrize("closed", CLOSED)
def test_what_is_said_on_a_closed_stderr_is_not_said_on_stdout(closed: str) -> None:
    ran = run_with(closed, "import sys; from app.cli import main; sys.exit(main(['paint']))")

    assert ran.returncode == 2
    assert ran.stdout == b""
    assert ran.stderr.startswith(b"" if "2>&-" in closed else b"error: ")


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_name_that_the_terminal_cannot_show_is_written_as_an_escape(encoding: str) -> None:
    program = (
        "import sys\n"
        "from app.errors import UsageError, run_guarded\n"
        "def action():\n"
        "    print('a\\udcff')\n"
        "    raise UsageError('no b\\udcff')\n"
        "sys.exit(run_guarded(action))\n"
    )

    ran = run_with("", program, PYTHONIOENCODING=encoding)

    assert ran.returncode == 2
    assert (ran.stdout, ran.stderr) == (b"a\\udcff\n", b"error: no b\\udcff\n")
