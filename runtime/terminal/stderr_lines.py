"""Messages on stderr. A failure to write one never stops the work."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(text: str, *, end: str = "\n") -> None:
    """Print on stderr and flush. After a write error, such as a full disk, stderr is redirected to the null device."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except BlockingIOError:
        pass  # a non-blocking pipe that is full
    except OSError:
        forget(sys.stderr)


def can_overwrite_lines() -> bool:
    """Whether stderr is a terminal that obeys control sequences; TERM=dumb, or none, says that it does not."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def say_count(done: int, everything: int, what: str) -> None:
    """On a terminal, show a count in one line, which the next count replaces."""
    if can_overwrite_lines():
        say(f"\r{done} of {everything} {what}\x1b[K", end="\n" if done == everything else "")


def forget(stream: TextIO) -> None:
    """Redirect a standard stream to the null device, so that the interpreter's last flush does not fail."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
