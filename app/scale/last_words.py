"""What is said where the driver ends without a chance to speak: Ray ends the process itself once its node is dead."""

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

# Says its argument when its stdin ends without a byte: this process has ended then.
_LISTENER: Final = "import sys; sys.stdin.buffer.read(1) or print(sys.argv[1], file=sys.stderr)"

_PATIENCE_S: Final = 5.0  # until the listener ends, which has nothing left to do


@contextmanager
def last_words(job: Job) -> Iterator[None]:
    """Within it, a process beside this one prints a sentence on stderr if this one ends from outside of Python.

    The exit code does not change: 1 where Ray ends the process.
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
        # Its own session: Ctrl-C is for the job, and a shell that ends must not end it first.
        listener = subprocess.Popen(command, stdin=reader, stdout=subprocess.DEVNULL, start_new_session=True)
    finally:
        os.close(reader)
    try:
        yield
    finally:
        with suppress(OSError):  # it was ended itself
            os.write(writer, b".")
        os.close(writer)
        try:
            listener.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            listener.kill()
            listener.wait()
