"""Work, records and known answers for tests of jobs over many machines."""

from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.jobs.clusters.chunks import Known
from llama_adapter.app.jobs.clusters.worker import LoadedModel
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import Asked, JobPlanner
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.key import RecordKey
from llama_adapter.app.jobs.records.record import Record, answer_to_record
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec, PictureInput
from llama_adapter.vision.pixels import PixelRule
from tests.app.recorded import answered
from tests.app.toys import INFO

SPEC = CaptionerSpec(batch_size=8)
FIRST = LoadedModel(host="here", spec=SPEC, info=INFO, pixels=PixelRule(image_size=32))


def item(index: int, *, size: int | None = None) -> WorkItem:
    source: str | bytes = f"{index}.png" if size is None else bytes(size)
    key = RecordKey(picture=f"{index}.png", prompt="What?", model_digest=INFO.digest, settings={})
    asked = Asked(key=key, root=None, path=None, supersedes=())
    question = WorkQuestion(index=index, prompt="What?", tag=asked)
    return WorkItem(picture=source, label=f"{index}.png", questions=(question,))


QUESTIONS = (
    Question(),
    Question(instruction="Is it {stem}?", task=OneOf(("yes", "no"))),
    Question(instruction="Look", input="closely"),
    Question(raw="A picture of"),
)


def planner_of(earlier: RecordIndex | None = None, *, retry_errors: bool = False) -> JobPlanner:
    out = None if earlier is None else "answers.jsonl"
    job = Job(spec=SPEC, inputs=InputSpec(), questions=QUESTIONS, out=out, retry_errors=retry_errors)
    return JobPlanner(job, spec=SPEC, info=INFO, earlier=earlier)


def record_of(answer: Answer) -> Record:
    return answer_to_record(answer, key=answer.tag.key, run="run")


def answer_to(question: WorkQuestion, label: str, digest: str, **changes: Any) -> Answer:
    return answered(index=question.index, picture=label, digest=digest, tag=question.tag, **changes)


def known_after(folder: Path, *, digest: str, num_questions: int, retry_errors: bool = False, **changes: Any) -> Known:
    """The answers that workers know of after a run that answered some questions about a.png."""
    planner = planner_of()
    work, _ = planner.item(PictureInput(source="a.png", label="a.png"))
    with RecordWriter(folder / "answers.jsonl") as file:
        for question in work.questions[:num_questions]:
            file.write(record_of(answer_to(question, "a.png", digest, **changes)))
    return Known(index=RecordIndex([folder / "answers.jsonl"]), retry_errors=retry_errors)


class FakeRay:
    """Ray whose calls end when and as a test says. A reference is the number of a call, from 1."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        ray = pytest.importorskip("ray")
        self.num_calls, self.ended = 0, dict[int, Any]()
        patch.setattr(ray, "wait", self._wait)
        patch.setattr(ray, "get", self._get)

    def call(self, *_: object, **__: object) -> int:
        self.num_calls += 1
        return self.num_calls

    def _wait(self, references: list[int], *, num_returns: int = 1, timeout: float) -> tuple[list[int], list[int]]:
        done = [one for one in references if one in self.ended][:num_returns]
        return done, [one for one in references if one not in done]

    def _get(self, reference: int) -> Any:
        if isinstance(self.ended[reference], Exception):
            raise self.ended[reference]
        return self.ended[reference]
