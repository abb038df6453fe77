"""Rows that nobody asked for are so many that their plan fits, with some memory left over."""

import pytest

from llama_adapter.llm.memory_plan import MemoryPlan, fitting_rows


def planned(num_rows: int) -> MemoryPlan:
    return MemoryPlan(weights=1000, slots=10 * num_rows, activations=num_rows)


@pytest.mark.parametrize(
    ("free", "most", "rows"),
    [
        (10_000, 64, 64),
        (10_000, 16, 16),
        (10_000, 23, 16),  # a power of two
        (10_000, 1, 1),
        (1_400, 64, 16),  # 32 rows take 1,352, and more than 1,260 of these are not to be taken
        (1_000, 64, 1),  # one is too many, and is what an error will speak of
        (None, 64, 8),
        (None, 4, 4),
    ],
)
def test_the_largest_power_of_two_that_leaves_a_tenth(free: int | None, most: int, rows: int) -> None:
    assert fitting_rows(planned, free=free, most=most, unknown=8) == rows
