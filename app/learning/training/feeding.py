"""Makes the parts of each step in a thread, while the device computes the previous step."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from llama_adapter.app.learning.training.asking import TrainExample
from llama_adapter.app.learning.training.batches import BatchOrder, Microbatch, drawn_rows, microbatches
from llama_adapter.app.learning.training.cache import EncodedCache
from llama_adapter.app.learning.training.ranks import OneRank

# B rows, S tokens, T tokens of the encoder, C channels
Fed = tuple[Microbatch, Tensor | None]  # a part of a step, and its encodings (B or 1, T, C)


class Encodings:
    """The encodings that rows attend to: those of pictures, and one encoding for all rows without a picture."""

    def __init__(self, cache: EncodedCache | None, nothing: Tensor | None) -> None:
        """`nothing` (1, T, C) is for rows without a picture. Both are None if the model sees no pictures."""
        self._cache, self._nothing = cache, nothing

    def of(self, examples: Sequence[TrainExample]) -> Tensor | None:
        """Encodings (B, T, C), or (1, T, C) if no row has a picture; None if the model sees no pictures."""
        if self._cache is None or self._nothing is None:
            return None
        if not any(one.has_picture for one in examples):
            return self._nothing
        nothing = self._nothing[0].cpu()
        return torch.stack([self._cache.get(one.example.digest) if one.has_picture else nothing for one in examples])


class Feeder:
    """Makes the parts of one step ahead."""

    def __init__(
        self,
        examples: Sequence[TrainExample],
        *,
        order: BatchOrder,
        encodings: Encodings,
        rows: int,
        seed: int,
        ranks: OneRank,
        num_steps: int,
    ) -> None:
        self._examples, self._order, self._encodings, self._rows = examples, order, encodings, rows
        self._seed, self._ranks, self._num_steps = seed, ranks, num_steps
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[tuple[Fed, ...]]] = {}

    def at(self, step: int) -> tuple[Fed, ...]:
        """This rank's parts of a step; starts making the next step. Raises CacheError."""
        made = self._ahead.pop(step, None) or self._pool.submit(self._make, step)
        if step + 1 < self._num_steps:
            self._ahead = {step + 1: self._pool.submit(self._make, step + 1)}
        return made.result()

    def counts(self, step: int) -> tuple[int, int]:
        """The numbers of labels and of examples of a step, over all ranks."""
        key, chosen = (self._seed, self._order.epoch_of(step)), self._order.at(step)
        return sum(row.num_labels for row in drawn_rows(self._examples, chosen, key=key)), len(chosen)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> tuple[Fed, ...]:
        parts = self._parts(step, rank=self._ranks.rank, num_ranks=self._ranks.size)
        return tuple((part, self._encodings.of(part.examples)) for part in parts)

    def _parts(self, step: int, *, rank: int, num_ranks: int) -> tuple[Microbatch, ...]:
        return microbatches(
            self._examples,
            self._order.at(step),
            key=(self._seed, self._order.epoch_of(step)),
            rows=self._rows,
            rank=rank,
            num_ranks=num_ranks,
        )
