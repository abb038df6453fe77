"""OM files run by ais_bench, in a separate thread."""

import atexit
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import is_same_model
from llama_adapter.runtime.graphs.ladder import run_ladder
from llama_adapter.runtime.graphs.om_file import HINT, OmFile
from llama_adapter.runtime.graphs.session import GraphInfo, check_owner, closed_error

T = TypeVar("T")


class OmSession:
    """One OM with a fixed batch size or with gears, or a folder of OMs for several batch sizes; see `GraphSession`.

    ais_bench sets its own ACL context in the calling thread and does not restore the previous one, which torch_npu's
    streams depend on. Contexts belong to threads, so OM files are used in a thread that does nothing else. If a decoder
    runs on the same device, open the decoder's device first. Not tested on hardware.
    """

    def __init__(self, path: str | os.PathLike[str], *, device_id: int = 0) -> None:
        """Raises GraphError for files, installations and devices that cannot be used."""
        self._file, name = str(path), f"ais_bench (device {device_id})"
        self.device_ms: float | None = None
        paths = _om_files(Path(path))
        self._thread = OmThread(file=self._file, name=name)
        try:
            files = [self._thread.open(functools.partial(OmFile, place, device_id=device_id)) for place in paths]
            self._by_size = _by_size(files, path=self._file)
        except BaseException:
            self.close()
            raise
        first = files[0]
        self.info = GraphInfo(
            name=name,
            file=self._file,
            inputs=first.inputs,
            outputs=first.outputs,
            card=first.card,
            batch_sizes=tuple(self._by_size),
            hint=HINT,
        )

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `GraphSession.run`."""
        return self._thread.call(lambda: self._run(inputs))

    def close(self) -> None:
        """Unload the files and end the thread."""
        self._thread.close()

    def _run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Runs in the files' thread."""
        times: list[float | None] = []

        def run(batch: list[np.ndarray]) -> list[np.ndarray]:
            file = self._by_size[len(batch[0])]
            outputs = file.run(batch)
            times.append(file.device_ms)
            return outputs

        outputs = run_ladder(inputs, tuple(self._by_size), run)
        known = [time for time in times if time is not None]
        self.device_ms = sum(known) if len(known) == len(times) else None
        return outputs


class Freed(Protocol):
    """An object that is opened, used and freed in an `OmThread`."""

    def free(self) -> None: ...


F = TypeVar("F", bound=Freed)


class OmThread:
    """The thread in which OM files are opened, run and freed, one call after the other.

    Unlike a `ThreadPoolExecutor`, it still works while the interpreter exits, when a session that was not closed
    releases its device.
    """

    def __init__(self, *, file: str, name: str) -> None:
        """`file` is used in messages, `name` is the thread's name."""
        self._file, self._owner = file, os.getpid()
        self._opened: list[Freed] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # so that no call is queued behind the end
        # The thread has no reference to this object, which could otherwise not be collected.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        # Frees a session that was not closed, when the object is collected or at exit. At exit, it must run before exit
        # functions that were registered earlier, such as torch_npu's. weakref's exit function would run too late.
        self._finalizer = weakref.finalize(self, _end, self._thread, self._jobs, self._opened, self._owner)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    def open(self, make: Callable[[], F]) -> F:
        """Call `make` in the thread; returns its result, which `close` frees, or raises its exception."""
        opened = self.call(make)
        self._opened.append(opened)
        return opened

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread; returns its result or raises its exception.

        Raises GraphError after `close` and in a forked process.
        """
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        check_owner(self._owner, file=self._file)
        with self._lock:
            if not self._finalizer.alive:
                raise closed_error(self._file)
            self._jobs.put(job)
        return future.result()

    def close(self) -> None:
        """Free all opened objects, and end the thread. May be repeated."""
        atexit.unregister(self._finalizer)
        if os.getpid() != self._owner:
            return  # another thread may have held the lock when this process was forked
        with self._lock:
            self._finalizer()
        self._thread.join()


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _end(
    thread: threading.Thread, jobs: "queue.SimpleQueue[Callable[[], None] | None]", opened: list[Freed], owner: int
) -> None:
    """Free what was opened after all earlier calls, then end the thread.

    Waits only in the main thread, because the garbage collector may call this in any thread, even one that the files'
    thread waits for. A forked process has neither that thread nor the device.
    """

    def free() -> None:
        while opened:
            opened.pop().free()

    if os.getpid() == owner:
        jobs.put(free)
        jobs.put(None)
        if threading.current_thread() is threading.main_thread():
            thread.join()


def _om_files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.om")) if path.is_dir() else [path]
    if not files:
        raise GraphError(
            f"The folder `{path}` holds no .om file", hint="`llama-adapter export om --out FOLDER/NAME` makes some"
        )
    return files


def _by_size(files: list[OmFile], *, path: str) -> dict[int, OmFile]:
    """Batch size -> file, ascending. Raises GraphError unless all files belong to one model."""
    found: dict[int, OmFile] = {}
    first = files[0]
    for file in files:
        if _sides(file) != _sides(first) or not is_same_model(file.card, first.card):
            raise GraphError(
                f"The OM files of `{path}` are not of one model: `{file.file}` differs from `{first.file}`",
                hint="keep one model's files in a folder, each with its side-car",
            )
        for size in file.batch_sizes:
            if size in found:
                raise GraphError(
                    f"The folder `{path}` has two files for a batch of {size}: `{found[size].file}` and `{file.file}`",
                    hint="keep one of them",
                )
            found[size] = file
    return dict(sorted(found.items()))


def _sides(file: OmFile) -> tuple[object, ...]:
    """The sizes and types that all files of a folder share. ATC may change the types of inputs."""
    return tuple(port.shape[1:] for port in file.inputs), tuple((port.dtype, port.shape[1:]) for port in file.outputs)
