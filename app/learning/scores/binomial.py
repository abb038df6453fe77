"""Exact bounds for shares of independent examples: binomial tails, and the intervals of Clopper and Pearson (1934)."""

from typing import Final

import numpy as np

_NUM_HALVINGS: Final = 40  # to 1e-12


def at_most(count: int, total: int, share: float) -> float:
    """The probability of at most `count` successes in `total` independent trials, each a success with `share`."""
    if count >= total or share <= 0.0:
        return 1.0
    if share >= 1.0:
        return 0.0
    successes = np.arange(1, count + 1)
    steps = np.log((total - successes + 1) / successes) + np.log(share / (1.0 - share))
    log_terms = total * np.log1p(-share) + np.concatenate(([0.0], np.cumsum(steps)))
    return min(1.0, float(np.exp(log_terms).sum()))


def exact_low(num_right: int, count: int, *, level: float) -> float:
    """The lower bound of Clopper and Pearson for a share, which is too high with a probability of at most `level`."""
    low, high = 0.0, 1.0  # of the share of wrong ones; its upper bound is looked for
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(count - num_right, count, middle) > level else (low, middle)
    return 1.0 - high


def exact_interval(num_right: int, count: int, *, level: float = 0.05) -> tuple[float, float]:
    """The two-sided interval of Clopper and Pearson, 95 % by default, for `num_right` of `count`."""
    return exact_low(num_right, count, level=level / 2), 1.0 - exact_low(count - num_right, count, level=level / 2)
