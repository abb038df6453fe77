"""Runs of torch's profiler that end in a Chrome trace."""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import profiler


@contextmanager
def torch_trace(folder: Path, activities: Sequence[Any]) -> Iterator[None]:
    """Profile the calling thread and write `folder`/trace-DATE-TIME.json.gz at the end.

    Perfetto and chrome://tracing open the file. Raises OSError and RuntimeError if it cannot be written.
    """
    with profiler.profile(activities=activities) as profile:
        yield
    profile.export_chrome_trace(str(_free_name(folder)))


def _free_name(folder: Path) -> Path:
    stem = time.strftime("trace-%Y%m%d-%H%M%S")
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / f"{name}.json.gz").exists())
