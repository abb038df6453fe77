"""Exit code, HTTP status, message and hint of our errors and of foreign ones."""

import ast
import errno
import importlib
import os
import pickle
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.serving.online.types import BusyError
from llama_adapter.llm.errors import PromptTooLongError
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.device_failures import CODES, MEMORY, OTHER, explain_device_error
from llama_adapter.runtime.errors import (
    CheckpointError,
    DeviceError,
    ExitCode,
    GraphError,
    LlamaAdapterError,
    UsageError,
)
from llama_adapter.runtime.partial import named_after, partial_folder
from llama_adapter.runtime.problems import RULES, describe, rule_for
from llama_adapter.runtime.terminal.run_guarded import format_problem, run_guarded, terminated_as_interrupted
from llama_adapter.vision.errors import PictureError

# Errors that are always caught by our code, which then raises a public error.
ROOT = Path(__file__).resolve().parents[2]
INTERNAL = {
    *("PickleError", "ForeignObjectError"),  # caught by `read_tensor_file`
    "CollectiveError",  # caught by `RankGroup`
    *("NotLoadedError", "ReplicaLostError"),  # caught by `deployed` and `ReplicatedService`
}


def error_classes() -> list[type[BaseException]]:
    """The public exception classes that our packages define."""
    classes = []
    for package in ("app", "llm", "runtime", "vision"):
        for path in sorted((ROOT / package).rglob("*.py")):
            names = [
                node.name
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and any(isinstance(base, ast.Name) and base.id.endswith(("Error", "Exception")) for base in node.bases)
            ]
            if names:
                place = path.relative_to(ROOT).with_suffix("")
                module = importlib.import_module(".".join(["llama_adapter", *place.parts]))
                classes += [getattr(module, name) for name in names if name not in INTERNAL]
    return [kind for kind in classes if issubclass(kind, BaseException)]


@pytest.mark.slow
def test_all_our_errors_descend_from_the_root() -> None:
    kinds = error_classes()

    assert {kind.__module__.split(".")[1] for kind in kinds} == {"app", "llm", "runtime", "vision"}
    assert [kind for kind in kinds if not issubclass(kind, LlamaAdapterError)] == []


@pytest.mark.parametrize("name", RULES)
def test_every_name_in_the_table_is_a_foreign_class(name: str) -> None:
    module, _, kind = name.rpartition(".")
    error_class = getattr(importlib.import_module(module), kind)

    assert not issubclass(error_class, LlamaAdapterError)
    assert f"{error_class.__module__}.{error_class.__qualname__}" == name  # the name by which errors are looked up


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no", hint="yes"),
        PictureError("empty", "no"),
        PromptTooLongError(9, 8),
        GraphError("no", hint="yes"),
        BusyError("no", retry_after_s=2.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling(error: LlamaAdapterError) -> None:
    copy = pickle.loads(pickle.dumps(error))

    assert (type(copy), copy.args, copy.__dict__) == (type(error), error.args, error.__dict__)


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (UsageError("x"), 2, 400),
        (PromptTooLongError(9, 8), 2, 400),
        (DeviceError("x"), 2, 500),
        (CheckpointError("x"), 1, 500),
        (LlamaAdapterError("x"), 1, 500),
        (PictureError("empty", "x"), 3, 400),
        (ValueError("x"), 2, 400),
        (ValueError("in the template: consider renaming 'a'"), 2, 400),
        (ValueError("can't start new thread"), 2, 400),
        (ValueError("failed to map segment from shared object"), 2, 400),
        (ValueError("Failed to initialize cpuinfo"), 2, 400),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 1, 500),
        (FileExistsError(errno.EEXIST, "File exists", "x"), 2, 500),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), 2, 500),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "x/y"), 2, 500),
        (BrokenPipeError(), 0, 500),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 1, 503),
        (MemoryError(), 1, 503),
        (torch.OutOfMemoryError("x"), 1, 503),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, 503),
        (RuntimeError("unable to mmap 100 bytes from file <x>: Cannot allocate memory (12)"), 1, 503),
        (RuntimeError("x"), 1, 500),
        (RuntimeError("can't start new thread"), 1, 503),
        (RuntimeError("ACL stream synchronize failed, error code:507018"), 1, 500),
        (RuntimeError("NPU function error: aclrtMalloc, error code is 207001"), 1, 503),
        (KeyboardInterrupt(), 130, 503),
    ],
)
def test_errors_have_their_codes(error: BaseException, code: int, status: int) -> None:
    rule = rule_for(error)

    assert (rule.exit_code, rule.http_status) == (code, status)


