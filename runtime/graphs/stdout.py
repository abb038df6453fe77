"""Catches what native libraries print on stdout: stdout is for data, and the words help in error messages."""

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
_QUOTED = 6  # lines that an error message can take
_LOCK = threading.Lock()  # the descriptor belongs to the whole process


class Caught:
    """What was printed; filled at the end of the block."""

    text = ""

    def complaints(self) -> str:
        """The last lines that are no success messages, joined into one for an error's message."""
        quoted, _ = self._split()
        return " | ".join(quoted)

    def rest(self) -> str:
        """All lines but those of `complaints`."""
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
    """Catch what is written to file descriptor 1 in the block.

    aclruntime prints its messages, and the only useful words of its errors, with C's `fprintf(stdout)`, on every call
    for an OM with gears. Behind a pipe, C's buffer would mix them with our data much later, so it is emptied at both
    ends. The block is one call of the library, which holds Python's lock, so hardly anything else prints meanwhile.
    Nothing is lost: the library's own lines go to the log, others to stderr. After an error, `complaints` are the
    caller's to report, and the rest is passed on.

    Pointing descriptor 1 at stderr for good would take stdout from a host program that uses us as a library.
    """
    caught = Caught()
    try:
        with _LOCK:
            _flush()
            try:
                stdout = os.dup(1)
            except OSError:  # closed: nothing can get among data
                yield caught
                return
            with _into_file(stdout, caught):
                yield caught
    except Exception:
        _pass_on(caught.rest())
        raise
    except BaseException:  # no message quotes it
        _pass_on(caught.text)
        raise
    _pass_on(caught.text)


@contextmanager
def _into_file(stdout: int, caught: Caught) -> Iterator[None]:
    """Point descriptor 1 at a file; then back at `stdout`, which is closed."""
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
    """Undo a `logging.basicConfig(stream=sys.stdout)`, as ais_bench's modules call it when imported.

    Otherwise every library's INFO messages would go to stdout from then on.
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
    """Python's own buffer and C's."""
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
