"""What is under way on workers: nothing is forgotten, nothing is taken twice. Plain bookkeeping, no Ray."""

import itertools
from collections.abc import Iterator, Sequence

from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.scale.chunks import Chunk
from llama_adapter.app.tasks.answers import Answer, AnswerError

MAX_LOSSES = 2  # of a chunk; its pictures are then tried one by one, and in the end have an error

_LOST = AnswerError(
    code="lost",
    message="Wanted an answer, but the process that was to give it ended each time; see its machine's memory and logs, "
    "and run the command again with --retry-errors.",
)


class Ledger:
    """Numbers chunks, and keeps each until it was answered or given up."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._under_way: dict[int, Chunk] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def enter(self, items: Sequence[WorkItem], *, is_sure: bool = False, num_losses: int = 0) -> Chunk:
        """A new chunk, that is under way from now on."""
        chunk = Chunk(number=next(self._numbers), items=tuple(items), is_sure=is_sure, num_losses=num_losses)
        self._under_way[chunk.number] = chunk
        return chunk

    def settle(self, number: int) -> Chunk | None:
        """The chunk that was answered; None where it was answered before, as may be after a machine was lost."""
        return self._under_way.pop(number, None)

    def enter_lost(self) -> tuple[list[Chunk], list[Answer]]:
        """Call when nothing is under way any more: what is left is lost, and becomes new chunks of one picture each.

        The second are failures of pictures that were lost often enough.
        """
        lost, self._under_way = list(self._under_way.values()), {}
        chunks, failures = [], []
        for chunk in lost:
            if chunk.num_losses + 1 >= MAX_LOSSES:
                failures += [answer for item in chunk.items for answer in _failures(item)]
            else:
                chunks += [
                    self.enter([item], is_sure=chunk.is_sure, num_losses=chunk.num_losses + 1) for item in chunk.items
                ]
        return chunks, failures


def _failures(item: WorkItem) -> Iterator[Answer]:
    for question in item.questions:
        yield Answer(
            index=question.index,
            picture=item.label,
            digest="",
            prompt="",
            text="",
            token_ids=(),
            finish="error",
            error=_LOST,
            ms={"total": 0.0},
        )
