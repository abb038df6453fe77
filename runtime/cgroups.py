"""Folders of the cgroups that limit this process. Imports no torch."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's cgroup and of those above it, in versions 2 and 1; they need not exist.

    A container's limit is usually at the root. That of a systemd service or a Slurm job is at a path that `OWN` names.
    """
    lines = ["0::/", f"1:{controller}:/"]
    with suppress(OSError):
        lines += OWN.read_text(encoding="utf-8", errors="replace").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            place = (root / controller if controllers else root) / path.strip("/")
            yield from (place, *(above for above in place.parents if above.is_relative_to(root)))
