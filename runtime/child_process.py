"""Fresh Python interpreters as child processes: to ask a question with a time limit, or to talk to over a socket."""

import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from llama_adapter.runtime.text import one_line

State = Literal["ok", "absent", "broken"]

# The child imports from where this process does, whatever its own start would add or leave out. With -P, a `json.py` in
# the current folder is not imported before it knows. Where it watches its parent, it does so before anything else.
_PROGRAM: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
if sys.argv[2]:
    from llama_adapter.runtime.parent_watch import die_with
    die_with(int(sys.argv[2]))
from importlib import import_module
module, _, function = sys.argv[3].partition(":")
getattr(import_module(module), function)(*sys.argv[4:])
"""
_PIPE_BYTES: Final = 65536
MAX_SAID_BYTES: Final = 4096


def python_command(
    entry: str, *arguments: str, options: Sequence[str] = (), watched_pipe: int | None = None
) -> list[str]:
    """The command line of an interpreter that calls `module:function` with `arguments`.

    `options` are the interpreter's own. With `watched_pipe`, a descriptor, it dies with the pipe's other end.
    """
    watched = "" if watched_pipe is None else str(watched_pipe)
    return [sys.executable, "-P", *options, "-c", _PROGRAM, json.dumps(sys.path), watched, entry, *arguments]


# A child to talk to


class ChildProcess:
    """An interpreter that runs `module:function`, with a socket between it and this process.

    The function gets the descriptor of its end of the socket as first argument, then `arguments`, all as texts. The
    child is in a session of its own: Ctrl-C reaches this process only.

    With `capture`, the end of what it writes on stdout and stderr is kept in `said`; else both go to this process's
    stderr. With `watch_parent`, the kernel kills it when this process ends, whatever it is doing then.
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
        """Starts it without waiting for it; `environ` is added to this process's. Raises OSError."""
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
            # What is not read in time is lost, so that a talkative decoder never waits for a reader.
            os.set_blocking(reader, False)
            os.set_blocking(output, False)
        if watch_parent:
            # A pipe of its own: the process to kill is a property of the open pipe.
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
        """In words, such as `by SIGSEGV` or `with exit code 1`; empty while it runs."""
        code = self.process.poll()
        return "" if code is None else f"by {_signal_name(-code)}" if code < 0 else f"with exit code {code}"

    def listen(self) -> None:
        """Keep the end of what it wrote so far, which leaves room for more."""
        if self._output is not None and not self._output.closed and (said := self._output.read(_PIPE_BYTES)):
            self._said = (self._said + said)[-MAX_SAID_BYTES:]

    @property
    def said(self) -> str:
        """The last line that it wrote, as far as `listen` has kept it."""
        return last_line(self._said.decode(errors="replace"))

    def release(self) -> None:
        """Close what belongs to it in this process. A child that watches its parent dies of it. May be repeated."""
        self.connection.close()
        for file in (self._output, self._lifeline):
            if file is not None:
                file.close()

    def disown(self) -> None:
        """In a process that was forked off: the child belongs to the parent, which alone can wait for it."""
        self.release()
        self.process.returncode = 0


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


# A child to ask


def ok(found: str, **facts: Any) -> dict[str, Any]:
    """An answer: it is there and works. `facts` are for the asking program."""
    return {"state": "ok", "found": found, "hint": "", **facts}


def absent(hint: str = "") -> dict[str, Any]:
    """An answer: it is not installed."""
    return {"state": "absent", "found": "", "hint": hint}


def broken(found: str, *, hint: str = "") -> dict[str, Any]:
    """An answer: it is installed and does not work."""
    return {"state": "broken", "found": found, "hint": hint}


def ask_child(question: str, *arguments: str, environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """What the function `module:function` returns for the arguments in a child process: one of the answers above.

    A child that raises, dies, hangs or says nothing gives the answer `broken`, with the reason as `found`.
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
    """Runs in the child. The answer is the last line on stdout; what the question prints goes to stderr."""
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
    """The output and exit code of a program, or a text that says why it did not finish."""
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
    """The last line that is not empty, where errors stand; else an empty text."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
