"""Which examples a step learns from: a function of seed, epoch and step alone.

Rows of similar length go together. Lengths are compared with some noise: answers differ in length, and batches of one
answer alone would be learnt one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from llama_adapter.app.training.asking import TokenRow, TrainExample

# B rows, S tokens
_NOISE_TOKENS, _NOISE_SHARE = 16, 0.25  # of a length: the most that is added to it
_POOL = 32  # batches whose examples are sorted by length together
_SHUFFLE, _ANSWER = 1, 2  # what random numbers are for


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Examples that a device computes at once."""

    examples: tuple[TrainExample, ...]
    rows: tuple[TokenRow, ...]
    tokens_BS: Tensor  # int64, filled with 0
    labels_BS: Tensor  # int64, 0 where nothing is learnt
    weight: float = 1.0  # 0: it is computed for the other ranks' sake, and does not count

    @property
    def num_labels(self) -> int:
        """Tokens whose loss counts: those behind the first of each row."""
        return 0 if self.weight == 0 else int((self.labels_BS[:, 1:] != 0).sum())


class BatchOrder:
    """Divides examples into batches, for every epoch in another way."""

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int) -> None:
        """`lengths` are tokens of each example. Raises ValueError without examples."""
        if not lengths:
            raise ValueError("there are no examples to learn")
        self._lengths, self._batch_size, self._seed = np.asarray(lengths), batch_size, seed
        self.steps_per_epoch = -(-len(lengths) // batch_size)
        self._epoch = lru_cache(maxsize=2)(self._divided)

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, both from 0."""
        return step // self.steps_per_epoch

    def at(self, step: int) -> tuple[int, ...]:
        """Indices of the examples of a step, from 0; each comes once in an epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[place]

    def _divided(self, epoch: int) -> tuple[tuple[int, ...], ...]:
        generator = np.random.default_rng([_SHUFFLE, self._seed, epoch])
        order = generator.permutation(len(self._lengths))
        noise = generator.random(len(self._lengths)) * (_NOISE_TOKENS + _NOISE_SHARE * self._lengths)
        shown = self._lengths + noise
        pool = _POOL * self._batch_size
        batches: list[tuple[int, ...]] = []
        for start in range(0, len(order), pool):
            part = order[start : start + pool]
            part = part[np.argsort(shown[part], kind="stable")]
            batches += [
                tuple(part[at : at + self._batch_size].tolist()) for at in range(0, len(part), self._batch_size)
            ]
        return tuple(batches[place] for place in generator.permutation(len(batches)))


def microbatches(
    examples: Sequence[TrainExample],
    chosen: Sequence[int],
    *,
    key: tuple[int, int],
    rows: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[Microbatch, ...]:
    """A rank's part of the step that learns the `chosen` examples, in parts of at most `rows`.

    Every rank has as many parts. `key` is seed and epoch: by them one of several right answers is drawn. Neighbours in
    length go to different ranks.
    """
    rows_of = drawn_rows(examples, chosen, key=key)
    drawn = [(examples[index], row) for index, row in zip(chosen, rows_of, strict=True)]
    drawn.sort(key=lambda pair: len(pair[1].token_ids))
    num_parts = -(-len(drawn) // rows)
    num_parts = -(-num_parts // num_ranks) * num_ranks
    parts = [drawn[len(drawn) * at // num_parts : len(drawn) * (at + 1) // num_parts] for at in range(num_parts)]
    return tuple(_microbatch(part or drawn[:1], counts=bool(part)) for part in parts[rank::num_ranks])


def drawn_rows(
    examples: Sequence[TrainExample], chosen: Sequence[int], *, key: tuple[int, int]
) -> tuple[TokenRow, ...]:
    """The rows to learn of the `chosen` examples; `key` is seed and epoch."""
    return tuple(examples[index].row(_ANSWER, *key, index) for index in chosen)


def _microbatch(drawn: Sequence[tuple[TrainExample, TokenRow]], *, counts: bool) -> Microbatch:
    rows = tuple(row for _, row in drawn)
    tokens_BS, labels_BS = padded(rows)
    return Microbatch(
        examples=tuple(example for example, _ in drawn),
        rows=rows,
        tokens_BS=tokens_BS,
        labels_BS=labels_BS,
        weight=1.0 if counts else 0.0,
    )


def padded(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, S), int64, filled with 0 up to the longest row; labels are 0 in front of the answer."""
    width = max(len(row.token_ids) for row in rows)
    tokens_BS = torch.zeros(len(rows), width, dtype=torch.int64)
    for tokens_S, row in zip(tokens_BS, rows, strict=True):
        tokens_S[: len(row.token_ids)] = torch.tensor(row.token_ids)
    labels_BS = tokens_BS.clone()
    for labels_S, row in zip(labels_BS, rows, strict=True):
        labels_S[: row.num_prompt] = 0
    return tokens_BS, labels_BS
