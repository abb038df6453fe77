"""Percentiles of any number of times in memory that does not grow with it: what it keeps is a histogram."""

import math
from collections import Counter

_ACCURACY = 0.005


class Latencies:
    """Times in milliseconds. Percentiles are within half a percent of the exact ones, the least and greatest exact.

    Buckets grow by a constant factor, as in DDSketch (Masson, Rim, Lee 2019, "DDSketch: A Fast and Fully-Mergeable
    Quantile Sketch with Relative-Error Guarantees"): from a microsecond to a week there are some 2,700 of them.
    """

    def __init__(self) -> None:
        self._factor = math.log((1 + _ACCURACY) / (1 - _ACCURACY))
        self._buckets: Counter[int] = Counter()
        self._least, self._greatest = math.inf, -math.inf

    def add(self, milliseconds: float) -> None:
        """Take one time in; what is below a microsecond counts as one."""
        self._buckets[math.ceil(math.log(max(milliseconds, 1e-3)) / self._factor)] += 1
        self._least, self._greatest = min(self._least, milliseconds), max(self._greatest, milliseconds)

    def percentile(self, fraction: float) -> float | None:
        """Nearest rank: a time at or below which this fraction of all lies; None without any."""
        rank = max(math.ceil(fraction * self._buckets.total()), 1)
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                middle = math.exp(bucket * self._factor) * (1 - _ACCURACY)
                return min(max(middle, self._least), self._greatest)
        return None
