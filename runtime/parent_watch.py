"""A process that ends when the one that started it does, however that happens. Imports next to nothing."""

import fcntl
import os
import signal
import sys
from contextlib import suppress


def die_with(lifeline: int) -> None:
    """Have the kernel kill this process when the pipe's other end is closed, even in the midst of a decoder's loop.

    PR_SET_PDEATHSIG would not do: it looks at the thread that started this process, and reading threads come and go.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)  # else it is SIGIO, which ends a process as well
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        os.read(lifeline, 1)  # nothing comes but the end, which was before this
        sys.exit()
