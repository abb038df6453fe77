"""Which examples a step learns from, a function of seed, epoch and step alone, and the encodings of their pictures.

A batch has rows of similar length. Random noise is added to the lengths before they are compared: otherwise examples
with the same answer, which have similar lengths, would be in the same batch.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.app.captioning.tasks.prompts import Prompt
from llama_adapter.app.learning.training.asking import TokenRow, TrainExample
from llama_adapter.app.learning.training.cache import EncodedCache
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.ranks import OneRank
from llama_adapter.llm.training.decoder import SoftLabels
from llama_adapter.llm.training.layout import IGNORED

# B rows or their pictures, S tokens or pixels a side, T tokens of the encoder, C channels, V views, Q visual queries, D
# their width, L labelled tokens of all rows, K answers or random numbers
_NOISE_TOKENS, _NOISE_SHARE = 16, 0.25  # the noise on a length is below 16 tokens plus a quarter of the length
_POOL = 32  # batches whose examples are sorted by length together
_SHUFFLE, _ANSWER = 1, 2  # purpose of a random number, part of its seed


EpochKey = tuple[int, int]  # the seed of a run, and the epoch
TokenShares = tuple[Mapping[int, float], ...]  # for each label of a row, the probabilities of tokens


class Lesson(NamedTuple):
    """An example as a step learns it."""

    example: TrainExample
    row: TokenRow
    query_QD: Tensor | None = None  # the visual query, if it is not that of `Encodings.of`
    shares: TokenShares | None = None  # what is learned in place of the row's labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Examples that a device computes at once."""

    examples: tuple[TrainExample, ...]
    rows: tuple[TokenRow, ...]
    tokens_BS: Tensor  # int64, padded with 0
    labels_BS: Tensor  # int64, `IGNORED` at positions without loss
    weight: float = 1.0  # 0: does not count; it is computed only because all ranks must compute equally many parts
    # (B or 1, T, C): the result of `TrainableModel.encode`, or visual queries of its own; None until `Encodings.given`,
    # and for a model that sees no pictures
    encoded: Tensor | None = None
    soft: SoftLabels | None = None  # learned in place of the labels

    @property
    def num_labels(self) -> int:
        """Tokens with a loss. The first token of a row has none, because no position predicts it."""
        return 0 if self.weight == 0 else int((self.labels_BS[:, 1:] != IGNORED).sum())

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, SoftLabels | None]:
        """What a `TrainableModel` is called with, on a device."""
        encoded = None if self.encoded is None else self.encoded.to(device)
        soft = None if self.soft is None else self.soft.to(device)
        return self.tokens_BS.to(device), self.labels_BS.to(device), encoded, soft


