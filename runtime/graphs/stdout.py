"""Catches the output of native libraries on stdout, which is reserved for data. Error messages quote it."""

import ctypes
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOG = logging.getLogger(__name__)
_LEVELS = {"DEBUG": logging.DEBUG, "INFO": logging.DEBUG, "WARN": logging.WARNING, "ERROR": logging.WARNING}
_LINE = re.compile(r"\[(?:ACL )?(DEBUG|INFO|WARN|ERROR)(?:ING)?\] ")
_QUOTED = 6  # most lines that an error message quotes
_LOCK = threading.Lock()  # all threads share file descriptor 1


class Caught:
    """The text that was printed, available after the context has ended."""

    text = ""

    def complaints(self) -> str:
        """The last lines that are not informational, joined into one line for an error's message."""
        quoted, _ = self._split()
        return " | ".join(quoted)

    def rest(self) -> str:
        """All lines that are not in `complaints`."""
        _, others = self._split()
        return "\n".join(others)

    def _split(self) -> tuple[list[str], list[str]]:
        lines = [line.strip() for line in self.text.splitlines()]
        telling = [number for number, line in enumerate(lines) if line and not line.startswith(("[INFO]", "[DEBUG]"))]
        chosen = set(telling[-_QUOTED:])
        quoted = [line for number, line in enumerate(lines) if number in chosen]
        return quoted, [line for number, line in enumerate(lines) if number not in chosen]


@contextmanager
def stdout_caught() -> Iterator[Caught]:
    """Catch output to file descriptor 1 inside this context.

    aclruntime prints its messages, including the only useful text of its errors, with C's `fprintf(stdout)`; for an OM
    with gears, at every call. If stdout is a pipe, C's buffer would mix them with our data much later, so the buffer is
    flushed at the start and at the end. The context encloses one call of the library, which holds Python's global lock,
    so hardly any other output occurs in it. No output is lost: lines of the library go to the log, other lines to
    stderr. After an error, the caller reports `complaints`, and the other lines are passed on.

    Redirecting descriptor 1 to stderr permanently would take stdout from a program that uses this package as a library.
    """
    caught = Caught()
    try:
        with _LOCK:
            _flush()
            try:
                stdout = os.dup(1)
            except OSError:  # stdout is closed, so there is no data to mix with
                yield caught
                return
            with _into_file(stdout, caught):
                yield caught
    except Exception:
        _pass_on(caught.rest())
        raise
    except BaseException:  # no error message will quote the output
        _pass_on(caught.text)
        raise
    _pass_on(caught.text)


@contextmanager
def _into_file(stdout: int, caught: Caught) -> Iterator[None]:
    """Redirect descriptor 1 to a file; at the end, restore it from `stdout`, which is then closed."""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            _flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            file.seek(0)
            caught.text = file.read().decode(errors="replace")


@contextmanager
def root_logger_kept() -> Iterator[None]:
    """Undo `logging.basicConfig(stream=sys.stdout)`, which ais_bench's modules call when they are imported.

    Otherwise the INFO messages of all libraries would go to stdout from then on.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in list(root.handlers):
            if handler not in handlers:
                root.removeHandler(handler)
        root.setLevel(level)


def _flush() -> None:
    """Flush the stdout buffers of Python and C."""
    with suppress(AttributeError, OSError, ValueError):  # absent or closed
        sys.stdout.flush()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)


def _pass_on(text: str) -> None:
    for line in text.splitlines():
        if match := _LINE.match(line):
            _LOG.log(_LEVELS[match[1]], "%s", line)
        elif line.strip():
            print(line, file=sys.stderr)
