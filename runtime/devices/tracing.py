"""Runs torch's profiler and writes a Chrome trace."""

import errno
import gzip
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import profiler

from llama_adapter.runtime.atomic_write import atomic_write


@contextmanager
def torch_trace(folder: Path, activities: Sequence[Any]) -> Iterator[None]:
    """Profile the calling thread and write `folder`/trace-DATE-TIME.json.gz at the end.

    Perfetto and chrome://tracing open the file. Raises OSError and RuntimeError if it cannot be written.
    """
    # Without `acc_events`, torch 2.11 warns of what it does at the end of a cycle, and there is one cycle.
    with profiler.profile(activities=activities, acc_events=True) as profile:
        yield
    with tempfile.TemporaryDirectory() as place:
        path = os.path.join(place, "trace.json")
        profile.export_chrome_trace(path)
        with open(path, "rb") as plain, atomic_write(_free_name(folder)) as file:
            plain.seek(-min(os.path.getsize(path), 16), os.SEEK_END)
            if not plain.read().rstrip().endswith(b"}"):  # torch does not report a full disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            plain.seek(0)
            with gzip.open(file, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(plain, packed)


def _free_name(folder: Path) -> Path:
    stem = time.strftime("trace-%Y%m%d-%H%M%S")
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / f"{name}.json.gz").exists())
