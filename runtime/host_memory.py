"""Memory of the host and of its container, and how much of it this process may plan with. Imports no torch."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_most: int | None = None  # bytes, see `plan_with`


def plan_with(most: int | None) -> None:
    """From now on, `free_host_bytes` is at most `most`: this process's part of a machine that others share. None: all.

    It is a matter of planning, as a number of threads is: nothing keeps the process from taking more.
    """
    global _most
    _most = most


def free_host_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Bytes that can still be allocated on the machine, in the container or by this process: the least of the three.

    None if unknown.
    """
    known = (_machine_bytes("MemAvailable"), _container_bytes(cgroup), _most)
    return min((amount for amount in known if amount is not None), default=None)


def total_host_bytes(cgroup: Path = _CGROUP) -> int | None:
    """Memory of the machine, or of the container if that allows less, in bytes; None if unknown."""
    amounts = [amount for amount in (_machine_bytes("MemTotal"), _number(cgroup / "memory.max")) if amount is not None]
    return min(amounts, default=None)


def _container_bytes(cgroup: Path) -> int | None:
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # The page cache counts as used, but the kernel can reclaim it, mapped weights too.
    cached = sum(_statistic(cgroup / "memory.stat", name) or 0 for name in ("inactive_file", "active_file"))
    return max(limit - used + cached, 0)


def _machine_bytes(name: str) -> int | None:
    kibibytes = _statistic(Path("/proc/meminfo"), f"{name}:")
    return None if kibibytes is None else kibibytes * 1024


def _number(file: Path) -> int | None:
    """The number in a file of cgroup v2; None for a missing file and for "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int | None:
    try:
        rows = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return None
    return next((int(row[1]) for row in rows if len(row) >= 2 and row[0] == name), None)
