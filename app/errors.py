"""One table: what went wrong -> exit code, HTTP status and hint; and how an error is told on stderr.

Errors are looked up by the name of their class, so that nothing has to be imported for it; those of a device, which
have no class of their own, by their text.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from llama_adapter.app.terminal.stderr_lines import forget, say
from llama_adapter.runtime.devices.host_memory import tells_shortage
from llama_adapter.runtime.devices.npu_errors import NpuFailure, explain_npu_error, shorten_npu_error
from llama_adapter.runtime.text import shown_text
from llama_adapter.runtime.torch_import import explain_torch_import


class Exit(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PICTURE_ERRORS = 3  # finished, and some pictures have an error in the place of an answer
    INTERRUPTED = 130


class UsageError(Exception):
    """A command line that cannot be meant; `hint` says what to do next, or is empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What an error of one class means outside; `hint` is for errors that carry none of their own."""

    exit_code: Exit
    http_status: int
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error as people and other programs are told of it."""

    exit_code: Exit
    http_status: int
    sentence: str
    hint: str = ""


_OUT_OF_MEMORY = Rule(exit_code=Exit.FAILED, http_status=503, hint="try a smaller --batch-size")
_DEVICE_FAILED = Rule(exit_code=Exit.FAILED, http_status=500)
_NO_THREAD = Rule(
    exit_code=Exit.FAILED,
    http_status=503,
    hint="the limit on processes or memory is reached; `ulimit -u` and `ulimit -v` show both",
)
_NO_TORCH = Rule(exit_code=Exit.FAILED, http_status=500)
_UNEXPECTED = Rule(
    exit_code=Exit.FAILED, http_status=500, hint="this is a fault of the program; --debug shows where it happened"
)

RULES: Mapping[str, Rule] = {
    "llama_adapter.app.errors.UsageError": Rule(exit_code=Exit.USAGE, http_status=400),
    "llama_adapter.app.records.record.RecordFileError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.app.records.loss.RecordFileLostError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.app.records.file.RecordFileLockedError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.app.scale.options.WorkersFailedError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.app.jobs.result_writer.InputGoneError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.app.jobs.result_writer.TooManyErrorsError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.app.inputs.errors.InputsError": Rule(exit_code=Exit.USAGE, http_status=400),
    "llama_adapter.app.reading.process_pool.ReadingProcessError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.app.jobs.questions.TemplateError": Rule(exit_code=Exit.USAGE, http_status=400),
    # The first two say their status themselves.
    "llama_adapter.app.http_api.problems.ApiError": Rule(exit_code=Exit.FAILED, http_status=400),
    "llama_adapter.app.http_api.picture_errors.PictureRefusedError": Rule(exit_code=Exit.FAILED, http_status=400),
    "llama_adapter.app.http_api.running.AddressError": Rule(
        exit_code=Exit.FAILED,
        http_status=500,
        hint="choose another --port (0 takes a free one), or an address of this machine as --host",
    ),
    "llama_adapter.app.web.uploads.ForeignFileError": Rule(exit_code=Exit.FAILED, http_status=400),
    "llama_adapter.app.online.reading_pool.ReadingDroppedError": Rule(exit_code=Exit.FAILED, http_status=503),
    "llama_adapter.app.online.types.ServiceError": Rule(exit_code=Exit.FAILED, http_status=503),
    "llama_adapter.app.online.types.BusyError": Rule(exit_code=Exit.FAILED, http_status=429),
    "llama_adapter.app.online.types.UnavailableError": Rule(exit_code=Exit.FAILED, http_status=503),
    "llama_adapter.vision.errors.PictureError": Rule(exit_code=Exit.PICTURE_ERRORS, http_status=400),
    "llama_adapter.vision.weights.VisionCheckpointError": Rule(
        exit_code=Exit.FAILED, http_status=500, hint="`llama-adapter doctor` with the same model flags says more"
    ),
    "llama_adapter.vision.errors.EncoderError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.llm.errors.LlmError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.llm.errors.CheckpointError": Rule(
        exit_code=Exit.FAILED, http_status=500, hint="`llama-adapter doctor` with the same model flags says more"
    ),
    # `runtime.tensor_files.files` turns these into a CheckpointError that names the file.
    "llama_adapter.runtime.tensor_files.pickles.PickleError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.runtime.tensor_files.pickles.ForeignObjectError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.runtime.tensor_files.torch_files.CompressedError": Rule(exit_code=Exit.FAILED, http_status=500),
    "llama_adapter.llm.errors.PromptTooLongError": Rule(exit_code=Exit.USAGE, http_status=400),
    "llama_adapter.llm.errors.PromptError": Rule(exit_code=Exit.USAGE, http_status=400),
    "llama_adapter.llm.errors.DeviceError": Rule(exit_code=Exit.USAGE, http_status=500),
    "torch.OutOfMemoryError": _OUT_OF_MEMORY,
    "builtins.MemoryError": _OUT_OF_MEMORY,
    # A value that our own settings refuse; the messages are written for users.
    "builtins.ValueError": Rule(exit_code=Exit.USAGE, http_status=400),
    "builtins.OSError": Rule(
        exit_code=Exit.FAILED, http_status=500, hint="check the path, its permissions and the disk"
    ),
    "builtins.ModuleNotFoundError": Rule(
        exit_code=Exit.FAILED,
        http_status=500,
        hint="the packages are in the project's environment: run `make demo` once, then `source .venv/bin/activate`",
    ),
    # The reader of a pipe (`head`) has what it wanted.
    "builtins.BrokenPipeError": Rule(exit_code=Exit.OK, http_status=500),
    "builtins.KeyboardInterrupt": Rule(exit_code=Exit.INTERRUPTED, http_status=503),
}