def test_the_hint_of_an_error_precedes_that_of_its_class() -> None:
    assert describe(CheckpointError("x", hint="copy it")).hint == "copy it"
    assert describe(CheckpointError("x")).hint == CheckpointError.default_hint
    assert "where a command has --batch-size" in describe(torch.OutOfMemoryError("tried to allocate 2 GiB")).hint
    assert format_problem(describe(UsageError("no", hint="yes"))) == "error: no\n\nhint: yes"
    assert format_problem(describe(UsageError("no"))) == "error: no"


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "ulimit -v"),
        (RuntimeError("Failed to initialize cpuinfo!"), "mount /proc"),
        (ModuleNotFoundError("No module named 'numpy.typing'; 'numpy' is not a package"), "rename it"),
        (ImportError("cannot import name 'Tensor' from 'torch' (/home/a b/torch.py)"), "rename it"),
        (
            ImportError("cannot import name 'Tensor' from 'torch' (consider renaming '/a/torch.py' if it has"),
            "rename it",
        ),
        (AttributeError("module 'torch' has no attribute 'nn' (consider renaming '/a/torch.py' since it"), "rename it"),
        (OSError("/tmp/kernels.so: failed to map segment from shared object"), "noexec"),
        (OSError(errno.EMFILE, "Too many open files", "a.jpg"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system", "a.jpg"), "check the path"),
        (FileNotFoundError(errno.ENOENT, "No such file", "Too many open files"), "check the path"),
        (FileExistsError(errno.EEXIST, "File exists", "x.jsonl"), "perhaps where a folder is wanted"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "x/y"), "a file is where a folder is wanted"),
        (ImportError("cannot import name 'x' from 'six' (/v/lib/site-packages/six.py)"), "fault of the program"),
        (ImportError(f"cannot import name 'x' from 'typing' ({typing.__file__})"), "fault of the program"),
        (ModuleNotFoundError("No module named 'numpy'"), "install this project's packages"),
    ],
)
def test_the_hint_names_what_the_place_lacks(error: Exception, advised: str) -> None:
    problem = describe(error)

    assert advised in problem.hint
    assert problem.sentence.startswith("Unexpected") is (advised == "fault of the program")


def test_control_characters_of_a_message_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x9b\u202eb\rc\nd"

    def fail() -> int:
        raise UsageError(hostile, hint=hostile)

    shown = "a\\x1b[2J\\x9b\\u202eb\\rc\\nd"
    assert format_problem(describe(UsageError(hostile, hint=hostile))) == f"error: {shown}\n\nhint: {shown}"
    assert run_guarded(fail, debug=True) == ExitCode.USAGE
    assert capsys.readouterr().err.replace("\n", "").isprintable()


@contextmanager
def named_folder(place: Path) -> Iterator[Path]:
    with named_after(place), partial_folder(place) as folder:
        yield folder


@pytest.mark.parametrize("writer", [atomic_write, named_folder, named_after])
def test_a_write_that_fails_names_the_file_that_the_user_asked_for(
    tmp_path: Path, writer: Callable[[Path], AbstractContextManager[object]]
) -> None:
    place = tmp_path / "answers.csv"
    with pytest.raises(OSError, match="No space") as full, writer(place), open("/dev/full", "wb", buffering=0) as disk:
        disk.write(b"a,b")

    assert describe(full.value).sentence == f"No space left on device: `{place}`"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("writer", [atomic_write, partial_folder])
def test_a_place_that_cannot_be_written_to_has_its_own_name(
    writer: Callable[[Path], AbstractContextManager[object]],
) -> None:
    with pytest.raises(OSError, match="No such file") as refused, writer(Path("/proc/answers.csv")):
        pass

    assert describe(refused.value).sentence == "No such file or directory: `/proc/answers.csv`"


