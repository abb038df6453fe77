"""Reads chunks of pictures ahead of the captioners, in tasks on all machines.

The driver has `Readers`. `read_chunk` runs in the tasks; it leaves out pictures that an earlier run answered.
"""

import dataclasses
import logging
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from llama_adapter.app.captioning.work_items import WorkItem, look_at
from llama_adapter.app.jobs.clusters.chunks import Chunk, Known
from llama_adapter.app.jobs.clusters.places import READING_CPUS
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs.addresses import is_remote, read_remote
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading, Reader
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.runtime.problems import describe
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.pixels import PixelRule

if TYPE_CHECKING:
    from ray import ObjectRef

# Remote storage is slow for each file, but serves many files at once. Local files are read one after another, because
# there is one task for each processor.
_REMOTE_THREADS = 8

_log = logging.getLogger("llama_adapter.scale")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the pictures of a job are read."""

    spec: ReadingSpec  # of the loaded model
    pixels: PixelRule  # of its encoder
    kind: str  # process or thread
    timeout_s: float
    folder: str  # the current folder of the driver


def enter_folder(folder: str) -> None:
    """Change to the driver's current folder, if it exists here, so that relative names have the same meaning."""
    with suppress(OSError):
        os.chdir(folder)


def read_chunk(chunk: Chunk, *, reading: Reading, known: Known | None) -> Chunk:
    """Read the pictures of a chunk; returns it with readings or errors in their place."""
    enter_folder(reading.folder)
    look = partial(_look, reader=_reader(reading), known=None if chunk.is_sure else known)
    items, problem = chunk.items, None
    try:
        num_threads = _REMOTE_THREADS if any(is_remote(item.picture) for item in items) else 1
        with ThreadPoolExecutor(num_threads, thread_name_prefix="read") as pool:
            items = tuple(pool.map(look, items))  # in their order, because the driver identifies pictures by position
    except Exception as error:  # an error of a single picture is in its reading instead
        problem = describe(error)
        items = tuple(dataclasses.replace(item, picture=PictureReading()) for item in chunk.items)
    return dataclasses.replace(chunk, items=items, problem=problem)


def _look(item: WorkItem, *, reader: Reader, known: Known | None) -> WorkItem:
    if isinstance(item.picture, str) and is_remote(item.picture):
        try:
            item = dataclasses.replace(item, picture=read_remote(item.picture))
        except PictureError as error:
            failed = PictureReading(error=AnswerError(code=error.code, message=error.message))
            item = dataclasses.replace(item, picture=failed)
    looked = look_at(item, reader=reader, wants=None if known is None else known.left)
    # A known failure has no error here: without content, the picture is left out.
    picture = looked.picture if looked.questions else dataclasses.replace(looked.picture, error=None)
    return dataclasses.replace(item, picture=picture)


@cache
def _reader(reading: Reading) -> Reader:
    """One reader for all chunks of this process."""
    if reading.kind == "thread":
        return PictureReader(reading.spec, pixels=reading.pixels)
    return IsolatedReader(reading.spec, pixels=reading.pixels, timeout_s=reading.timeout_s, num_processes=1)


class Readers:
    """Reads chunks in tasks on all machines. Ray starts a task again if its process or machine is lost."""

    def __init__(self, reading: Reading, *, known: Known | None, at_once: int, most: int) -> None:
        """At most `at_once` chunks are being read, and at most `most` are being read or wait for a captioner."""
        import ray

        remote: Any = ray.remote  # its types know no tasks with several results
        self._task = remote(_read_apart).options(num_cpus=READING_CPUS, num_returns=2, scheduling_strategy="SPREAD")
        self._reading, self._known = reading, ray.put(known)
        self._at_once, self._most = at_once, most
        # By the state of each task: its chunk, and the same read and pickled.
        self._under_way: dict[ObjectRef[None], tuple[Chunk, ObjectRef[bytes]]] = {}

    @property
    def num_pending(self) -> int:
        """Number of chunks that were added and not taken."""
        return len(self._under_way)

    @property
    def can_take(self) -> bool:
        """Whether another chunk can be added."""
        import ray

        if not self._at_once <= self.num_pending < self._most:
            return self.num_pending < self._most
        _, unread = ray.wait([*self._under_way], num_returns=self.num_pending, timeout=0)
        return len(unread) < self._at_once

    def add(self, chunk: Chunk) -> None:
        """Read a chunk."""
        state, read = self._task.remote(chunk, reading=self._reading, known=self._known)
        self._under_way[state] = chunk, read

    def take(self, *, timeout_s: float) -> "tuple[Chunk, ObjectRef[bytes] | Exception | None] | None":
        """A chunk, and the same read and pickled, or the error of the code that reads.

        None in place of the latter if the process or machine was lost that read it. None alone if no chunk is ready
        within `timeout_s`.
        """
        import ray

        done, _ = ray.wait([*self._under_way], timeout=timeout_s) if self._under_way else ([], [])
        if not done:
            return None
        chunk, read = self._under_way.pop(done[0])
        try:
            ray.get(done[0])
        except _losses() as error:
            _log.info("a chunk is lost that was being read: %s", error)
            return chunk, None
        except Exception as error:
            return chunk, error
        return chunk, read


def _losses() -> tuple[type[Exception], ...]:
    """The errors of a task whose process, machine or result was lost. Another attempt may succeed."""
    from ray import exceptions

    return (
        exceptions.WorkerCrashedError,
        exceptions.OutOfMemoryError,
        exceptions.LocalRayletDiedError,
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,
    )


def _read_apart(chunk: Chunk, *, reading: Reading, known: Known | None) -> tuple[None, bytes]:
    """As `read_chunk`, but pickled, because arrays of Ray are shared and cannot be written to."""
    return None, pickle.dumps(read_chunk(chunk, reading=reading, known=known), protocol=5)
