"""New Python interpreters as child processes, which answer one question or communicate over a socket."""

import gc
import importlib
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from llama_adapter.runtime.text import one_line

State = Literal["ok", "absent", "broken"]

# The child gets this process's `sys.path`. -P keeps it from importing a `json.py` of the current folder before that. If
# the child watches its parent, it begins to do so before it imports anything else. Looking for garbage among what it
# imports, and at its end, would take a third of the processor time of a child that imports torch.
_PROGRAM: Final = """
import gc, json, sys
gc.disable()
sys.path[:] = json.loads(sys.argv[1])
if sys.argv[2]:
    from llama_adapter.runtime.parent_watch import die_with
    die_with(int(sys.argv[2]))
from importlib import import_module
module, _, function = sys.argv[3].partition(":")
call = getattr(import_module(module), function)
gc.freeze()
gc.enable()
try:
    call(*sys.argv[4:])
finally:
    gc.freeze()
"""
_PIPE_BYTES: Final = 65536
MAX_SAID_BYTES: Final = 4096


def python_command(
    entry: str, *arguments: str, options: Sequence[str] = (), watched_pipe: int | None = None
) -> list[str]:
    """The command line of an interpreter that calls `entry`, which is `module:function`, with `arguments`.

    `options` are options of the interpreter. `watched_pipe` is a file descriptor: the kernel kills the process when the
    other end of this pipe is closed.
    """
    watched = "" if watched_pipe is None else str(watched_pipe)
    return [sys.executable, "-P", *options, "-c", _PROGRAM, json.dumps(sys.path), watched, entry, *arguments]


# A child that communicates over a socket


class ChildProcess:
    """An interpreter that runs `module:function`, connected to this process by a socket.

    The function gets the file descriptor of its end of the socket as first argument, then `arguments`, all as strings.
    The child runs in a new session, so Ctrl-C reaches this process only.

    With `capture`, the last part of the child's stdout and stderr is kept and `said` gives its last line. Otherwise
    both go to this process's stderr. With `watch_parent`, the kernel kills the child when this process ends.
    """

    def __init__(
        self,
        entry: str,
        *arguments: str,
        environ: Mapping[str, str],
        options: Sequence[str] = (),
        capture: bool = False,
        watch_parent: bool = False,
    ) -> None:
        """Start the child without waiting for it. `environ` is added to this process's environment. Raises OSError."""
        self.connection, theirs = socket.socketpair()
        self._output: io.FileIO | None = None
        self._lifeline: io.FileIO | None = None
        self._said = b""
        handed = [theirs.fileno()]
        output, pipe = 2, None
        if capture:
            reader, output = os.pipe()
            handed.append(output)
            self._output = io.FileIO(reader)
            # Output that is not read in time is lost, so that a decoder with much output never waits for a reader.
            os.set_blocking(reader, False)
            os.set_blocking(output, False)
        if watch_parent:
            # A separate pipe, because the process to kill is a property of the open pipe.
            pipe, ours = os.pipe()
            handed.append(pipe)
            self._lifeline = io.FileIO(ours, "w")
        try:
            self.process = subprocess.Popen(
                python_command(entry, str(handed[0]), *arguments, options=options, watched_pipe=pipe),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[descriptor for descriptor in handed if descriptor != output],
                start_new_session=True,
                env={**os.environ, **environ},
            )
        except BaseException:
            self.release()
            raise
        finally:
            theirs.close()
            for descriptor in handed[1:]:
                os.close(descriptor)

    def has_ended(self, *, within_s: float = 0.0) -> bool:
        """Whether it has ended, or ends within `within_s` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=within_s)
        return self.process.returncode is not None

    def how_it_ended(self) -> str:
        """How the child ended, such as `by SIGSEGV` or `with exit code 1`; empty while it runs."""
        code = self.process.poll()
        return "" if code is None else f"by {_signal_name(-code)}" if code < 0 else f"with exit code {code}"

    def listen(self) -> None:
        """Read the child's output so far, which makes room in the pipe, and keep the last part of it."""
        if self._output is not None and not self._output.closed and (said := self._output.read(_PIPE_BYTES)):
            self._said = (self._said + said)[-MAX_SAID_BYTES:]

    @property
    def said(self) -> str:
        """The last line of the output that `listen` has kept."""
        return last_line(self._said.decode(errors="replace"))

    def release(self) -> None:
        """Close this process's end of the socket and the pipes.

        This ends a child with `watch_parent`. May be repeated.
        """
        self.connection.close()
        for file in (self._output, self._lifeline):
            if file is not None:
                file.close()

    def disown(self) -> None:
        """Give up the child in a process that was forked: only the parent of the child can wait for it."""
        self.release()
        self.process.returncode = 0


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process to its current size plus `num_bytes`."""
    with suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = taken + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


# A child that answers one question


def ok(found: str, **facts: Any) -> dict[str, Any]:
    """An answer: it is installed and works. `facts` are for the calling program."""
    return {"state": "ok", "found": found, "hint": "", **facts}


def absent(hint: str = "") -> dict[str, Any]:
    """An answer: it is not installed."""
    return {"state": "absent", "found": "", "hint": hint}


def broken(found: str, *, hint: str = "") -> dict[str, Any]:
    """An answer: it is installed and does not work."""
    return {"state": "broken", "found": found, "hint": hint}


def ask_child(question: str, *arguments: str, environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Call `question`, which is `module:function`, in a child process; return its answer, one of the dicts above.

    The answer is `broken`, with the reason as `found`, if the child raises, dies, does not end within `seconds`, or
    returns nothing.
    """
    command = python_command(f"{__name__}:answer", question, *arguments)
    ran = run_program(command, environ=environ, seconds=seconds)
    if isinstance(ran, str):
        return broken(f"its check {ran}")
    if ran.returncode < 0:
        return broken(f"its check was ended by signal {-ran.returncode}", hint=last_line(ran.stderr))
    try:
        return dict(json.loads(ran.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return broken(f"its check failed: {last_line(ran.stderr) or f'exit code {ran.returncode}'}")


def answer(question: str, *arguments: str) -> None:
    """Runs in the child. It writes the answer as the last line on stdout. Other output goes to stderr."""
    gc.disable()  # most questions import packages
    channel = os.dup(1)
    os.dup2(2, 1)
    module, _, function = question.partition(":")
    ask = getattr(importlib.import_module(module), function)
    try:
        said = ask(*arguments)
    except Exception as error:  # the failure is the answer
        said = broken(one_line(f"{type(error).__name__}: {error}"))
    os.write(channel, (json.dumps(said) + "\n").encode())


def run_program(
    command: Sequence[str], *, environ: Mapping[str, str], seconds: float
) -> "subprocess.CompletedProcess[str] | str":
    """The output and exit code of a program, or the reason why it did not finish."""
    try:
        return subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} s"
    except OSError as error:
        return f"could not be started: {error.strerror}"


def last_line(text: str) -> str:
    """The last line that is not empty, which usually is the error; an empty string if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
