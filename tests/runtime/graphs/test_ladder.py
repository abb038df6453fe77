"""Batches of any size run in calls of a few compiled batch sizes, at the least cost and in order."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_adapter.runtime.graphs.ladder import CALL_OVERHEAD, run_ladder, split

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@given(num_pictures=st.integers(0, 60), sizes=SIZES)
def test_every_picture_is_in_one_call_and_only_the_last_call_is_padded(num_pictures: int, sizes: list[int]) -> None:
    calls = split(num_pictures, sizes)

    assert sum(count for _, count in calls) == num_pictures
    assert all(size in sizes and 1 <= count <= size for size, count in calls)
    assert all(size == count for size, count in calls[:-1])
    assert [size for size, _ in calls] == sorted((size for size, _ in calls), reverse=True)


@settings(deadline=None)
@given(num_pictures=st.integers(1, 9), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_no_other_choice_of_calls_is_cheaper(num_pictures: int, sizes: list[int]) -> None:
    cheapest = min(
        sum(choice) + CALL_OVERHEAD * len(choice)
        for length in range(1, num_pictures + 1)
        for choice in itertools.combinations_with_replacement(sorted(set(sizes)), length)
        if sum(choice) >= num_pictures
    )

    calls = split(num_pictures, sizes)

    assert sum(size + CALL_OVERHEAD for size, _ in calls) == cheapest


@given(num_rows=st.integers(1, 40), sizes=st.none() | SIZES)
def test_results_are_those_of_one_call_in_the_same_order(num_rows: int, sizes: list[int] | None) -> None:
    pixels = np.arange(num_rows * 6, dtype=np.uint8).reshape(num_rows, 2, 3)[:, ::-1]
    lengths = np.arange(num_rows)
    seen = []

    def run(batch: list[np.ndarray]) -> list[np.ndarray]:
        assert all(array.flags.c_contiguous for array in batch)
        seen.append(len(batch[0]))
        return [batch[0].astype(np.float32) * 2, batch[1] + 1]

    doubled, longer = run_ladder([pixels, lengths], sizes, run)

    assert np.array_equal(doubled, pixels.astype(np.float32) * 2)
    assert np.array_equal(longer, lengths + 1)
    assert sizes is None or set(seen) <= set(sizes)


def test_padding_repeats_a_real_row() -> None:
    seen: list[np.ndarray] = []
    run_ladder([np.array([[7], [9]], dtype=np.uint8)], [4], lambda batch: seen.extend(batch) or batch)
    assert seen[0].tolist() == [[7], [9], [9], [9]]
