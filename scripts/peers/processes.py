"""Child processes that answer tasks, one at a time."""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from scripts.common import ROOT
from scripts.peers.table import Figure, Reply, Task

Runner = Callable[[Task], Reply]

# Variables that set a child's number of threads in every library.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "ORT_DISABLE_TELEMETRY": "1"}


class Child:
    """A process that answers tasks with the threads of the first one."""

    def __init__(self, task: Task) -> None:
        environment = {**os.environ, **_QUIET, **dict.fromkeys(_THREAD_VARIABLES, str(task.threads))}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.peers.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env=environment,
        )

    def answer(self, task: Task) -> Reply:
        """The child's reply. A crash or a timeout is a failure, with the figures until then; the child has ended."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        timer = threading.Timer(task.timeout_s, end)
        timer.start()
        figures: list[Figure] = []
        try:
            pickle.dump(task, self._stream("stdin"))
            self._stream("stdin").flush()
            while not isinstance(part := pickle.load(self._stream("stdout")), Reply):
                figures.append(part)
        except (EOFError, OSError, pickle.UnpicklingError):
            status = self._process.wait()
            reason = f"took longer than {task.timeout_s:.0f} s" if is_late.is_set() else self._end(status)
            return Reply(figures=figures, problem="failed", reason=reason)
        finally:
            timer.cancel()
        return part

    def _stream(self, name: str) -> Any:
        return getattr(self._process, name)

    def _end(self, status: int) -> str:
        self._errors.seek(0)
        last = (self._errors.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        return f"ended with status {status}: {last}"

    def close(self) -> None:
        """End the process. May be repeated."""
        with contextlib.suppress(OSError):
            self._stream("stdin").close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stream("stdout").close()
        self._errors.close()


def run_child(task: Task) -> Reply:
    """Answer a task in a process of its own."""
    with contextlib.closing(Child(task)) as child:
        return child.answer(task)


class Children:
    """Answers the tasks of a group in one process, which loads its libraries once. A failed process is replaced."""

    def __init__(self) -> None:
        self._children: dict[str, Child] = {}

    def __call__(self, task: Task) -> Reply:
        group, is_alone = _group(task), task.engine.program == "vllm"  # which takes most of the memory, and keeps it
        if is_alone and find_spec("vllm"):
            self.close()
        child = self._children.pop(group, None) or Child(task)
        reply = child.answer(task)
        if reply.problem == "failed" or is_alone:
            child.close()
        else:
            self._children[group] = child
        return reply

    def close(self) -> None:
        """End all processes."""
        while self._children:
            self._children.popitem()[1].close()


def _group(task: Task) -> str:
    """Programs that change their process have one of their own: compilers, and encoders that give all tokens."""
    program = task.engine.program
    own = program if program in ("hf-compiled", "llama.cpp", "vllm") else ""
    return f"{own} {'vision' if task.engine.section == 'vision' else ''}"
