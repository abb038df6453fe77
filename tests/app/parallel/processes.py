"""The processes of ranks, as listed by the operating system."""

from pathlib import Path


def ranks_of(process: int) -> list[int]:
    """The rank processes that `process` has started."""
    found = [
        child for task in Path(f"/proc/{process}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return sorted(int(child) for child in found if b"rank_process" in Path(f"/proc/{child}/cmdline").read_bytes())
