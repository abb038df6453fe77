"""Lines for people on stderr. No work is worth less because nobody hears of it: what cannot be said is lost."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(text: str, *, end: str = "\n") -> None:
    """Write on stderr at once; once its reader has gone or its disk is full, nothing is said any more."""
    try:
        print(text, end=end, file=sys.stderr, flush=True)
    except BlockingIOError:
        pass  # a pipe that does not wait, and is full for now
    except OSError:
        forget(sys.stderr)


def forget(stream: TextIO) -> None:
    """From now on a standard stream goes nowhere, so that the interpreter's last flush has nothing to complain of."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
