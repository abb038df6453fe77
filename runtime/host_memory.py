"""Memory of the host and of its cgroups, and how much of it this process may plan to use. Imports no torch."""

from pathlib import Path
from typing import Final

from llama_adapter.runtime.cgroups import CGROUPS, cgroup_folders

# Of a cgroup of version 2 and of version 1: its limit, what it uses, and the beginning of names in its statistics.
_FILES: Final = (("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
_most: int | None = None  # bytes, see `plan_with`


def plan_with(most: int | None) -> None:
    """Limit `free_host_bytes` to `most` bytes from now on: this process's part of a shared machine. None: no limit.

    Only plans obey this limit. The process can still allocate more.
    """
    global _most
    _most = most


def free_host_bytes(root: Path = CGROUPS) -> int | None:
    """Bytes that can still be allocated: the least of what the machine, the cgroups and `plan_with` allow.

    None if none of the three is known.
    """
    kibibytes = statistic(Path("/proc/meminfo"), "MemAvailable:")
    known = (None if kibibytes is None else kibibytes * 1024, *map(_left_in, cgroup_folders("memory", root)), _most)
    return min((amount for amount in known if amount is not None), default=None)


def _left_in(cgroup: Path) -> int | None:
    for limit_file, usage_file, prefix in _FILES:
        limit, used = _number(cgroup / limit_file), _number(cgroup / usage_file)
        if limit is not None and used is not None:
            # The page cache, mapped weights included, counts as used, but the kernel can reclaim it.
            cached = (
                statistic(cgroup / "memory.stat", prefix + name) or 0 for name in ("inactive_file", "active_file")
            )
            return max(limit - used + sum(cached), 0)
    return None


def _number(file: Path) -> int | None:
    """The number in a file of a cgroup; None for a missing file and for "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def statistic(file: Path, name: str) -> int | None:
    """The number after `name` in a file such as /proc/meminfo; None if the file or the name is missing."""
    try:
        rows = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return None
    return next((int(row[1]) for row in rows if len(row) >= 2 and row[0] == name), None)
