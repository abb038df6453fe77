"""What a driver prints when Ray ends it from outside of Python."""

import subprocess
import sys
from pathlib import Path

CODE = """
import os, signal, sys
from llama_adapter.app.inputs import InputSpec
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.tasks.question import Question
from llama_adapter.app.scale.runner import last_words
from llama_adapter.app.models.spec import CaptionerSpec

job = Job(spec=CaptionerSpec(), inputs=InputSpec(paths=("a",)), questions=(Question(),), out="answers.jsonl")
with last_words(job):
    {end}
"""


def said(end: str, *, timeout_s: float | None = None) -> tuple[int, str]:
    command = [sys.executable, "-c", CODE.format(end=end)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False, timeout=timeout_s
    )
    return done.returncode, done.stderr


def test_a_killed_process_says_what_is_kept_and_how_to_go_on() -> None:
    code, words = said("os._exit(1)")

    assert code == 1
    assert "error: This process was ended from outside" in words
    assert "The records in `answers.jsonl` are kept" in words
    assert "the same command goes on where this one ended" in words


def test_a_child_process_that_outlives_the_job_does_not_delay_its_end() -> None:
    """It has inherited the end of the pipe that the listener waits for."""
    assert said("os.fork() or (os.closerange(0, 3), __import__('time').sleep(60), os._exit(0))", timeout_s=45) == (
        0,
        "",
    )


def test_an_ordinary_exit_says_nothing() -> None:
    assert said("sys.exit(3)") == (3, "")
