"""Tokens of several rows without padding, as the C kernels take them. Imports no torch."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from llama_adapter.llm.prefix import PictureTokens
from llama_adapter.llm.runners.score_layout import ScoreLayout

MAX_TOKENS = 2048  # most tokens of one call; more would need memory without being faster


@dataclass(slots=True)
class Tokens:
    """Tokens of several rows, one row after the other; see batch_t of decoder.h."""

    ids: list[int] = field(default_factory=list)
    run_rows: list[int] = field(default_factory=list)
    run_starts: list[int] = field(default_factory=lambda: [0])
    places: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    shared_ends: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    logit_tokens: list[int] = field(default_factory=list)
    pictures: list[tuple[int, PictureTokens]] = field(default_factory=list)  # each with its first token here
    have_own_pasts: bool = False  # whole rows may be the same and yet attend to different places before them
    num_steps: int = 0  # number of runs at the start that continue their rows; other runs are whole rows after the past

    @classmethod
    def of_steps(cls, ids: Sequence[int], places: Sequence[int]) -> "Tokens":
        """One token at its place, which is its position too, for each of the first rows."""
        num_rows = len(ids)
        return cls(
            ids=list(ids),
            run_rows=list(range(num_rows)),
            run_starts=list(range(num_rows + 1)),
            places=list(places),
            positions=list(places),
            shared_ends=[0] * num_rows,
            starts=[0] * num_rows,
            logit_tokens=list(range(num_rows)),
            num_steps=num_rows,
        )

    def add(self, ids: Sequence[int], *, place: int = 0, position: int = 0, shared_end: int = 0) -> None:
        """Add tokens from `place` on. They attend to places 0..shared_end-1 and, causally, to each other."""
        count = len(ids)
        self.ids.extend(ids)
        self.places.extend(range(place, place + count))
        self.positions.extend(range(position, position + count))
        self.shared_ends.extend(itertools.repeat(shared_end, count))
        self.starts.extend(itertools.repeat(place, count))

    def end_row(self, row: int) -> None:
        """Tokens added since the last call belong to `row`. Raises IndexError if there are none."""
        if len(self.ids) == self.run_starts[-1]:
            raise IndexError(f"row {row} has no tokens")
        self.run_rows.append(row)
        self.run_starts.append(len(self.ids))

    def num_equal_rows(self) -> int:
        """The number of whole rows if all have the same tokens at the same places, else 0.

        This is so for one question about several pictures.
        """
        count = len(self.run_rows) - self.num_steps
        if count < 2 or self.have_own_pasts:
            return 0
        first, end = self.run_starts[self.num_steps : self.num_steps + 2]
        columns = (self.ids, self.places, self.positions, self.shared_ends, self.starts)
        pictures = [picture for _, picture in self.pictures]
        is_equal = pictures == pictures[: len(pictures) // count] * count
        return count if is_equal and all(column[first:] == column[first:end] * count for column in columns) else 0


def portions(rows: Iterable[tuple[int, int, ScoreLayout]], *, steps: Tokens, past_length: int) -> Iterator[Tokens]:
    """Divide rows into portions of at most MAX_TOKENS tokens, if rows are not longer.

    The tokens that need logits are the layouts' predictors. `steps` come first. A row is its number, the place and
    position at which it begins, after places that all its tokens attend to, and its layout. `past_length` of these
    places are the same in all rows.
    """
    tokens = steps
    for row, start, layout in rows:
        length = layout.prompt_length
        if tokens.ids and len(tokens.ids) + length > MAX_TOKENS:
            yield tokens
            tokens = Tokens()
        first = len(tokens.ids)
        tokens.have_own_pasts |= start > past_length
        tokens.pictures += [(first + picture.start, picture) for picture in layout.pictures]
        tokens.add(layout.token_ids[:length], place=start, position=start, shared_end=start)
        for span in layout.spans:
            ids = layout.token_ids[span.start : span.stop]
            tokens.add(ids, place=start + span.start, position=start + length, shared_end=start + length)
        tokens.end_row(row)
        tokens.logit_tokens.extend(first + place for place in layout.predictors)
    yield tokens
