"""Turns inputs into work items, and leaves out questions that earlier runs answered."""

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, NamedTuple

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.prompts import Prompt
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.task import WithTokenIds
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.questions import TemplateError, fill, is_template, picture_variables, questions_about
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.key import RecordKey, record_settings
from llama_adapter.app.jobs.records.record import Record, moved_record
from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.app.pictures.reading.sources import Source
from llama_adapter.runtime.text import shown_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A job's data on one question about one picture: the `tag` of the question and of its answer."""

    key: RecordKey
    root: str | None  # the folder or archive that the user named
    path: str | None  # the picture's file, if it has one
    supersedes: tuple[str, ...]  # names that failed in an earlier run and under which this picture was found now
    has_failed: bool = False  # in an earlier run or in another shard, which recorded it


class _Plan(NamedTuple):
    """How a question is asked and recorded; the same for every picture."""

    prompt: Prompt
    shown: str
    settings: Mapping[str, Any]


class JobPlanner:
    """Plans one run of a job. `item` must be called by the thread that iterates the inputs; `wants` is thread-safe."""

    def __init__(self, job: Job, *, spec: CaptionerSpec, info: ModelInfo, earlier: RecordIndex | None = None) -> None:
        """`spec` and `info` are those of the loaded model; `earlier` holds the records of earlier runs, if any."""
        self.num_known, self.num_known_failed = 0, 0  # questions recorded by an earlier run, and failures among them
        self.num_moved = 0  # of the former, those whose picture had another name
        self.moved: SimpleQueue[Record] = SimpleQueue()  # their records under the present name, to be written
        self.job, self.earlier = job, earlier
        self._lock = threading.Lock()
        self._spec, self._info = spec, info
        self._plan = lru_cache(maxsize=1024)(self._plan_of)  # every line of a manifest may have another question
        self._text_prefix = info.text_prefix(job.text_prefix) if job.has_texts else None
        self._has_templates = any(map(is_template, job.questions))
        self._superseded: set[str] = set()  # names that a record of this run supersedes
        self._indices = itertools.count()
        self.targets: list[tuple[str, RecordKey, str]] = []  # digest, key and `tgt` of each question, if written

    def item(self, picture: PictureInput) -> tuple[WorkItem, list[Answer]]:
        """The work for a picture, and failed answers to questions that cannot be asked."""
        questions, failures = [], []
        common, own = self.job.questions, () if self.job.is_encoding else picture.questions
        supersedes = self._superseded_by(picture)
        for question in questions_about(own, common=common) if own else common:
            filled, error = self._fill(question, picture) if own or self._has_templates else (question, None)
            if self.job.needs_question and filled.is_caption and picture.error is None:
                error = _nothing_asked(picture)
            for number in range(self.job.n):
                asked = Asked(
                    key=self._key(filled, picture.label, number),
                    root=picture.root,
                    path=picture.source if isinstance(picture.source, str) else None,
                    supersedes=supersedes,
                    has_failed=picture.is_elsewhere,
                )
                if self.job.paddlenlp_out is not None:
                    digest = "" if picture.error is not None or error is not None else self._text_prefix or ""
                    self.targets.append((digest, asked.key, picture.columns.get("tgt", "")))
                supersedes = ()  # one record per name is enough
                index = next(self._indices)
                if error is None:
                    prompt = self._plan(filled).prompt
                    task = WithTokenIds(filled.task) if self.job.output_ids else filled.task
                    questions.append(WorkQuestion(index=index, prompt=prompt, task=task, tag=asked, number=number))
                elif (left := self._left_to_ask(asked, "")) is not None:
                    failures.append(failed_answer(index, left, error))
        source: Source | PictureReading
        if picture.error is not None:
            source = PictureReading(digest=picture.digest, error=picture.error)
        elif picture.source is None:
            source = PictureReading(digest=self._text_prefix or "")
        else:
            source = picture.source
        return WorkItem(picture=source, label=picture.label, questions=tuple(questions)), failures

    def wants(self, item: WorkItem, digest: str) -> tuple[WorkQuestion, ...]:
        """The questions of an item that no earlier run answered; the others are added to `num_known`.

        `digest` is the digest of the picture's bytes, "" if they could not be read.
        """
        if self.earlier is None:
            return item.questions
        left = ((question, self._left_to_ask(question.tag, digest)) for question in item.questions)
        return tuple(replace(question, tag=asked) for question, asked in left if asked is not None)

    def _superseded_by(self, picture: PictureInput) -> tuple[str, ...]:
        """Names that failed in an earlier run and under which this picture is found now; each once per run."""
        if self.earlier is None:
            return ()
        found_in = dict.fromkeys(picture.found_in)
        names = [name for name in found_in if name not in self._superseded and self.earlier.has_failed(name)]
        self._superseded.update(names)
        return tuple(names)

    def _left_to_ask(self, asked: Asked, digest: str) -> Asked | None:
        """The question if it must be asked; None if an earlier run answered it, whose record is then claimed."""
        if self.earlier is None:
            return asked
        key = asked.key
        record_id, failure_id = key.id(digest), key.id("")
        with self._lock:
            claim = self.earlier.claim(record_id, key.picture, path=asked.path)
            if claim is None or asked.supersedes:  # only a new record can supersede those names
                return asked
            has_failed = claim.state == "failed"
            if claim.former is not None:
                self.num_moved += 1
                self.moved.put(moved_record(claim.former, picture=key.picture))
            elif not has_failed and self.earlier.has_failed_since(record_id, key.picture, failure_id=failure_id):
                return asked  # readable again: without a new record, exports would still treat it as missing
            if has_failed and self.job.retry_errors:
                return replace(asked, has_failed=True)
            self.num_known += 1
            self.num_known_failed += has_failed
        return None

    def _fill(self, question: Question, picture: PictureInput) -> tuple[Question, AnswerError | None]:
        if not self.job.fills_variables:
            return question, None
        try:
            return fill(question, picture_variables(picture.label, picture.columns)), None
        except TemplateError as problem:
            return question, AnswerError(code="prompt", message=f"{problem}; {problem.hint}.")

    def _key(self, question: Question, label: str, number: int) -> RecordKey:
        _, shown, settings = self._plan(question)
        settings = {**settings, "number": number} if number else settings  # the first is that of a job with one
        return RecordKey(picture=label, prompt=shown, model_digest=self._info.digest, settings=settings)

    def _plan_of(self, question: Question) -> _Plan:
        settings = record_settings(
            self._spec,
            info=self._info,
            sampling=self.job.sampling,
            task=question.task,
            form=question.form,
            input=question.input,
        )
        default = "" if self.job.inputs.is_text else self._info.default_prompt
        return _Plan(question.prompt(default), question.shown(default), settings)


def failed_answer(index: int, asked: Asked, error: AnswerError) -> Answer:
    """The answer to a question that failed before it reached a captioner."""
    key = asked.key
    return Answer.failed(error, index=index, picture=key.picture, prompt=key.prompt, ms={"total": 0.0}, tag=asked)


def _nothing_asked(picture: PictureInput) -> AnswerError:
    place = shown_name(picture.found_in[-1] if picture.found_in else picture.label)
    message = (
        f"Wanted a question or prompt in `{place}`, but it has none: its cell is empty or missing; write one there, or "
        "pass --question or --prompt for all."
    )
    return AnswerError(code="prompt", message=message)
