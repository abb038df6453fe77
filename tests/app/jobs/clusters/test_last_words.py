"""What a driver prints when Ray ends it from native code."""

import os
from collections.abc import Callable

from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.clusters.runner import last_words
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec


def said(end: Callable[[], object]) -> tuple[str, int]:
    """The stderr and exit code of a fork of this process that sets its last words and calls `end`."""
    job = Job(spec=CaptionerSpec(), inputs=InputSpec(paths=("a",)), questions=(Question(),), out="answers.jsonl")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.dup2(writer, 2)
            os.close(writer)
            with last_words(job):
                end()
            os._exit(0)
        finally:
            os._exit(70)
    os.close(writer)
    with open(reader) as words:
        return words.read(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_killed_process_says_what_is_kept_and_how_to_go_on(snapshot: object) -> None:
    assert said(lambda: os._exit(1)) == snapshot


def test_a_child_process_that_outlives_the_job_does_not_delay_its_end() -> None:
    """The child has inherited the pipe end whose closing the listener waits for."""
    gate, ours = os.pipe()

    def leave_a_child() -> None:
        if not os.fork():
            os.closerange(0, 3)
            os.close(ours)
            os.read(gate, 1)
            os._exit(0)

    assert said(leave_a_child) == ("", 0)
    os.close(ours)
    os.close(gate)
