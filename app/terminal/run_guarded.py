"""Runs a command: an error becomes its lines on stderr and its exit code. Makes closed standard streams usable."""

import io
import os
import sys
import traceback
from collections.abc import Callable

from llama_adapter.app.terminal.stderr_lines import forget, say
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.problems import Problem, describe, rule_for
from llama_adapter.runtime.text import shown_text


def format_problem(problem: Problem) -> str:
    """The lines for stderr: the sentence and, apart from it, the hint, both as `shown_text`."""
    line = f"error: {shown_text(problem.sentence)}"
    return f"{line}\n\nhint: {shown_text(problem.hint)}" if problem.hint else line


def run_guarded(action: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command; an error becomes its lines on stderr and its exit code, with a traceback only for `debug`."""
    _make_standard_streams_usable()
    try:
        exit_code = action()
        sys.stdout.flush()  # here, where a reader that has gone away is still noticed
    except SystemExit as request:  # argparse, after it printed help or version
        return int(request.code or 0)
    except BrokenPipeError as error:
        forget_stdout()
        return rule_for(error).exit_code
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            say("\n".join(shown_text(line) for line in traceback.format_exc().splitlines()))
        problem = describe(error)
        said = "interrupted" if problem.exit_code == ExitCode.INTERRUPTED else format_problem(problem)
        say(said)
        return problem.exit_code
    return exit_code


def forget_stdout() -> None:
    """From now on stdout goes nowhere: its reader has gone, and the interpreter's last flush would complain."""
    forget(sys.stdout)


def _make_standard_streams_usable() -> None:
    """Closed ones lead nowhere from now on, and a character they lack is written as its escape."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest free number, which is this one. Else the next file to be opened would get it, and with
            # it whatever is said on stdout or stderr.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
