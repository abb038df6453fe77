"""Percentiles of a stream of times, in constant memory."""

import math
from collections import Counter

_ACCURACY = 0.005


class Latencies:
    """A histogram of milliseconds. Percentiles are accurate to half a percent; minimum and maximum are exact.

    Buckets grow by a constant factor, as in DDSketch (Masson, Rim, Lee 2019, "DDSketch: A Fast and Fully-Mergeable
    Quantile Sketch with Relative-Error Guarantees"): from a microsecond to a week there are some 2,700 of them.
    """

    def __init__(self) -> None:
        self._factor = math.log((1 + _ACCURACY) / (1 - _ACCURACY))
        self._buckets: Counter[int] = Counter()
        self._least, self._greatest = math.inf, -math.inf

    def add(self, milliseconds: float) -> None:
        """Add one time; values below a microsecond count as one."""
        self._buckets[math.ceil(math.log(max(milliseconds, 1e-3)) / self._factor)] += 1
        self._least, self._greatest = min(self._least, milliseconds), max(self._greatest, milliseconds)

    def percentile(self, fraction: float) -> float | None:
        """The nearest-rank percentile, None without times. `fraction` is 0 to 1."""
        rank = max(math.ceil(fraction * self._buckets.total()), 1)
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                middle = math.exp(bucket * self._factor) * (1 - _ACCURACY)
                return min(max(middle, self._least), self._greatest)
        return None
