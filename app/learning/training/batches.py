"""Which examples a step learns from, a function of seed, epoch and step alone, and the encodings of their pictures.

A batch has rows of similar length. Random noise is added to the lengths before they are compared: otherwise examples
with the same answer, which have similar lengths, would be in the same batch.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.app.learning.training.asking import TokenRow, TrainExample
from llama_adapter.app.learning.training.cache import EncodedCache
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.ranks import OneRank
from llama_adapter.llm.training.layout import IGNORED

# B rows or their pictures, S tokens or pixels a side, T tokens of the encoder, C channels, V views, Q visual queries, D
# their width
_NOISE_TOKENS, _NOISE_SHARE = 16, 0.25  # the noise on a length is below 16 tokens plus a quarter of the length
_POOL = 32  # batches whose examples are sorted by length together
_SHUFFLE, _ANSWER = 1, 2  # purpose of a random number, part of its seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Examples that a device computes at once."""

    examples: tuple[TrainExample, ...]
    rows: tuple[TokenRow, ...]
    tokens_BS: Tensor  # int64, padded with 0
    labels_BS: Tensor  # int64, `IGNORED` at positions without loss
    weight: float = 1.0  # 0: does not count; it is computed only because all ranks must compute equally many parts

    @property
    def num_labels(self) -> int:
        """Tokens with a loss. The first token of a row has none, because no position predicts it."""
        return 0 if self.weight == 0 else int((self.labels_BS[:, 1:] != IGNORED).sum())


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


def microbatches(
    examples: Sequence[TrainExample],
    chosen: Sequence[int],
    *,
    key: tuple[int, int],
    rows: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> tuple[Microbatch, ...]:
    """This rank's share of the step that learns the `chosen` examples, in parts of at most `rows` rows.

    All ranks have the same number of parts. `key` is (seed, epoch); with the example's index it determines which of
    several right answers is drawn. Parts of similar row length go to different ranks.
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
    """The row to learn for each of the `chosen` examples; `key` is (seed, epoch)."""
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


Fed = tuple[Microbatch, Tensor | None]  # a part of a step, and its encodings (B or 1, T, C)


class Encodings:
    """The encodings that rows attend to: those of pictures, and one encoding for all rows without a picture."""

    def __init__(self, cache: EncodedCache | None, nothing: Tensor | None) -> None:
        """`nothing` (1, T, C) is for rows without a picture. Both are None if the model sees no pictures."""
        self._cache, self._nothing = cache, nothing

    def of(self, examples: Sequence[TrainExample], *, random: torch.Generator | None = None) -> Tensor | None:
        """Encodings (B, T, C), or (1, T, C) if no row has a picture; None if the model sees no pictures.

        With `random`, for training, subclasses give a changed form of each picture.
        """
        if self._cache is None or self._nothing is None:
            return None
        if not any(one.has_picture for one in examples):
            return self._nothing
        nothing = self._nothing[0].cpu()
        return torch.stack([self._cache.get(one.example.digest) if one.has_picture else nothing for one in examples])


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
        lengths, batch_size = [one.num_tokens for one in examples], job.optimisation.batch_size
        self._order = BatchOrder(lengths, batch_size=batch_size, seed=job.seed)
        self.steps_per_epoch, self.num_steps = self._order.steps_per_epoch, job.optimisation.num_steps(len(examples))
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")
        self._ahead: dict[int, Future[tuple[Fed, ...]]] = {}

    def at(self, step: int) -> tuple[Fed, ...]:
        """This rank's parts of a step; starts making the next step. Raises CacheError."""
        made = self._ahead.pop(step, None) or self._pool.submit(self._make, step)
        if step + 1 < self.num_steps:
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
        parts = microbatches(
            self._examples,
            self._order.at(step),
            key=(self._seed, self._order.epoch_of(step)),
            rows=self._rows,
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
        )
        random = torch.Generator().manual_seed((self._seed << 32) + step * self._ranks.size + self._ranks.rank)
        return tuple((part, self._encodings.of(part.examples, random=random)) for part in parts)


_SHIFT = 0.12  # share of the side
_TURN = math.radians(15)
_SIZE = 0.2  # share
_CONTRAST, _LIGHT = 0.3, 38.0  # a share of the contrast, and levels of 255


def augmented(pixels_BCSS: Tensor, *, random: torch.Generator) -> Tensor:
    """Float pixels in 0..255, changed at random for each picture.

    Pictures are shifted by up to 12 % of their side, turned by up to 15 degrees, made up to a fifth larger or smaller,
    and made lighter, darker, flatter or harder. They are never mirrored, because mirrored texts and signs mean
    something else. Borders are filled by reflection.
    """
    count, device = len(pixels_BCSS), pixels_BCSS.device
    turn_B, size_B, gain_B, light_B, across_B, down_B = (
        (torch.rand(count, generator=random) * 2 - 1) * most
        for most in (_TURN, _SIZE, _CONTRAST, _LIGHT, 2 * _SHIFT, 2 * _SHIFT)
    )
    cos_B, sin_B = turn_B.cos() * (1 + size_B), turn_B.sin() * (1 + size_B)
    rows = torch.stack([cos_B, -sin_B, across_B, sin_B, cos_B, down_B], dim=1).view(count, 2, 3)
    grid = F.affine_grid(rows.to(device), list(pixels_BCSS.shape), align_corners=False)
    moved_BCSS = F.grid_sample(pixels_BCSS, grid, padding_mode="reflection", align_corners=False)
    gain, light = ((1 + gain_B).view(-1, 1, 1, 1).to(device), light_B.view(-1, 1, 1, 1).to(device))
    return ((moved_BCSS - 127.5) * gain + 127.5 + light).clamp(0, 255)


class ChangedPixels(Encodings):
    """Pixels as encodings, (B, S, S, C). In training, every picture is changed at random each time."""

    def of(self, examples: Sequence[TrainExample], *, random: torch.Generator | None = None) -> Tensor | None:
        """uint8 pixels, or with `random` changed float32 pixels in 0..255."""
        pixels_BSSC = super().of(examples)
        seen = torch.tensor([one.has_picture for one in examples])
        if random is None or pixels_BSSC is None or not seen.any():
            return pixels_BSSC
        pixels_BCSS = pixels_BSSC.permute(0, 3, 1, 2).float()
        pixels_BCSS[seen] = augmented(pixels_BCSS[seen], random=random)
        return pixels_BCSS.permute(0, 2, 3, 1)


class Views(Encodings):
    """Visual queries of several views of each picture, the unchanged one first. Training draws a view at random."""

    def __init__(self, views_VQD: Mapping[str, Tensor]) -> None:
        """`views_VQD` maps the digest of a picture to its views."""
        super().__init__(None, None)
        self._views_VQD = views_VQD

    def of(self, examples: Sequence[TrainExample], *, random: torch.Generator | None = None) -> Tensor:
        """Visual queries (B, Q, D)."""
        found = [self._views_VQD[one.example.digest] for one in examples]
        if random is None:
            return torch.stack([views[0] for views in found])
        drawn = torch.rand(len(found), generator=random).tolist()
        return torch.stack([views[int(share * len(views))] for views, share in zip(found, drawn, strict=True)])
