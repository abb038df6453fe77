"""How much memory the host has for this process, and which errors mean that there was not enough."""

from pathlib import Path

# torch has no class of its own for these: the CPU's allocator, a library's workspace, the driver's own allocations, and
# oneDNN, which drops the reason why it could not make what it had found a way to compute with.
_SHORTAGES = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
_SHORTAGES_OF_ONEDNN = ("could not create a primitive", "could not create a memory object")  # to the letter
_GROUP = Path("/sys/fs/cgroup")


def tells_shortage(text: str) -> bool:
    """Whether an error's text says that memory was not to be had."""
    return any(words in text for words in _SHORTAGES) or text.strip() in _SHORTAGES_OF_ONEDNN


def free_host_bytes(group: Path = _GROUP) -> int | None:
    """What can still be taken: of the machine, or of the container if that allows less; None if nobody tells."""
    free, limit = _machine_bytes("MemAvailable"), _number(group / "memory.max")
    used = _number(group / "memory.current")
    if limit is None or used is None:
        return free
    # The page cache counts as used, and gives way.
    left = max(limit - used + (_statistic(group / "memory.stat", "inactive_file") or 0), 0)
    return left if free is None else min(free, left)


def total_host_bytes(group: Path = _GROUP) -> int | None:
    """All memory of the machine, or of the container if that allows less; None if nobody tells."""
    amounts = [amount for amount in (_machine_bytes("MemTotal"), _number(group / "memory.max")) if amount is not None]
    return min(amounts, default=None)


def _machine_bytes(name: str) -> int | None:
    kibibytes = _statistic(Path("/proc/meminfo"), f"{name}:")
    return None if kibibytes is None else kibibytes * 1024


def _number(file: Path) -> int | None:
    """Of a file of cgroup v2 (kernel documentation, "Memory Interface Files"); None for none, and for "max"."""
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