NPU_ERROR = """synchronize:build/torch_npu.dir/compiler_depend.ts:107 NPU function error: {call}, error code is {code}
[ERROR] 2026-08-01-09:48:12 (PID:1234, Device:0, RankID:-1) ERR00100 PTA call acl api failed
[Error]: The AI Core execution is abnormal.
        Rectify the fault based on the error information in the ascend log.
EZ9999: Inner Error!
        TraceBack (most recent call last):
"""


def npu_error(code: int) -> RuntimeError:
    return RuntimeError(NPU_ERROR.format(call="aclrtSynchronizeStream", code=code))


def test_each_kind_of_failure_of_the_device_has_a_sentence_and_a_hint(snapshot: SnapshotAssertion) -> None:
    codes = {failure.sentence: code for code, failure in CODES.items()}
    problems = {code: describe(npu_error(code)) for code in [*codes.values(), 507000]}  # 507000 has no row

    assert all(f"error code is {code}" in problem.sentence for code, problem in problems.items())
    told = [f"{problem.sentence.partition(': ')[0]}\n    {problem.hint}" for problem in problems.values()]
    assert "\n".join(told) == snapshot


@pytest.mark.parametrize(
    ("text", "failure", "status"),
    [
        ("call aclnnRmsNorm failed", OTHER, 500),
        ("ACL stream synchronize failed.", OTHER, 500),
        (
            "x.size() mismatch\n[ERROR] 2026-08-01-09:48:12 (PID:1, Device:0, RankID:-1) ERR01001 OPS invalid",
            OTHER,
            500,
        ),
        ("NPU out of memory. Tried to allocate 2 GiB", MEMORY, 503),
        ("NPU error, error code is 500002\nEL0004: no memory", MEMORY, 503),
    ],
)
def test_an_error_of_the_device_without_a_known_code_is_recognised_by_its_words(
    text: str, failure: object, status: int
) -> None:
    assert explain_device_error(text) is failure
    assert describe(RuntimeError(text)).http_status == status


def test_a_long_error_of_the_device_is_shortened() -> None:
    sentence = describe(npu_error(507015)).sentence

    assert "\n" not in sentence
    assert sentence.endswith("error code is 507015 / EZ9999: Inner Error!")


@pytest.mark.parametrize("error", [ValueError("ERR00100"), RuntimeError("ERR1"), RuntimeError("error code is 507015")])
def test_other_errors_are_not_those_of_the_device(error: Exception) -> None:
    assert "NPU" not in describe(error).sentence


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (IndexError("no place"), ExitCode.FAILED, "error: Unexpected IndexError: no place\n\nhint: "),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_unexpected_error_is_reported_as_one_and_an_interruption_in_one_word(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert run_guarded(fail) == code
    told = capsys.readouterr().err
    assert told == said if code == 130 else told.startswith(said)


def run_with(redirection: str, program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a Python program with streams redirected by the shell."""
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", program, *arguments],
        capture_output=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_replaces_a_closed_stream(closed: str, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from llama_adapter.runtime.terminal.run_guarded import run_guarded\n"
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


def test_a_closed_stderr_is_not_redirected_to_stdout() -> None:
    program = "import sys; from llama_adapter.app.command_line.main import main; sys.exit(main(['paint']))"
    ran = run_with("2>&-", program)

    assert (ran.returncode, ran.stdout) == (2, b"")


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(encoding: str) -> None:
    program = (
        "import sys\n"
        "from llama_adapter.runtime.terminal.run_guarded import run_guarded\n"
        "from llama_adapter.runtime.errors import UsageError\n"
        "def action():\n"
        "    print('a\\udcff')\n"
        "    raise UsageError('no b\\udcff')\n"
        "sys.exit(run_guarded(action))\n"
    )

    ran = run_with("", program, PYTHONIOENCODING=encoding)

    assert ran.returncode == 2
    assert (ran.stdout, ran.stderr) == (b"a\\udcff\n", b"error: no b\\udcff\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_writes_ends_by_sigterm_as_by_ctrl_c(number: signal.Signals, tmp_path: Path) -> None:
    beside = tmp_path / "unfinished"

    @terminated_as_interrupted()
    def write() -> int:
        beside.mkdir()
        try:
            signal.raise_signal(number)
        finally:
            beside.rmdir()
        return 0

    assert run_guarded(write) == ExitCode.INTERRUPTED
    assert not beside.exists()
    assert signal.getsignal(number) is signal.SIG_DFL
