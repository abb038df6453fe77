"""What the cgroups of this process say. Imports no torch."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cgroup_numbers(controller: str, root: Path, *files: tuple[str, ...]) -> Iterator[tuple[Path, float, float]]:
    """The folders of this process's cgroup and of those above it, in versions 2 and 1, with the two numbers in `files`.

    Each of `files` names one or two files, which hold two numbers together. Folders without two are left out.
    A container's limits are at the root; those of a systemd service or a Slurm job are at a path that `OWN` names.
    """
    lines = ["0::/", f"1:{controller}:/"]
    with suppress(OSError):
        lines += OWN.read_text(encoding="utf-8", errors="replace").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers or controller in controllers.split(","):
            place = (root / controller if controllers else root) / path.strip("/")
            for folder in (place, *(above for above in place.parents if above.is_relative_to(root))):
                for names in files:
                    with suppress(OSError, ValueError):  # not there, "max" for no limit, or not two numbers
                        texts = [(folder / name).read_text(encoding="ascii") for name in names]
                        first, second = (float(number) for text in texts for number in text.split())
                        if math.isfinite(first) and math.isfinite(second):
                            yield folder, first, second
