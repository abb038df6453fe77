"""Which shapes the programs run in: exactly what is needed, or rounded up to few where every new shape costs."""

from typing import Protocol

LEAST_LENGTH = 64  # positions


class Shapes(Protocol):
    """Sizes to compute in, for sizes that are needed; never above `limit`, which is at least what is needed."""

    def rows(self, needed: int, *, limit: int) -> int:
        """Rows of a batch."""
        ...

    def prompt(self, needed: int, *, limit: int) -> int:
        """Tokens of a padded prompt."""
        ...

    def length(self, needed: int, *, limit: int) -> int:
        """Positions that a decode step attends to."""
        ...


class ExactShapes:
    """Nothing is rounded."""

    def rows(self, needed: int, *, limit: int) -> int:
        return needed

    def prompt(self, needed: int, *, limit: int) -> int:
        return needed

    def length(self, needed: int, *, limit: int) -> int:
        return needed


class BucketedShapes:
    """Rows and attended positions double from bucket to bucket; prompts, which cost most, go up in steps."""

    def rows(self, needed: int, *, limit: int) -> int:
        return min(_next_power_of_two(needed), limit)

    def prompt(self, needed: int, *, limit: int) -> int:
        return min(-(-needed // LEAST_LENGTH) * LEAST_LENGTH, limit)

    def length(self, needed: int, *, limit: int) -> int:
        return min(max(_next_power_of_two(needed), LEAST_LENGTH), limit)


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `limit` itself."""
    return tuple(sorted({*(1 << exponent for exponent in range(limit.bit_length())), limit}))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
