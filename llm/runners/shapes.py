"""Which shapes the programs run in: exactly what is needed, or rounded up to few where every new shape costs."""

from typing import Protocol

LEAST_LENGTH = 64  # positions


class Shapes(Protocol):
    """Sizes to compute in, for sizes that are needed; never above `limit`, which is at least what is needed."""

    @property
    def are_few(self) -> bool:
        """Whether decode steps come in few shapes, so that all of them can be run up front."""
        ...

    def rows(self, needed: int, *, limit: int) -> int:
        """Rows of a batch of prompts or pictures."""
        ...

    def step_rows(self, needed: int, *, limit: int) -> int:
        """Rows of a decode step."""
        ...

    def prompt(self, needed: int, *, limit: int) -> int:
        """Tokens of a padded prompt."""
        ...

    def length(self, needed: int, *, limit: int) -> int:
        """Positions that a decode step attends to."""
        ...


class ExactShapes:
    """Nothing is rounded."""

    are_few = False

    def rows(self, needed: int, *, limit: int) -> int:
        return needed

    def step_rows(self, needed: int, *, limit: int) -> int:
        return needed

    def prompt(self, needed: int, *, limit: int) -> int:
        return needed

    def length(self, needed: int, *, limit: int) -> int:
        return needed


class BucketedShapes:
    """Rows and attended positions double from bucket to bucket; prompts, which cost most, go up in steps.

    For devices that compile every shape they meet.
    """

    are_few = True

    def rows(self, needed: int, *, limit: int) -> int:
        return min(_next_power_of_two(needed), limit)

    def step_rows(self, needed: int, *, limit: int) -> int:
        return self.rows(needed, limit=limit)

    def prompt(self, needed: int, *, limit: int) -> int:
        return min(_rounded_up(needed, LEAST_LENGTH), limit)

    def length(self, needed: int, *, limit: int) -> int:
        return min(max(_next_power_of_two(needed), LEAST_LENGTH), limit)


class SteppedShapes:
    """For devices that record decode steps and take any other shape: steps in finer buckets, prompts almost exact.

    Up to 8 rows there is a bucket for each, then four for every doubling: at most a fifth of the rows is idle.
    """

    are_few = True

    def rows(self, needed: int, *, limit: int) -> int:
        return needed

    def step_rows(self, needed: int, *, limit: int) -> int:
        step = max(_next_power_of_two(needed) // 8, 1)
        return min(_rounded_up(needed, step), limit)

    def prompt(self, needed: int, *, limit: int) -> int:
        return min(_rounded_up(needed, 8), limit)  # fused attention wants its mask aligned

    def length(self, needed: int, *, limit: int) -> int:
        return min(_rounded_up(needed, LEAST_LENGTH), limit)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `limit` itself."""
    return tuple(sorted({*(1 << exponent for exponent in range(limit.bit_length())), limit}))


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
