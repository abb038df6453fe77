"""Ray Data reads chunks of pictures on all machines, ahead of the captioners. A thread of the driver."""

import pickle
import queue
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from llama_adapter.app.scale.chunks import Chunk, Known
from llama_adapter.app.scale.places import READING_CPUS
from llama_adapter.app.scale.reading import Reading, read_chunk

if TYPE_CHECKING:
    from ray import ObjectRef


class ReadingPipeline:
    """Takes windows of chunks, and gives references to read chunks in any order.

    Each window is a Ray dataset of its own: the list of pictures is never needed as a whole, and what is lost with a
    machine is read again from the chunk, which the driver keeps.
    """

    def __init__(self, reading: Reading, *, known: Known | None, num_tasks: int, ahead: int) -> None:
        """`ahead`: how many read chunks wait to be taken, beside those that Ray Data keeps."""
        import ray

        self._read = partial(read_block, reading=reading, known=None if known is None else ray.put(known))
        self._num_tasks = num_tasks
        self._windows: queue.SimpleQueue[Sequence[Chunk] | None] = queue.SimpleQueue()
        self._ready: queue.Queue[ObjectRef[Any] | BaseException | None] = queue.Queue(max(1, ahead))
        self._num_pending = 0  # windows; of the thread that calls `take`
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="read-chunks", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Windows that are not read to their end."""
        return self._num_pending

    def add(self, window: Sequence[Chunk]) -> None:
        """Read these chunks, after those before."""
        self._num_pending += 1
        self._windows.put(window)

    def take(self, *, timeout_s: float) -> "ObjectRef[Any] | None":
        """A read chunk, if one is ready within `timeout_s`. Raises what ended the reading of a window."""
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
    """A batch of one pickled `Chunk` -> one pickled `ReadChunk`. `known` is a reference to a `Known`."""
    import ray

    found: Known | None = None if known is None else ray.get(known)
    (payload,) = batch["chunk"]
    read = np.empty(1, dtype=object)
    read[0] = read_chunk(payload, reading=reading, known=found)
    return {"payload": read}


def prepare_context() -> None:
    """Settings of Ray Data in this process."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.enable_auto_log_stats = False
