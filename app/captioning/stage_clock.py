"""Stage times: how the wall time of a run is divided among its stages."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # these modules import torch
    from llama_adapter.app.captioning.trace import Trace
    from llama_adapter.runtime.devices.base import Mark

# In the order in which a picture passes them. The reference demo uses the names from clip to decode.
STAGES = ("read", "clip", "pre", "forward", "post", "decode", "write")
HOST_STAGES = ("read", "decode", "write")  # they give the device no work, so its time in them is time without work

_MAX_MARKS = 512  # half of them are read at once: the device passed these long ago, so nothing is waited for


class StageClock:
    """Assigns all time between the first `enter` and `stop` to stages, one at a time.

    `synchronise` waits for the device at each boundary; without it, stage times are host times. `mark` puts a marker
    into the device's queue instead, to measure device times by stage.
    """

    def __init__(
        self,
        *,
        synchronise: Callable[[], None] | None = None,
        mark: Callable[[], "Mark | None"] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.trace: Trace | None = None  # records the same stages as spans
        self._synchronise, self._mark, self._now = synchronise, mark, now
        self._device_seconds = dict.fromkeys(STAGES, 0.0)
        self._marks: list[tuple[str | None, Mark]] = []  # with the stage that begins at the marker
        self._stage: str | None = None
        self._since = 0.0

    def enter(self, stage: str) -> None:
        """Begin a stage; raises KeyError for a name that is not in STAGES."""
        if stage not in self.seconds:
            raise KeyError(f"no stage named {stage!r}; there are {', '.join(self.seconds)}")
        if stage != self._stage:
            self._begin(stage)

    def stop(self) -> None:
        """End the current stage."""
        self._begin(None)

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call, or since the start. The current stage continues."""
        self._since = self._settle()
        taken, self.seconds = self.seconds, dict.fromkeys(STAGES, 0.0)
        return taken

    def read_device_seconds(self) -> dict[str, float] | None:
        """Device seconds by stage; None without marks. Waits for the last mark."""
        self._read_marks(len(self._marks) - 1)
        return dict(self._device_seconds) if self._marks else None

    def _begin(self, stage: str | None) -> None:
        self._since, self._stage = self._settle(), stage
        if (mark := self._mark()) is not None:
            self._marks.append((stage, mark))
            if len(self._marks) > _MAX_MARKS:
                self._read_marks(_MAX_MARKS // 2)
        if self.trace is not None:
            self.trace.enter(stage)

    def _settle(self) -> float:
        if self._synchronise is not None:
            self._synchronise()
        now = self._now()
        if self._stage is not None:
            self.seconds[self._stage] += now - self._since
        return now

    def _read_marks(self, count: int) -> None:
        """Add the intervals that the first `count` marks begin."""
        for (stage, begin), (_, end) in pairwise(self._marks[: count + 1]):
            if stage is not None:
                self._device_seconds[stage] += end.ms_since(begin) / 1e3
        del self._marks[: max(count, 0)]
