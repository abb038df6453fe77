"""Measures the peak memory of a run."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class PeakMemory:
    """The peak since this object was made: of the device's allocator, or on a CPU of the process."""

    def __init__(self, device: torch.device) -> None:
        self._allocator: Any = None
        if device.type != "cpu":
            self._allocator = torch.get_device_module(device)
            self._allocator.reset_peak_memory_stats(device)
        self._device, self._before = device, _status("VmRSS:")

    def read(self) -> int | None:
        """The peak in bytes; None if the system does not report it."""
        if self._allocator is not None:
            return int(self._allocator.max_memory_allocated(self._device))
        peak = _status("VmHWM:")
        return None if peak is None or self._before is None else peak - self._before


def _status(name: str) -> int | None:
    """A value of /proc/self/status in bytes; None if it is missing."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
