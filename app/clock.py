"""Stage times: where the wall time of a run goes. Measures only; tables are made in report.py."""

import time
from collections.abc import Callable

# The path of a picture; clip to decode are the names of the reference demo, read and write are ours.
STAGES = ("read", "clip", "pre", "forward", "post", "decode", "write")


class StageClock:
    """Gives every moment between the first `enter` and `stop` to exactly one stage, so that the stages add up.

    With `synchronise` (profile mode) the device is waited for at each boundary; without it, a stage's time is the
    host's alone.
    """

    def __init__(self, *, synchronise: Callable[[], None] | None = None) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._synchronise = synchronise
        self._stage: str | None = None
        self._since = 0.0

    def enter(self, stage: str) -> None:
        """From now on time belongs to `stage`; raises KeyError for a name that is not in STAGES."""
        if stage == self._stage:
            return
        if stage not in self.seconds:
            raise KeyError(f"no stage named {stage!r}; there are {', '.join(self.seconds)}")
        self._since = self._settle()
        self._stage = stage

    def stop(self) -> None:
        """Time belongs to no stage until the next `enter`."""
        self._settle()
        self._stage = None

    @property
    def total(self) -> float:
        """Seconds of all stages together."""
        return sum(self.seconds.values())

    def _settle(self) -> float:
        if self._synchronise is not None:
            self._synchronise()
        now = time.perf_counter()
        if self._stage is not None:
            self.seconds[self._stage] += now - self._since
        return now
