"""Asks a question in a process of its own, with a time limit: what ends or hangs there is an answer, not an accident.

The questions themselves are functions elsewhere, see app/doctor/probes.py.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

State = Literal["ok", "absent", "broken"]

# The child finds packages where this process would, whatever its own start would add or leave out; -P for what it
# imports before it knows, which a `json.py` in the current folder must not be.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from llama_adapter.runtime.child_process import answer; answer(sys.argv[2:])"
)


def ok(found: str, **facts: Any) -> dict[str, Any]:
    """An answer: it is there and works. `facts` are for whoever asked."""
    return {"state": "ok", "found": found, "hint": "", **facts}


def absent(hint: str = "") -> dict[str, Any]:
    """An answer: it is not installed."""
    return {"state": "absent", "found": "", "hint": hint}


def broken(found: str, *, hint: str = "") -> dict[str, Any]:
    """An answer: it is installed, and cannot be used as it is."""
    return {"state": "broken", "found": found, "hint": hint}


def ask_child(question: str, *arguments: str, environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """What `module:function` returns for the arguments in a child: one of the answers above.

    A child that raises, dies, hangs or says nothing makes the answer `broken`, with the reason as what was found.
    """
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), question, *arguments]
    ran = run_program(command, environ=environ, seconds=seconds)
    if isinstance(ran, str):
        return broken(f"its check {ran}")
    if ran.returncode < 0:
        return broken(f"its check was ended by signal {-ran.returncode}", hint=last_line(ran.stderr))
    try:
        return dict(json.loads(ran.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return broken(f"its check failed: {last_line(ran.stderr) or f'exit code {ran.returncode}'}")


def answer(arguments: Sequence[str]) -> None:
    """Runs in the child: the answer is the last line on stdout; whatever the question prints goes to stderr."""
    question, *rest = arguments
    channel = os.dup(1)
    os.dup2(2, 1)
    module, _, function = question.partition(":")
    ask = getattr(importlib.import_module(module), function)
    try:
        said = ask(*rest)
    except Exception as error:  # whatever it stumbled over is the answer
        said = broken(one_line(f"{type(error).__name__}: {error}"))
    os.write(channel, (json.dumps(said) + "\n").encode())


def run_program(
    command: Sequence[str], *, environ: Mapping[str, str], seconds: float
) -> "subprocess.CompletedProcess[str] | str":
    """What a program printed and how it ended, or in words why it did not end by itself."""
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
    """The last line that is not empty, which is where errors stand; else an empty text."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def one_line(text: str) -> str:
    """The text with all white space as single spaces."""
    return " ".join(text.split())
