"""Between inputs and answers: gives every question of a picture a number, and knows which were answered before."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.captioning.captioner import ModelInfo
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.inputs import PictureInput
from llama_adapter.app.jobs.questions import TemplateError, fill, picture_variables, questions_about
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.reading.reader import PictureReading
from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.picture_names import escaped_name
from llama_adapter.app.records.record import Record, answer_to_record, picture_key, record_id
from llama_adapter.app.records.settings import record_settings
from llama_adapter.app.tasks.answers import Answer, AnswerError
from llama_adapter.app.tasks.question import Question
from llama_adapter.llm.engine.sampling_params import SamplingParams

_NOTHING_ASKED = AnswerError(
    code="prompt",
    message="Wanted a question about this picture, but its line has none; write one there, or pass --question for all.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Escaped:
    """A question as earlier versions recorded it, which escaped what they called unprintable in names."""

    label: str
    shown: str  # its prompt, which the escaped name may be filled in
    settings: Mapping[str, Any]


@dataclass(slots=True)
class Asked:
    """A question that is under way."""

    shown: str  # its prompt, as a record shows it
    settings: Mapping[str, Any]
    root: str | None  # what the user named and the picture came from
    path: str | None  # of the picture's file, where it is one
    escaped: _Escaped | None = None  # where earlier versions had another name for the picture
    has_failed: bool = False  # in an earlier run
    supersedes: tuple[str, ...] = ()  # names that failed in an earlier run, and gave this picture now


class JobPlanner:
    """Makes work of inputs, and records of answers.

    Reading threads may call `wants`, and the thread that draws the inputs `item`; the rest is of one thread.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        *,
        spec: CaptionerSpec,
        info: ModelInfo,
        sampling: SamplingParams,
        run: str,
        earlier: RecordIndex | None = None,
        retry_errors: bool = False,
        needs_question: bool = False,
    ) -> None:
        self.num_known, self.num_known_failed = 0, 0  # questions that an earlier run answered, and those it failed at
        self._lock = threading.Lock()
        self._questions = tuple(questions)
        self._spec, self._info, self._sampling, self._run = spec, info, sampling, run
        self._earlier, self._retry_errors, self._needs_question = earlier, retry_errors, needs_question
        self._settings: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._asked: dict[int, Asked] = {}
        self._superseded: set[str] = set()  # names whose failures a record of this run supersedes
        self._num_asked = 0

    def item(self, picture: PictureInput) -> tuple[WorkItem, list[Answer]]:
        """The work that a picture means, and failures of questions that cannot be put."""
        failures: list[Answer] = []
        questions = []
        variables = picture_variables(picture.label, picture.columns)
        for question in questions_about(picture.questions, common=self._questions):
            try:
                filled, error = fill(question, variables), None
            except TemplateError as problem:
                filled, error = question, AnswerError(code="prompt", message=f"{problem}; {problem.hint}.")
            if self._needs_question and filled.is_caption and picture.error is None:
                error = _NOTHING_ASKED
            asked = self._ask(filled, picture)
            asked.escaped = self._escaped(question, picture)
            asked.supersedes = self._superseded_by(picture)
            prompt = filled.prompt(self._info.default_prompt)
            work = WorkQuestion(index=self._num_asked - 1, prompt=prompt, task=filled.task)
            if error is None:
                questions.append(work)
            elif not self._is_known("", picture.label, asked, work.index):
                failures.append(_failure(work.index, picture.label, asked.shown, error))
        source = picture.source if picture.error is None else _unreadable(picture.error)
        return WorkItem(picture=source, label=picture.label, questions=tuple(questions)), failures

    def wants(self, item: WorkItem, digest: str) -> tuple[WorkQuestion, ...]:
        """The questions of an item that no earlier run answered; those that one did are done with."""
        if self._earlier is None:
            return item.questions
        return tuple(
            question
            for question in item.questions
            if not self._is_known(digest, item.label, self._asked[question.index], question.index)
        )

    def asked(self, answer: Answer) -> Asked:
        """What an answer is to; it is done with."""
        return self._asked.pop(answer.index)

    def record(self, answer: Answer, asked: Asked) -> Record:
        """The record of an answer."""
        record = answer_to_record(answer, model_digest=self._info.digest, sampling=asked.settings, run=self._run)
        record = {**record, "id": self._id(answer.digest, answer.picture, asked), "prompt": asked.shown}
        if asked.supersedes:
            record["supersedes"] = list(asked.supersedes)
        return record

    def _superseded_by(self, picture: PictureInput) -> tuple[str, ...]:
        """What failed in an earlier run, and gave a picture now for the first time in this one."""
        if self._earlier is None:
            return ()
        # Earlier versions wrote escapes into names.
        found_in = dict.fromkeys(name for label in picture.found_in for name in (label, escaped_name(label)))
        names = [name for name in found_in if name not in self._superseded and self._earlier.has_failed(name)]
        self._superseded.update(names)
        return tuple(names)

    def _ask(self, question: Question, picture: PictureInput) -> Asked:
        asked = Asked(
            shown=question.shown(self._info.default_prompt),
            settings=self._settings_of(question),
            root=picture.root,
            path=picture.source if isinstance(picture.source, str) else None,
        )
        self._asked[self._num_asked] = asked
        self._num_asked += 1
        return asked

    def _is_known(self, digest: str, label: str, asked: Asked, index: int) -> bool:
        if self._earlier is None:
            return False
        own_id = self._id(digest, label, asked)
        missing_id = self._id("", label, asked)
        state = self._earlier.claim(own_id, label, path=asked.path)
        if state is None and asked.escaped is not None:
            label = asked.escaped.label
            own_id, missing_id = self._id(digest, label, asked.escaped), self._id("", label, asked.escaped)
            state = self._earlier.claim_escaped(own_id, label)
        if state is None:
            return False
        if asked.supersedes:
            return False  # else no record of this run would say that those do not fail any more
        if state == "answered" and self._earlier.has_failed_since(own_id, label, failure_id=missing_id):
            return False  # it is back: without a new record, exports would go on telling that it is missing
        if state == "failed" and self._retry_errors:
            asked.has_failed = True
            return False
        with self._lock:
            self.num_known += 1
            self.num_known_failed += state == "failed"
        del self._asked[index]
        return True

    def _escaped(self, question: Question, picture: PictureInput) -> _Escaped | None:
        label = escaped_name(picture.label)
        if self._earlier is None or label == picture.label:
            return None
        with suppress(TemplateError):  # then nothing is filled in
            question = fill(question, picture_variables(label, picture.columns))
        return _Escaped(
            label=label, shown=question.shown(self._info.default_prompt), settings=self._settings_of(question)
        )

    def _id(self, digest: str, label: str, asked: Asked | _Escaped) -> str:
        return record_id(
            picture_key(digest, label), prompt=asked.shown, model_digest=self._info.digest, sampling=asked.settings
        )

    def _settings_of(self, question: Question) -> dict[str, Any]:
        key = (question.task, question.form, question.input)
        if key not in self._settings:
            if len(self._settings) >= 1024:  # every line of a manifest may bring another input
                self._settings.clear()
            self._settings[key] = record_settings(
                self._spec,
                info=self._info,
                sampling=self._sampling,
                task=question.task,
                form=question.form,
                input=question.input,
            )
        return self._settings[key]


def _unreadable(error: AnswerError) -> PictureReading:
    return PictureReading(digest="", pixels=None, error=error, elapsed_ms=0.0)


def _failure(index: int, label: str, shown: str, error: AnswerError) -> Answer:
    return Answer(
        index=index,
        picture=label,
        digest="",
        prompt=shown,
        text="",
        token_ids=(),
        finish="error",
        error=error,
        ms={"total": 0.0},
    )
