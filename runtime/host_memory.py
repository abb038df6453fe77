"""Memory of the host and of its container, and how much of it this process may plan to use. Imports no torch."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_most: int | None = None  # bytes, see `plan_with`


def plan_with(most: int | None) -> None:
    """Limit `free_host_bytes` to `most` bytes from now on: this process's part of a shared machine. None: no limit.

    Only plans obey this limit. The process can still allocate more.
    """
    global _most
    _most = most


def free_host_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Bytes that can still be allocated: the least of what the machine, the container and `plan_with` allow.

    None if none of the three is known.
    """
    kibibytes = statistic(Path("/proc/meminfo"), "MemAvailable:")
    known = (None if kibibytes is None else kibibytes * 1024, _container_bytes(cgroup), _most)
    return min((amount for amount in known if amount is not None), default=None)


def _container_bytes(cgroup: Path) -> int | None:
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # The page cache, mapped weights included, counts as used, but the kernel can reclaim it.
    cached = sum(statistic(cgroup / "memory.stat", name) or 0 for name in ("inactive_file", "active_file"))
    return max(limit - used + cached, 0)


def _number(file: Path) -> int | None:
    """The number in a file of cgroup v2; None for a missing file and for "max"."""
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