def rule_for(error: BaseException) -> Rule:
    """The rule of the error's class, or of the nearest base class in the table."""
    if _is_failed_allocation(error):
        return _OUT_OF_MEMORY
    if explain_torch_import(error) is not None:
        return _NO_TORCH
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # Python's words
        return _NO_THREAD
    if (failure := _device_failure(error)) is not None:
        return _OUT_OF_MEMORY if failure.is_memory else _DEVICE_FAILED
    for base in type(error).__mro__:
        rule = RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            return rule
    return _UNEXPECTED


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was not enough, of the host or of a device, or the error came of that: less at once may do."""
    earlier: BaseException | None = error
    seen: list[BaseException] = []
    while earlier is not None and all(earlier is not other for other in seen):
        if rule_for(earlier) is _OUT_OF_MEMORY:
            return True
        seen.append(earlier)
        earlier = earlier.__cause__ or earlier.__context__
    return False


def describe(error: BaseException) -> Problem:
    """The error in a sentence and a hint."""
    rule = rule_for(error)
    sentence = str(getattr(error, "message", "")) or _own_words(error)
    failure = _device_failure(error)
    if failure is not None:
        sentence = f"{failure.sentence[0].upper()}{failure.sentence[1:]}: {shorten_npu_error(str(error))}"
        return Problem(exit_code=rule.exit_code, http_status=rule.http_status, sentence=sentence, hint=failure.hint)
    if rule is _OUT_OF_MEMORY:
        sentence = "The memory is not enough" + (f": {sentence}" if sentence else "")
    elif rule is _UNEXPECTED:
        sentence = f"Unexpected {type(error).__name__}: {sentence}"
    hint = str(getattr(error, "hint", "")) or rule.hint
    sentence, hint = explain_torch_import(error) or (sentence, hint)
    return Problem(exit_code=rule.exit_code, http_status=rule.http_status, sentence=sentence, hint=hint)


def format_problem(problem: Problem) -> str:
    """The lines for stderr: the sentence and, apart from it, the hint, both as `shown_text`."""
    line = f"error: {shown_text(problem.sentence)}"
    return f"{line}\n\nhint: {shown_text(problem.hint)}" if problem.hint else line


def run_guarded(action: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command; an error becomes its lines on stderr and its exit code, with a traceback only for `debug`."""
    _make_standard_streams_usable()
    try:
        exit_code = action()
        sys.stdout.flush()  # here, where a reader that has gone away is still noticed
    except SystemExit as request:  # argparse, after it printed help or version
        return int(request.code or 0)
    except BrokenPipeError as error:
        forget_stdout()
        return rule_for(error).exit_code
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            say("\n".join(shown_text(line) for line in traceback.format_exc().splitlines()))
        problem = describe(error)
        said = "interrupted" if problem.exit_code == Exit.INTERRUPTED else format_problem(problem)
        say(said)
        return problem.exit_code
    return exit_code


def forget_stdout() -> None:
    """From now on stdout goes nowhere: its reader has gone, and the interpreter's last flush would complain."""
    forget(sys.stdout)


def _make_standard_streams_usable() -> None:
    """Closed ones lead nowhere from now on, and a character they lack is written as its escape."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest free number, which is this one. Else the next file to be opened would get it, and with
            # it whatever is said on stdout or stderr.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _own_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": `{error.filename}`" if error.filename is not None else "")
    return " ".join(str(error).split())


def _device_failure(error: BaseException) -> NpuFailure | None:
    """What a device's own error means; torch has one class for all of them."""
    return explain_npu_error(str(error)) if isinstance(error, RuntimeError) else None


def _is_failed_allocation(error: BaseException) -> bool:
    """Where torch has no class of its own for it."""
    return isinstance(error, RuntimeError) and tells_shortage(str(error))
