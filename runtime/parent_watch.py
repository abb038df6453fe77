"""Ends a process when the one that started it ends, however that happens. Imports next to nothing."""

import fcntl
import os
import signal
import sys
from contextlib import suppress


def die_with(pipe: int) -> None:
    """Have the kernel kill this process when the other end of `pipe` is closed, even amid a decoder's loop.

    PR_SET_PDEATHSIG will not do: it watches the thread that started this process, and reading threads come and go.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)  # else it is SIGIO, which ends a process as well
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        os.read(pipe, 1)  # the parent writes nothing: it ended before this
        sys.exit()
