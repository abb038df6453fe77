"""Reads chunks of pictures ahead of the captioners, with Ray Data on all machines.

`ReadingPipeline` runs in a thread of the driver. `read_chunk` runs in the reading tasks; it leaves out pictures that an
earlier run answered.
"""

import dataclasses
import os
import pickle
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

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


def read_chunk(payload: bytes, *, reading: Reading, known: Known | None) -> bytes:
    """Read the pictures of a pickled `Chunk`; returns it pickled, with readings or errors in their place."""
    chunk: Chunk = pickle.loads(payload)
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
    return pickle.dumps(dataclasses.replace(chunk, items=items, problem=problem), protocol=5)


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


class ReadingPipeline:
    """Takes windows of chunks, and returns references to read chunks in any order.

    Each window is a separate Ray dataset, so the complete list of pictures is never needed. If a machine is lost, its
    chunks are read again; the driver keeps them.
    """

    def __init__(self, reading: Reading, *, known: Known | None, num_tasks: int, ahead: int) -> None:
        """`ahead` is the number of read chunks that may wait here, in addition to those that Ray Data keeps."""
        import ray

        self._read = partial(read_block, reading=reading, known=None if known is None else ray.put(known))
        self._num_tasks = num_tasks
        self._windows: queue.SimpleQueue[Sequence[Chunk] | None] = queue.SimpleQueue()
        self._ready: queue.Queue[ObjectRef[Any] | BaseException | None] = queue.Queue(max(1, ahead))
        self._num_pending = 0  # number of windows; used only by the thread that calls `take`
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="read-chunks", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Number of windows that are not completely read."""
        return self._num_pending

    def add(self, window: Sequence[Chunk]) -> None:
        """Read these chunks, after all earlier ones."""
        self._num_pending += 1
        self._windows.put(window)

    def take(self, *, timeout_s: float) -> "ObjectRef[Any] | None":
        """A read chunk, or None if none is ready within `timeout_s`. Raises the error that ended reading a window."""
        while True:
            try:
                got = self._ready.get(timeout=timeout_s) if timeout_s else self._ready.get_nowait()
            except queue.Empty:
                return None
            if got is None:
                self._num_pending -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                return got

    def close(self) -> None:
        """Stop reading. May be called again."""
        self._is_closed = True
        self._windows.put(None)
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.05)

    def _run(self) -> None:
        while (window := self._windows.get()) is not None:
            try:
                for block in self._blocks(window):
                    if self._is_closed:
                        return
                    self._ready.put(block)
            except BaseException as error:
                self._ready.put(error)
            self._ready.put(None)

    def _blocks(self, window: Sequence[Chunk]) -> "Iterator[ObjectRef[Any]]":
        import ray.data

        rows = [{"chunk": pickle.dumps(chunk, protocol=5)} for chunk in window]
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            self._read,
            batch_size=1,
            batch_format="numpy",
            compute=ray.data.TaskPoolStrategy(size=min(self._num_tasks, len(rows))),
            num_cpus=READING_CPUS,
        )
        for bundle in dataset.iter_internal_ref_bundles():
            yield from bundle.block_refs


def read_block(batch: dict[str, "np.ndarray[Any, Any]"], *, reading: Reading, known: Any) -> dict[str, Any]:
    """As `read_chunk`, for a batch of one `Chunk`. `known` is a reference to a `Known`."""
    import ray

    found: Known | None = None if known is None else ray.get(known)
    (payload,) = batch["chunk"]
    read = np.empty(1, dtype=object)
    read[0] = read_chunk(payload, reading=reading, known=found)
    return {"payload": read}


def prepare_context() -> None:
    """Set Ray Data's options in this process."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
