"""The root of all errors of this package: each carries its message, a hint, its exit code and its HTTP status."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2  # a wrong command line, setting or data file, or a device that is not available
    PICTURE_ERRORS = 3  # finished, but some pictures have an error instead of an answer
    INTERRUPTED = 130


class LlamaAdapterError(Exception):
    """Base of every error of this package.

    `message` says what was expected and what was found, and `hint` what to do next; the hint may be empty. `details`
    lists several faults, one per line after the message. Errors can be pickled.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED
    http_status: int = 500
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        for line in self.details:
            self.add_note(line)
        self.hint = hint or self.default_hint
        if self.hint:
            self.add_note(f"hint: {self.hint}")  # a traceback shows it

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[LlamaAdapterError], args: tuple[Any, ...], state: dict[str, Any]) -> LlamaAdapterError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(LlamaAdapterError):
    """A command line or a setting that is not valid."""

    exit_code = ExitCode.USAGE
    http_status = 400


class DeviceError(LlamaAdapterError):
    """A device, dtype or mode that is not available on this machine."""

    exit_code = ExitCode.USAGE


class TooLittleMemoryError(DeviceError):
    """A model that does not fit into the free memory of its device."""


class CheckpointError(LlamaAdapterError):
    """Weights or a tokenizer that are damaged, do not fit together, or belong to another model."""

    default_hint = "`llama-adapter doctor` with the same model flags says more"


class GraphError(LlamaAdapterError):
    """An exported graph (ONNX or OM), or a program that makes or runs one, that does not work here."""
