"""How many processors this process may use, by its affinity and by its cgroups' quotas. Imports no torch."""

import functools
import math
import os
import sys
from pathlib import Path

from llama_adapter.runtime.cgroups import CGROUPS, cgroup_numbers


def usable_cpus(root: Path = CGROUPS) -> int:
    """Processors of the process's affinity, or the quota of its cgroups rounded up if that is less; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def default_threads() -> int:
    """Threads of a computation on the CPU: as many as torch uses, or would use if it were imported."""
    if (get := getattr(sys.modules.get("torch"), "get_num_threads", None)) is not None:
        return int(get())
    return _threads_without_torch()


@functools.cache
def _threads_without_torch() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else usable_cpus()


def cpu_quota(root: Path = CGROUPS) -> float | None:
    """The processors' time that this process's cgroups get, such as 1.5: their least quota; None without one."""
    found = cgroup_numbers("cpu", root, ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return min((quota / period for _, quota, period in found if quota > 0 and period > 0), default=None)
