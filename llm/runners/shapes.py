"""The shapes that programs run in: exact, or rounded up to a few shapes if every new shape costs time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Rounding(Protocol):
    """A size to compute in, at least `needed` and at most `limit`."""

    def __call__(self, needed: int, *, limit: int) -> int: ...


def exact(needed: int, *, limit: int) -> int:
    """No rounding."""
    return needed


def multiple_of(step: int) -> Rounding:
    """Round up to a multiple of `step`."""

    def rounded(needed: int, *, limit: int) -> int:
        return min(-(-needed // step) * step, limit)

    return rounded


def power_of_two(least: int) -> Rounding:
    """Round up to a power of two, at least `least`."""

    def rounded(needed: int, *, limit: int) -> int:
        return min(max(_next_power_of_two(needed), least), limit)

    return rounded


def four_per_doubling(needed: int, *, limit: int) -> int:
    """Exact up to 8, then four sizes for every doubling, so that at most a fifth of the rows is unused."""
    return multiple_of(max(_next_power_of_two(needed) // 8, 1))(needed, limit=limit)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `limit` itself."""
    return tuple(sorted({*(1 << exponent for exponent in range(limit.bit_length())), limit}))


def padded(rows: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    """The rows, each with its last number repeated up to `width`."""
    return [[*row, *[row[-1]] * (width - len(row))] for row in rows]


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """How each size of a program is rounded."""

    are_few: bool = False  # decode steps have few shapes, so a warm-up can run all of them
    rows: Rounding = exact  # rows of a batch of prompts or pictures
    step_rows: Rounding = exact  # rows of a decode step
    prompt: Rounding = exact  # tokens of a padded prompt
    length: Rounding = exact  # positions that a decode step attends to


EXACT = Shapes()
# For devices that compile every shape. Prompts, which cost most, are rounded to multiples.
BUCKETED = Shapes(
    are_few=True, rows=power_of_two(1), step_rows=power_of_two(1), prompt=multiple_of(64), length=power_of_two(64)
)
# For devices that record decode steps and support any shape otherwise. Fused attention needs a mask aligned to 8.
STEPPED = Shapes(are_few=True, step_rows=four_per_doubling, prompt=multiple_of(8), length=multiple_of(64))
