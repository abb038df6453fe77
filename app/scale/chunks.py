"""What goes to the workers and comes back: pictures by the dozen. Plain values, no Ray and no torch."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.record import picture_key, record_id
from llama_adapter.app.tasks.answers import Answer
from llama_adapter.app.tasks.prompts import RawPrompt, shown_prompt
from llama_adapter.app.tasks.task import task_settings
from llama_adapter.runtime.problems import Problem

MAX_PICTURES = 64  # of 150 kB each as pixels: large enough to keep a batch full, small enough to be done anew
MAX_BYTES = 32 * 2**20  # of pictures that come as bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Pictures that are read, answered and, where a worker is lost, done anew together."""

    number: int
    items: tuple[WorkItem, ...]
    is_sure: bool = False  # everything in it is to be answered, whatever earlier runs seem to have done
    num_losses: int = 0  # times that it did not come back


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadChunk:
    """A chunk whose pictures were looked at."""

    number: int
    items: tuple[WorkItem, ...]  # their pictures are readings
    problem: Problem | None = None  # why none could be read


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredChunk:
    """What came of a chunk."""

    number: int
    digests: tuple[str, ...]  # of the pictures, in their order
    answers: tuple[Answer, ...]
    left_out: frozenset[int] = frozenset()  # positions of pictures that an earlier run seems to have answered
    host: str = ""  # that it was answered on
    busy_s: float = 0.0
    problem: Problem | None = None  # why the job cannot go on


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What tells a worker which pictures it may leave out; the driver has the last word on each."""

    index: RecordIndex
    model_digest: str
    settings: Mapping[str, Any]  # as `record_settings` has them, but for what is of a question
    retry_errors: bool

    def has(self, item: WorkItem, digest: str) -> bool:
        """Whether every question about a picture seems to be answered."""
        return all(self._has(question, item.label, digest) for question in item.questions)

    def _has(self, question: WorkQuestion, label: str, digest: str) -> bool:
        state = self.index.look_up(self._id(question, label, digest), label)
        return state in ("answered", "elsewhere") or (state == "failed" and not self.retry_errors)

    def _id(self, question: WorkQuestion, label: str, digest: str) -> str:
        """The id of the record of a question's answer."""
        prompt = question.prompt
        of_question = {
            **task_settings(question.task),
            "form": "raw" if isinstance(prompt, RawPrompt) else "instruction",
            "input": prompt[1] if isinstance(prompt, tuple) else None,
        }
        return record_id(
            picture_key(digest, label),
            prompt=shown_prompt(prompt),
            model_digest=self.model_digest,
            sampling={**self.settings, **of_question},
        )


def sizes(first: int, *, num_alike: int) -> Iterator[int]:
    """How many pictures the chunks have: few at first, so that no worker waits for its first, and then more."""
    size = min(first, MAX_PICTURES)
    while size < MAX_PICTURES:
        yield from itertools.repeat(size, num_alike)
        size = min(2 * size, MAX_PICTURES)
    yield from itertools.repeat(MAX_PICTURES)


def in_chunks(items: Iterable[WorkItem], sizes: Iterator[int]) -> Iterator[tuple[WorkItem, ...]]:
    """Items in groups of these sizes, smaller where the pictures' own bytes are many."""
    group: list[WorkItem] = []
    num_bytes, size = 0, next(sizes)
    for item in items:
        group.append(item)
        num_bytes += len(item.picture) if isinstance(item.picture, bytes) else 0
        if len(group) >= size or num_bytes >= MAX_BYTES:
            yield tuple(group)
            group, num_bytes, size = [], 0, next(sizes)
    if group:
        yield tuple(group)


def answered(answers: Sequence[Answer], items: Sequence[WorkItem]) -> dict[int, list[Answer]]:
    """The answers by the position of their picture."""
    position_of = {question.index: position for position, item in enumerate(items) for question in item.questions}
    by_position: dict[int, list[Answer]] = {}
    for answer in answers:
        by_position.setdefault(position_of[answer.index], []).append(answer)
    return by_position
