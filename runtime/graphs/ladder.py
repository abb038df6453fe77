"""Runs any batch through a graph that was compiled for a few batch sizes."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

# Fixed cost of a call, in rows; an estimate. With sizes 1, 4 and 8, three rows are one padded call of four instead of
# three calls of one, and five rows are two calls, of four and one.
CALL_OVERHEAD: Final = 1.0


def split(num_rows: int, sizes: Sequence[int] | None) -> list[tuple[int, int]]:
    """The calls that run `num_rows` at the least cost, as pairs (batch size, rows in the call), the largest first.

    `sizes` are the compiled batch sizes, at least one; None means any size. A call costs its batch size plus
    CALL_OVERHEAD. Only the last call may be padded.
    """
    if sizes is None:
        return [(num_rows, num_rows)]
    calls, left = [], num_rows
    for size in _cheapest(num_rows, sorted(set(sizes))):
        calls.append((size, min(size, left)))
        left -= calls[-1][1]
    return calls


def run_ladder(
    inputs: Sequence[np.ndarray],
    sizes: Sequence[int] | None,
    run: Callable[[list[np.ndarray]], list[np.ndarray]],
) -> list[np.ndarray]:
    """Call `run` with all rows of `inputs`, at least 1, in the compiled batch sizes; returns outputs in the same order.

    The first dimension of every array is the batch. `run` gets arrays that are contiguous in C order.
    """
    results, start = [], 0
    for size, count in split(len(inputs[0]), sizes):
        outputs = run([_padded(array[start : start + count], size) for array in inputs])
        results.append([output[:count] for output in outputs])
        start += count
    return results[0] if len(results) == 1 else [np.concatenate(parts) for parts in zip(*results, strict=True)]


def _cheapest(num_rows: int, sizes: Sequence[int]) -> list[int]:
    """The batch sizes whose sum reaches `num_rows` at the least cost, the largest first."""
    costs: list[float] = [0.0]
    choices = [0]
    for wanted in range(1, num_rows + 1):
        cost, size = min((size + CALL_OVERHEAD + costs[max(0, wanted - size)], size) for size in sizes)
        costs.append(cost)
        choices.append(size)
    chosen, left = [], num_rows
    while left > 0:
        chosen.append(choices[left])
        left -= choices[left]
    return sorted(chosen, reverse=True)


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """The rows, padded to `size` with copies of the last row, so that values stay in the range of real inputs."""
    if len(rows) < size:
        rows = np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), axis=0)])
    return np.ascontiguousarray(rows)
