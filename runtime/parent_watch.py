"""Ends a process when its parent ends, for any reason. Imports only small modules of the standard library."""

import fcntl
import os
import signal
import sys
from contextlib import suppress


def die_with(pipe: int) -> None:
    """Have the kernel kill this process when the other end of `pipe` is closed, even while native code runs.

    PR_SET_PDEATHSIG is not suitable: it watches the thread that started this process, and reading threads
    are short-lived.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)  # otherwise SIGIO is sent, which also ends a process
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        os.read(pipe, 1)  # returns only if the parent has already ended, because the parent writes nothing
        sys.exit()