class BatchOrder:
    """Divides examples into batches, differently in each epoch."""

    def __init__(self, lengths: Sequence[int], *, batch_size: int, seed: int) -> None:
        """`lengths` are the numbers of tokens of the examples, at least one."""
        self._lengths, self._batch_size, self._seed = np.asarray(lengths), batch_size, seed
        self.steps_per_epoch = -(-len(lengths) // batch_size)
        self._epoch = lru_cache(maxsize=2)(self._divided)

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, both from 0."""
        return step // self.steps_per_epoch

    def at(self, step: int) -> tuple[int, ...]:
        """Indices of the examples of a step, which counts from 0. Every example occurs once in an epoch."""
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


def microbatches(lessons: Sequence[Lesson], *, rows: int, rank: int = 0, num_ranks: int = 1) -> tuple[Microbatch, ...]:
    """This rank's share of a step, in parts of at most `rows` rows.

    All ranks have the same number of parts. Parts of similar row length go to different ranks.
    """
    ordered = sorted(lessons, key=lambda one: len(one.row.token_ids))
    num_parts = -(-len(ordered) // rows)
    num_parts = -(-num_parts // num_ranks) * num_ranks
    parts = [ordered[len(ordered) * at // num_parts : len(ordered) * (at + 1) // num_parts] for at in range(num_parts)]
    return tuple(_microbatch(part or ordered[:1], counts=bool(part)) for part in parts[rank::num_ranks])


def drawn_lessons(examples: Sequence[TrainExample], chosen: Sequence[int], *, key: EpochKey) -> tuple[Lesson, ...]:
    """The row to learn for each of the `chosen` examples.

    `key`, with the example's index, determines which of several right answers is drawn.
    """
    return tuple(Lesson(examples[index], examples[index].row(_ANSWER, *key, index)) for index in chosen)


def _microbatch(lessons: Sequence[Lesson], *, counts: bool) -> Microbatch:
    rows = tuple(one.row for one in lessons)
    tokens_BS, labels_BS = padded(rows)
    queries = [one.query_QD for one in lessons if one.query_QD is not None]
    return Microbatch(
        examples=tuple(one.example for one in lessons),
        rows=rows,
        tokens_BS=tokens_BS,
        labels_BS=labels_BS,
        weight=1.0 if counts else 0.0,
        encoded=torch.stack(queries) if queries else None,
        soft=_soft_labels(lessons) if any(one.shares for one in lessons) else None,
    )


def _soft_labels(lessons: Sequence[Lesson]) -> SoftLabels:
    shares = [one for lesson in lessons for one in lesson.shares or [{label: 1.0} for label in lesson.row.labels]]
    width = max(map(len, shares))
    padded_to = [[*one.items(), *[(0, 0.0)] * (width - len(one))] for one in shares]
    return SoftLabels(
        torch.tensor([[token for token, _ in one] for one in padded_to]),
        torch.tensor([[share for _, share in one] for one in padded_to]),
    )


def token_shares(row: TokenRow, answers: Sequence[tuple[TokenRow, float]]) -> TokenShares:
    """For each label of a row, the probabilities of tokens at its place, after the row's tokens before it.

    `answers` are rows of the same prompt, the row among them, with their probabilities.
    """
    found, possible = [], [(one.token_ids[one.num_prompt :], share) for one, share in answers]
    for place, token in enumerate(row.token_ids[row.num_prompt :]):
        if token != row.unknown_id:
            counted: dict[int, float] = {}
            for ids, share in possible:
                if place < len(ids) and ids[place] != row.unknown_id:
                    counted[ids[place]] = counted.get(ids[place], 0.0) + share
            total = sum(counted.values())
            found.append({one: share / total for one, share in counted.items()})
        possible = [one for one in possible if one[0][place : place + 1] == (token,)]
    return tuple(found)


def padded(rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """Tokens and labels (B, S), int64, padded to the longest row. Labels are `IGNORED` outside of the answer."""
    width = max(len(row.token_ids) for row in rows)
    tokens_BS = torch.zeros(len(rows), width, dtype=torch.int64)
    for tokens_S, row in zip(tokens_BS, rows, strict=True):
        tokens_S[: len(row.token_ids)] = torch.tensor(row.token_ids)
    labels_BS = torch.full_like(tokens_BS, IGNORED)
    for labels_S, tokens_S, row in zip(labels_BS, tokens_BS, rows, strict=True):
        answer = slice(row.num_prompt, len(row.token_ids))
        labels_S[answer] = tokens_S[answer]
        if row.unknown_id is not None:
            labels_S[labels_S == row.unknown_id] = IGNORED
    return tokens_BS, labels_BS


class Encodings:
    """The encodings that rows attend to: those of pictures, and one encoding for all rows without a picture."""

    def __init__(self, cache: EncodedCache | None, nothing: Tensor | None) -> None:
        """`nothing` (1, T, C) is for rows without a picture. Both are None if the model sees no pictures."""
        self._cache, self._nothing = cache, nothing

    def taught(self, lessons: tuple[Lesson, ...], *, random: torch.Generator) -> tuple[Lesson, ...]:
        """The lessons of a step as they are learned; `random` is the same on all ranks."""
        return lessons

    def of(self, examples: Sequence[TrainExample], *, key: EpochKey | None = None) -> Tensor | None:
        """Encodings (B, T, C), or (1, T, C) if no row has a picture; None if the model sees no pictures.

        With `key`, for training, subclasses give a changed form of each picture.
        """
        if self._cache is None or self._nothing is None:
            return None
        if not any(one.has_picture for one in examples):
            return self._nothing
        nothing = self._nothing[0].cpu()
        return torch.stack([self._cache.get(one.example.digest) if one.has_picture else nothing for one in examples])

    def given(self, part: Microbatch, *, key: EpochKey | None = None) -> Microbatch:
        """A part with the encodings of its examples, unless it has visual queries of its own."""
        return part if part.encoded is not None else replace(part, encoded=self.of(part.examples, key=key))


class Feeder:
    """Makes the parts of one step ahead, in a thread, while the device computes the step before it."""

    def __init__(
        self,
        job: TrainJob,
        examples: Sequence[TrainExample],
        *,
        encodings: Encodings,
        rows: int,
        ranks: OneRank,
    ) -> None:
        """A part has at most `rows` rows."""
        self._examples, self._encodings = examples, encodings
        self._rows, self._ranks, self._seed = rows, ranks, job.seed
        lengths = [one.num_tokens for one in examples]
        self._order = BatchOrder(lengths, batch_size=job.optimisation.batch_size, seed=job.seed)
        self.steps_per_epoch, self.num_steps = self._order.steps_per_epoch, job.optimisation.num_steps(len(examples))
        self._lessons = lru_cache(maxsize=3)(self._drawn)  # each is read to be made, and to be counted
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[tuple[Microbatch, ...]]] = {}

    def at(self, step: int) -> tuple[Microbatch, ...]:
        """This rank's parts of a step; starts making the next step. Raises CacheError."""
        made = self._ahead.pop(step, None) or self._pool.submit(self._make, step)
        if step + 1 < self.num_steps:
            self._ahead = {step + 1: self._pool.submit(self._make, step + 1)}
        return made.result()

    def counts(self, step: int) -> tuple[int, int, int]:
        """The numbers of labels, tokens and examples of a step, over all ranks."""
        rows = [one.row for one in self._lessons(step)]
        return sum(len(row.labels) for row in rows), sum(len(row.token_ids) for row in rows), len(rows)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, step: int) -> tuple[Microbatch, ...]:
        parts = microbatches(self._lessons(step), rows=self._rows, rank=self._ranks.rank, num_ranks=self._ranks.size)
        return tuple(self._encodings.given(part, key=self._key(step)) for part in parts)

    def _key(self, step: int) -> EpochKey:
        return self._seed, self._order.epoch_of(step)

    def _drawn(self, step: int) -> tuple[Lesson, ...]:
        lessons = drawn_lessons(self._examples, self._order.at(step), key=self._key(step))
        return self._encodings.taught(lessons, random=generator(self._seed, step))


