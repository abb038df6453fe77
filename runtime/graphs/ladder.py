"""Any number of pictures through a graph that was compiled for a few batch sizes: which calls to make, and padding."""

from collections.abc import Callable, Sequence

import numpy as np

# What a call costs beside its pictures, in pictures. A guess, not a measurement: it makes three pictures one padded
# call of four rather than three calls of one, and leaves five as four and one where sizes 1, 4 and 8 are there.
CALL_OVERHEAD = 1.0


def split(num_pictures: int, sizes: Sequence[int] | None, *, overhead: float = CALL_OVERHEAD) -> list[tuple[int, int]]:
    """The calls that run `num_pictures` at the least cost: (batch size, pictures in it), the largest first.

    `sizes` are the batch sizes there are; None means any. A call costs its batch size and `overhead`. Only the last
    call may have fewer pictures than its size. Raises ValueError for negative counts and for sizes below 1.
    """
    if num_pictures < 0:
        raise ValueError(f"num_pictures must be at least 0, got {num_pictures}")
    if not num_pictures:
        return []
    if sizes is None:
        return [(num_pictures, num_pictures)]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be whole numbers of at least 1, got {list(sizes)}")
    calls, left = [], num_pictures
    for size in _cheapest(num_pictures, sorted(set(sizes)), overhead=overhead):
        calls.append((size, min(size, left)))
        left -= calls[-1][1]
    return calls


def run_ladder(
    pixels_BHWC: np.ndarray, sizes: Sequence[int] | None, run: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """`run` over all pictures (B, ...), B at least 1, in calls of the batch sizes there are; results (B, ...) in order.

    `run` gets arrays that are contiguous in C order and returns one result a picture.
    """
    results, start = [], 0
    for size, count in split(len(pixels_BHWC), sizes):
        batch = _padded(pixels_BHWC[start : start + count], size)
        results.append(run(batch)[:count])
        start += count
    return results[0] if len(results) == 1 else np.concatenate(results)


def _cheapest(num_pictures: int, sizes: Sequence[int], *, overhead: float) -> list[int]:
    """The batch sizes whose sum reaches `num_pictures` at the least cost, the largest first."""
    costs: list[float] = [0.0]
    choices = [0]
    for wanted in range(1, num_pictures + 1):
        cost, size = min((size + overhead + costs[max(0, wanted - size)], size) for size in sizes)
        costs.append(cost)
        choices.append(size)
    chosen, left = [], num_pictures
    while left > 0:
        chosen.append(choices[left])
        left -= choices[left]
    return sorted(chosen, reverse=True)


def _padded(pixels_BHWC: np.ndarray, size: int) -> np.ndarray:
    """The pictures, then the last one again until there are `size`: numbers of the range that the graph is made for."""
    if len(pixels_BHWC) < size:
        last = pixels_BHWC[-1:]
        pixels_BHWC = np.concatenate([pixels_BHWC, np.repeat(last, size - len(pixels_BHWC), axis=0)])
    return np.ascontiguousarray(pixels_BHWC)
