"""Chunks of pictures that go to workers, and their answers. Plain values, without Ray and torch."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.jobs.job_planner import failed_answer
from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.key import RecordKey
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.runtime.problems import Problem

MAX_PICTURES = 64  # per chunk, 150 kB each as pixels: enough to fill batches, few enough to repeat
MAX_BYTES = 32 * 2**20  # per chunk, of pictures given as bytes
MAX_LOSSES = 4  # of a chunk; after the second loss, its pictures are tried one by one

_LOST = AnswerError(
    code="lost",
    message="Wanted an answer, but the process that was to give it ended each time; see its machine's memory and logs, "
    "and run the command again.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Pictures that are read and answered together, and repeated together if a worker is lost."""

    items: tuple[WorkItem, ...]
    is_sure: bool = False  # whether all of it must be answered, regardless of earlier records
    num_losses: int = 0  # how often a process or machine was lost that had the chunk
    problem: Problem | None = None  # the reason, if its pictures could not be read

    def after_loss(self) -> tuple[list["Chunk"], list[Answer]]:
        """What to hand out again, and failed answers if it was lost `MAX_LOSSES` times."""
        losses = self.num_losses + 1
        if losses >= MAX_LOSSES:
            questions = (question for item in self.items for question in item.questions)
            return [], [failed_answer(question.index, question.tag, _LOST) for question in questions]
        groups = [self.items] if losses == 1 else [(item,) for item in self.items]
        return [replace(self, items=group, num_losses=losses) for group in groups], []


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredChunk:
    """The answers to a chunk. Pictures that an earlier run seems to have answered have none."""

    digests: tuple[str, ...]  # of the pictures, in their order
    answers: tuple[Answer, ...]
    host: str = ""  # the machine that answered it
    busy_s: float = 0.0
    problem: Problem | None = None  # the reason, if the job cannot continue


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """Tells a worker which pictures it may leave out. The driver makes the final decision on each."""

    index: RecordIndex
    retry_errors: bool

    def left(self, item: WorkItem, digest: str) -> tuple[WorkQuestion, ...]:
        """The questions about a picture; none if every one seems to be answered already."""
        keys: Iterator[RecordKey] = (question.tag.key for question in item.questions)
        wanted = (None, "failed") if self.retry_errors else (None,)
        is_left = any(self.index.look_up(key.id(digest), key.picture) in wanted for key in keys)
        return item.questions if is_left else ()


def sizes(first: int, *, num_alike: int) -> Iterator[int]:
    """Sizes of chunks in pictures: `first` at the start, so that no worker waits long, then larger ones."""
    size = min(first, MAX_PICTURES)
    while size < MAX_PICTURES:
        yield from itertools.repeat(size, num_alike)
        size = min(2 * size, MAX_PICTURES)
    yield from itertools.repeat(MAX_PICTURES)


def in_chunks(items: Iterable[WorkItem], sizes: Iterator[int]) -> Iterator[tuple[WorkItem, ...]]:
    """Group items into these sizes. Groups are smaller if pictures are given as bytes."""
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