def generator(seed: int, number: int) -> torch.Generator:
    """Random numbers that depend on a run's seed and on a number, such as that of a step."""
    return torch.Generator().manual_seed((seed << 32) + number)


# Most change of a picture: its turn, its size as a share, its contrast as a share, its light in levels of 255, and its
# shifts across and down in half sides.
_MOST: Final = (math.radians(15), 0.2, 0.3, 38.0, 0.24, 0.24)
NUM_DRAWN: Final = len(_MOST)  # random numbers for each picture


def augmented(pixels_BCSS: Tensor, drawn_KB: Tensor) -> Tensor:
    """Float pixels in 0..255, changed by `NUM_DRAWN` random numbers in 0..1 for each picture.

    Pictures are shifted by up to 12 % of their side, turned by up to 15 degrees, made up to a fifth larger or smaller,
    and made lighter, darker, flatter or harder. They are never mirrored, because mirrored texts and signs mean
    something else. Borders are filled by reflection.
    """
    device = pixels_BCSS.device
    changes_KB = (drawn_KB * 2 - 1) * torch.tensor(_MOST)[:, None]
    turn_B, size_B, gain_B, light_B, across_B, down_B = changes_KB.unbind()
    cos_B, sin_B = turn_B.cos() * (1 + size_B), turn_B.sin() * (1 + size_B)
    rows = torch.stack([cos_B, -sin_B, across_B, sin_B, cos_B, down_B], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(rows.to(device), list(pixels_BCSS.shape), align_corners=False)
    moved_BCSS = F.grid_sample(pixels_BCSS, grid, padding_mode="reflection", align_corners=False)
    gain, light = ((1 + gain_B).view(-1, 1, 1, 1).to(device), light_B.view(-1, 1, 1, 1).to(device))
    return ((moved_BCSS - 127.5) * gain + 127.5 + light).clamp(0, 255)


class ChangedPixels(Encodings):
    """Pixels as encodings, (B, S, S, C). In training, every picture is changed at random each time."""

    def of(self, examples: Sequence[TrainExample], *, key: EpochKey | None = None) -> Tensor | None:
        """uint8 pixels, or float32 pixels in 0..255, changed by what `key`, picture and question determine."""
        pixels_BSSC = super().of(examples)
        seen = torch.tensor([one.has_picture for one in examples])
        if key is None or pixels_BSSC is None or not seen.any():
            return pixels_BSSC
        randoms = [Random(f"{key}/{one.example.digest}/{one.prompt}") for one in examples if one.has_picture]
        drawn_KB = torch.tensor([[one.random() for one in randoms] for _ in range(NUM_DRAWN)])
        pixels_BCSS = pixels_BSSC.permute(0, 3, 1, 2).float()
        pixels_BCSS[seen] = augmented(pixels_BCSS[seen], drawn_KB)
        return pixels_BCSS.permute(0, 2, 3, 1)


Teach = Callable[[Sequence[TrainExample], Tensor], Sequence[Mapping[str, float]]]
_MOST_OF_ANOTHER: Final = 0.5  # share of another picture in a visual query that is learned
_TAUGHT: Final = 0.5  # share of what the encoder finds in it, beside the right answers of both


class Views(Encodings):
    """Visual queries of several views of each picture, the unchanged one first, and what an encoder finds in them.

    In training, a row reads a view that is drawn at random. If the encoder knows answers to its question, it reads a
    mean of this view and one of another picture with this question. It learns the probabilities of answers: half what
    the encoder finds in the mean, half the right answers of both pictures. There are few pictures, but many means, and
    probabilities say more than one answer (Hinton et al., "Distilling the knowledge in a neural network", 2015; Zhang
    et al., "mixup", 2018).
    """

    def __init__(self, views_VQD: Mapping[str, Tensor], *, learned: Sequence[TrainExample], teach: Teach) -> None:
        """`views_VQD` maps the digest of a picture to its views. `learned` are the training examples.

        `teach` maps examples and visual queries (B, Q, D) to the probabilities of the answers to each question; the
        mapping is empty if the encoder knows none.
        """
        super().__init__(None, None)
        self._views_VQD, self._teach = views_VQD, teach
        self._asked = defaultdict[Prompt, list[TrainExample]](list)
        for one in learned:
            if one.has_picture:
                self._asked[one.prompt].append(one)
        self._row_of = {(one.prompt, one.example.answers[0]): one.rows[0] for one in learned}

    def of(self, examples: Sequence[TrainExample], *, key: EpochKey | None = None) -> Tensor:
        """Visual queries (B, Q, D): the unchanged views."""
        return torch.stack([self._views_VQD[one.example.digest][0] for one in examples])

    def taught(self, lessons: tuple[Lesson, ...], *, random: torch.Generator) -> tuple[Lesson, ...]:
        """The lessons with visual queries; those that the encoder knows answers to, with their probabilities."""
        examples = [one.example for one in lessons]
        others = [_any_of(self._asked[one.prompt] or [one], random) for one in examples]
        own_BQD, other_BQD = (
            torch.stack([_any_of(self._views_VQD[one.example.digest], random) for one in part])
            for part in (examples, others)
        )
        share_B = torch.rand(len(lessons), generator=random) * _MOST_OF_ANOTHER
        mean_BQD = torch.lerp(own_BQD, other_BQD, share_B.to(own_BQD.dtype)[:, None, None])
        found = []
        for at, (lesson, taught) in enumerate(zip(lessons, self._teach(examples, mean_BQD), strict=True)):
            if not taught:
                found.append(lesson._replace(query_QD=own_BQD[at]))
                continue
            shares = {answer: _TAUGHT * share for answer, share in taught.items()}
            for one, share in ((lesson.example, 1 - float(share_B[at])), (others[at], float(share_B[at]))):
                answer = one.example.answers[0]
                shares[answer] = shares.get(answer, 0.0) + (1 - _TAUGHT) * share
            found.append(self._lesson(lesson.example, mean_BQD[at], shares, random))
        return tuple(found)

    def _lesson(
        self, example: TrainExample, query_QD: Tensor, shares: Mapping[str, float], random: torch.Generator
    ) -> Lesson:
        """A lesson whose row has an answer that is drawn by the probabilities."""
        known = [
            (row, share) for answer, share in shares.items() if (row := self._row_of.get((example.prompt, answer)))
        ]
        drawn = int(torch.multinomial(torch.tensor([share for _, share in known]), 1, generator=random))
        row = known[drawn][0]
        return Lesson(example, row, query_QD, token_shares(row, known))


def _any_of(things: Sequence[Any] | Tensor, random: torch.Generator) -> Any:
    return things[int(torch.rand((), generator=random) * len(things))]
