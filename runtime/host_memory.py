"""Memory of the host and of its cgroups, and how much of it this process may plan to use. Imports no torch."""

from pathlib import Path

from llama_adapter.runtime.cgroups import CGROUPS, cgroup_numbers

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
    known = [None if kibibytes is None else kibibytes * 1024, _most]
    v2, v1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for cgroup, limit, used in cgroup_numbers("memory", root, v2, v1):
        # The page cache, mapped weights included, counts as used, but the kernel can reclaim it.
        file, names = cgroup / "memory.stat", ("inactive_file", "active_file")
        cached = sum(statistic(file, f"total_{name}") or statistic(file, name) or 0 for name in names)  # v1 has totals
        known.append(max(int(limit - used) + cached, 0))
    return min((amount for amount in known if amount is not None), default=None)


def statistic(file: Path, name: str) -> int | None:
    """The number after `name` in a file such as /proc/meminfo; None if the file or the name is missing."""
    try:
        rows = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return None
    return next((int(row[1]) for row in rows if len(row) >= 2 and row[0] == name), None)
