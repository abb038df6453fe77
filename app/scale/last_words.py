"""Explains on stderr why the driver ended: Ray ends the process itself once its node is dead."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.result_writer import how_to_go_on
from llama_adapter.app.terminal.run_guarded import format_problem
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.problems import Problem

# Prints its argument when its stdin ends without a byte: then this process has ended.
_LISTENER: Final = "import sys; sys.stdin.buffer.read(1) or print(sys.argv[1], file=sys.stderr)"

_PATIENCE_S: Final = 5.0  # for the listener to end


@contextmanager
def last_words(job: Job) -> Iterator[None]:
    """Within it, a second process prints a sentence on stderr if this one is ended from outside of Python.

    The exit code does not change: it is 1 if Ray ends the process.
    """
    kept = "The answers so far are printed above" if job.out is None else f"The records in `{job.out}` are kept"
    problem = Problem(
        exit_code=ExitCode.FAILED,
        http_status=500,
        sentence="This process was ended from outside: Ray does that when its node on this machine, or its head, is "
        f"dead. {kept}, and the pictures under way have no answer",
        hint=f"check that the cluster runs (`ray status`) and this machine has free memory; then {how_to_go_on(job)}",
    )
    reader, writer = os.pipe()
    try:
        command = [sys.executable, "-I", "-S", "-c", _LISTENER, format_problem(problem)]
        # Its own session: neither Ctrl-C nor the end of a shell must end it first.
        listener = subprocess.Popen(command, stdin=reader, stdout=subprocess.DEVNULL, start_new_session=True)
    finally:
        os.close(reader)
    try:
        yield
    finally:
        with suppress(OSError):  # the listener has ended
            os.write(writer, b".")
        os.close(writer)
        try:
            listener.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            listener.kill()
            listener.wait()
