"""Translates an error for users and clients: exit code, HTTP status, a sentence and a hint.

Errors of this package carry all of these. Other errors are looked up by the name of their class, so that their modules
need not be imported. Errors of a device and others that share a class are looked up by their text, some of the
system's by their number.
"""

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llama_adapter.runtime.device_failures import NpuFailure, explain_device_error, shorten_device_error, tells_shortage
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError
from llama_adapter.runtime.extras import INSTALL_PROJECT
from llama_adapter.runtime.text import one_line
from llama_adapter.runtime.torch_import import explain_torch_import


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Exit code and HTTP status of a foreign error; `hint` applies if the error has none."""

    exit_code: ExitCode = ExitCode.FAILED
    http_status: int = 500
    hint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error as people and other programs read it."""

    exit_code: ExitCode
    http_status: int
    sentence: str
    hint: str = ""
    details: tuple[str, ...] = ()  # several faults, one per line


_OUT_OF_MEMORY = Rule(http_status=503, hint="close other programs; where a command has --batch-size, try a smaller one")
_FAILED = Rule()
_NO_PLACE = Rule(exit_code=ExitCode.USAGE, hint="a file is where a folder is wanted, or the reverse: name another")
_UNEXPECTED = Rule(hint="this is a fault of the program; --debug shows where it happened")

_BY_ERRNO: Mapping[int | None, Rule] = {
    errno.ENOMEM: _OUT_OF_MEMORY,
    errno.EMFILE: Rule(hint="the limit on open files is reached; `ulimit -n` shows it"),
}

# By classes and a pattern of the text, in the words of Python, the loader and torch.
_STANDARD_LIBRARY = re.escape(str(Path(os.__file__).parent))
_FILE_OF_THE_USER = rf"\((?!{_STANDARD_LIBRARY}/|.*-packages/).*/\1\.py\)$"
_HIDING = rf"'\w+' is not a package$|consider renaming '|from '(\w+)' {_FILE_OF_THE_USER}"
_BY_WORDS: Sequence[tuple[type[Exception] | tuple[type[Exception], ...], str, Rule]] = (
    (
        RuntimeError,
        "^can't start new thread$",
        Rule(
            http_status=503, hint="the limit on processes or memory is reached; `ulimit -u` and `ulimit -v` show both"
        ),
    ),
    (
        (ImportError, OSError),
        "failed to map segment from shared object",
        Rule(hint="memory is limited, as `ulimit -v` shows, or this library's file system allows no programs (noexec)"),
    ),
    (
        RuntimeError,
        "Failed to initialize cpuinfo",
        Rule(hint="torch reads /proc/cpuinfo: mount /proc, without `ProcSubset=pid`"),
    ),
    (
        (ImportError, AttributeError),
        _HIDING,
        Rule(hint="a file here or on PYTHONPATH has the name of a package and is imported in its place: rename it"),
    ),
)

# Errors of Python and torch.
RULES: Mapping[str, Rule] = {
    "torch.OutOfMemoryError": _OUT_OF_MEMORY,
    "builtins.MemoryError": _OUT_OF_MEMORY,
    # Our own settings raise these, with messages for users.
    "builtins.ValueError": Rule(exit_code=ExitCode.USAGE, http_status=400),
    "builtins.FileExistsError": Rule(
        exit_code=ExitCode.USAGE, hint="a file is there already, perhaps where a folder is wanted"
    ),
    **dict.fromkeys(("builtins.IsADirectoryError", "builtins.NotADirectoryError"), _NO_PLACE),
    "builtins.OSError": Rule(hint="check the path, its permissions and the disk"),
    "builtins.ModuleNotFoundError": Rule(hint=f"install this project's packages: {INSTALL_PROJECT}"),
    # The reader of a pipe, such as `head`, has finished.
    "builtins.BrokenPipeError": Rule(exit_code=ExitCode.OK),
    "builtins.KeyboardInterrupt": Rule(exit_code=ExitCode.INTERRUPTED, http_status=503),
}


def rule_for(error: BaseException) -> Rule:
    """The error's own exit code and status, or the rule of its nearest base class in the table."""
    if isinstance(error, LlamaAdapterError):
        return Rule(exit_code=error.exit_code, http_status=error.http_status)
    if isinstance(error, RuntimeError) and tells_shortage(str(error)):  # torch has no class for it
        return _OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    for kinds, words, known in _BY_WORDS:
        if isinstance(error, kinds) and re.search(words, str(error)):
            return known
    if (failure := _device_failure(error)) is not None:
        return _OUT_OF_MEMORY if failure.is_memory else _FAILED
    for base in type(error).__mro__:
        rule = RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            return rule
    return _UNEXPECTED


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error or one of its causes says that the host or a device is out of memory."""
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
    hint = str(getattr(error, "hint", "")) or rule.hint
    if failure := _device_failure(error):
        sentence = f"{failure.sentence[0].upper()}{failure.sentence[1:]}: {shorten_device_error(str(error))}"
        hint = failure.hint
    elif rule is _OUT_OF_MEMORY:
        sentence = "The memory is not enough" + (f": {sentence}" if sentence else "")
    elif rule is _UNEXPECTED:
        sentence = f"Unexpected {type(error).__name__}: {sentence}"
    sentence, hint = explain_torch_import(error) or (sentence, hint)
    details = error.details if isinstance(error, LlamaAdapterError) else ()
    return Problem(
        exit_code=rule.exit_code, http_status=rule.http_status, sentence=sentence, hint=hint, details=details
    )


def _own_words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": `{error.filename}`" if error.filename is not None else "")
    return one_line(str(error))


def _device_failure(error: BaseException) -> NpuFailure | None:
    """The meaning of an error of a device, found by its text, because torch has one class for all of them."""
    return explain_device_error(str(error)) if isinstance(error, RuntimeError) else None
