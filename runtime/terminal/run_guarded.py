"""Runs a command; an error becomes a message on stderr and an exit code."""

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.partial import named_after
from llama_adapter.runtime.problems import Problem, describe, rule_for
from llama_adapter.runtime.terminal.stderr_lines import forget, say
from llama_adapter.runtime.text import shown_text


def format_problem(problem: Problem) -> str:
    """The message for stderr: the sentence, then one line per detail, then the hint after a blank line."""
    details = (f"\n  {shown_text(line)}" for line in problem.details)
    text = f"error: {shown_text(problem.sentence)}{''.join(details)}"
    return f"{text}\n\nhint: {shown_text(problem.hint)}" if problem.hint else text


def run_guarded(action: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command and return its exit code; errors are printed on stderr, with a traceback if `debug`."""
    _make_standard_streams_usable()
    try:
        exit_code = action()
        with named_after("stdout"):
            sys.stdout.flush()  # here, where a closed pipe can still be handled
    except SystemExit as request:  # argparse, after it printed help or version
        return int(request.code or 0)
    except BrokenPipeError as error:
        forget_stdout()
        return rule_for(error).exit_code
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            say("\n".join(shown_text(line) for line in traceback.format_exc().splitlines()))
        problem = describe(error)
        say("interrupted" if problem.exit_code == ExitCode.INTERRUPTED else format_problem(problem))
        return problem.exit_code
    return exit_code


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does: commands then remove their unfinished files."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def forget_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush does not fail on a closed pipe."""
    forget(sys.stdout)


def _make_standard_streams_usable() -> None:
    """Redirect closed standard streams to the null device, and escape characters that a stream cannot encode."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` takes the lowest free descriptor, which is this one. Otherwise the next file opened would get this
            # descriptor, and the output would be written into that file.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until exit
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
