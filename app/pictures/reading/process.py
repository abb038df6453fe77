"""The parent's side of a reading process: start, request, end."""

import dataclasses
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.app.pictures.reading.wire import (
    NOT_WANTED,
    REPLY_HEAD_BYTES,
    WANTED,
    ReplyHead,
    ReplyKind,
    Request,
    decode_message,
)
from llama_adapter.runtime.child_process import ChildProcess
from llama_adapter.vision.pixels import PixelRule

ENTRY = "llama_adapter.app.pictures.reading.child:run"
# One thread per process, because there is one process per reading thread. glibc keeps up to 128 MiB between pictures.
# By default, it returns pages to the system after each picture, and the system clears them again for the next one. That
# takes a tenth of the time for drawings and a fifth of the time for large photographs.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "MALLOC_MMAP_THRESHOLD_": f"{64 * 2**20}",
    "MALLOC_TRIM_THRESHOLD_": f"{128 * 2**20}",
    "MALLOC_TOP_PAD_": f"{16 * 2**20}",
    # glibc overwrites memory that it allocates. Some decoders leave parts of a damaged picture uninitialised. Such
    # memory may contain another client's picture, and the pixels would differ from run to run.
    "MALLOC_PERTURB_": "255",
}
REAP_LIMIT_S = 1.0
TICK_S = 0.05  # interval between calls of `keep_waiting`
STOPPED_LIMIT_S = 5.0  # a process that is stopped for this long, as by SIGSTOP, is killed
AWAY_S = 1.0  # a poll that ends this late is taken for a sign that the processes were frozen, as by `docker pause`
SLOW_NICENESS = 5  # about a quarter of the processor time of other processes
# A process that uses more memory than this after a picture is replaced, so that the memory is released.
MAX_KEPT_BYTES = 384 * 2**20
_CHECK_MEMORY_AFTER_MS = 100.0  # pictures that are read faster have not used much memory

# Called during a reading, with the process and the processor seconds it has used for this picture. An exception that it
# raises ends the reading.
KeepWaiting = Callable[["ReadingProcess", float], None]


class ReadingProcess:
    """A process that reads pictures, for one caller at a time. After an error, it must be ended."""

    def __init__(self, spec: ReadingSpec, *, pixels: PixelRule, memory_bytes: int | None) -> None:
        """Start the process without waiting for it. Raises OSError."""
        self._pixels, self._folder = pixels, _current_folder()
        self.is_ready = False  # whether it has reported that it is ready
        self.is_spent = False  # it works, but should be replaced: its priority is low, or it uses much memory
        self.digest = ""  # of the picture that is being read; "" until known
        self.started_at = time.monotonic()
        about = (*(dataclasses.asdict(one) for one in (pixels, spec)), memory_bytes)
        self.child = ChildProcess(ENTRY, *map(json.dumps, about), environ=ENVIRONMENT, capture=True, watch_parent=True)
        self._connection = self.child.connection

    def wait_until_ready(self, *, timeout_s: float) -> None:
        """Wait until the process is ready. Raises the errors of `read`, also if it has ended or was stopped since."""
        if not self.is_ready:
            deadline = time.monotonic() + timeout_s
            self._receive_head(self._wait(None, deadline=deadline))
            self.is_ready = True
        elif self.child.has_ended() or self._usage()[1]:
            raise ConnectionAbortedError("it has ended, or was stopped")

    def read(
        self,
        source: str | FileSlice | bytes,
        *,
        name: str | None,
        wants_pixels: Callable[[str], bool] | None,
        side: int | None,
        timeout_s: float | None,
        keep_waiting: KeepWaiting | None = None,
    ) -> PictureReading:
        """Read one picture.

        Raises TimeoutError after `timeout_s`, ConnectionError if the process has ended, ChildProcessError if its reply
        is malformed, and the exceptions of `wants_pixels` and `keep_waiting`.
        """
        self.digest = ""
        started = time.perf_counter()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        folder = _current_folder()
        moved, self._folder = folder if folder != self._folder else None, folder
        asks_first = wants_pixels is not None
        request = Request(source=source, name=name, asks_first=asks_first, folder=moved, side=side)
        self._send(*request.encode(), deadline=deadline)
        max_side = self._pixels.most_side if side is None else side
        deadline = self._wait(keep_waiting, deadline=deadline)
        head = self._receive_head(deadline, max_side=max_side)
        if head.kind is ReplyKind.DIGEST:
            asked = time.monotonic()
            is_wanted = wants_pixels is None or wants_pixels(head.digest)
            deadline = None if deadline is None else deadline + time.monotonic() - asked  # this time does not count
            self._send(WANTED if is_wanted else NOT_WANTED, deadline=deadline)
            deadline = self._wait(keep_waiting, deadline=deadline)
            head = self._receive_head(deadline, max_side=max_side)
        if head.kind is not ReplyKind.DONE:
            raise ChildProcessError(f"it said {head.kind.name} where a picture was due")
        size = self._pixels.image_size
        if head.num_bytes and head.code is None and side is None and any(length % size for length in head.shape):
            raise ChildProcessError(f"it sent {head.shape} pixels in place of squares of {size}")
        pixels, error = self._receive_body(head, deadline)
        self.child.listen()
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if elapsed_ms > _CHECK_MEMORY_AFTER_MS and self._resident_bytes() > MAX_KEPT_BYTES:
            self.is_spent = True
        seen: dict[str, Any] = dict(zip(("width", "height"), head.size, strict=True), notes=head.notes)
        return PictureReading(digest=head.digest, pixels=pixels, error=error, elapsed_ms=elapsed_ms, **seen)

    def slow_down(self) -> None:
        """Lower the process's priority. It cannot be raised again, so the process is marked as spent."""
        self.is_spent = True
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.child.process.pid, SLOW_NICENESS)

    def kill(self) -> None:
        """Send SIGKILL. A process that hangs in the operating system ends later. Thread-safe."""
        self.child.process.kill()

    def end(self) -> bool:
        """Kill the process and release its resources; returns whether it has ended. Can be called again."""
        self.child.process.kill()
        self._connection.close()
        is_gone = self.child.has_ended(within_s=REAP_LIMIT_S)
        self.child.listen()
        self.child.release()
        return is_gone

    def how_it_ended(self) -> str:
        """How a process ended by itself, in words such as "by SIGSEGV"."""
        self.child.has_ended(within_s=REAP_LIMIT_S)
        return self.child.how_it_ended() or "amid a reply"

    def _send(self, *parts: bytes, deadline: float | None) -> None:
        with _socket_errors():
            for part in filter(None, parts):
                self._connection.settimeout(_remaining(deadline))
                self._connection.sendall(part)

    def _wait(self, keep_waiting: KeepWaiting | None, *, deadline: float | None) -> float | None:
        """Wait until data can be received; returns the deadline, later by the time in which the processes were frozen.

        Raises TimeoutError after the deadline. A process that stays stopped is killed: ConnectionError.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        cpu_before: float | None = None
        runs_at = time.monotonic()  # when it was last seen not stopped
        while True:
            polled_at = time.monotonic()
            has_data = poll.poll(min(TICK_S, _remaining(deadline) or TICK_S) * 1e3)
            now = time.monotonic()
            away_s = now - polled_at - TICK_S
            if away_s > AWAY_S:  # a guess: both processes were frozen
                runs_at = now
                deadline = None if deadline is None else deadline + away_s
            if has_data:
                return deadline
            if deadline is not None and now > deadline:
                raise TimeoutError
            cpu_s, is_stopped = self._usage()
            runs_at = runs_at if is_stopped else now
            if now - runs_at > STOPPED_LIMIT_S:
                self.kill()
                raise ConnectionAbortedError("it was stopped")
            cpu_before = cpu_s if cpu_before is None else cpu_before
            if keep_waiting is not None:
                keep_waiting(self, cpu_s - cpu_before)

    def _usage(self) -> tuple[float, bool]:
        """Processor seconds since the process started, and whether it is stopped; without /proc, the clock and no."""
        with suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{self.child.process.pid}/stat").read_bytes().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == b"T"
        return time.monotonic(), False

    def _resident_bytes(self) -> int:
        """Memory in use; 0 without /proc."""
        with suppress(OSError, IndexError, ValueError):
            pages = Path(f"/proc/{self.child.process.pid}/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def _receive_head(self, deadline: float | None, *, max_side: int = 0) -> ReplyHead:
        content = bytearray(REPLY_HEAD_BYTES)
        self._receive_into(memoryview(content), deadline)
        try:
            head = ReplyHead.decode(content, max_side=max_side)
        except ValueError as error:
            raise ChildProcessError(f"it is not a reply of a reading process: {error}") from None
        self.digest = head.digest
        return head

    def _receive_body(self, head: ReplyHead, deadline: float | None) -> tuple[np.ndarray | None, AnswerError | None]:
        if head.code is not None:
            content = bytearray(head.num_bytes)
            self._receive_into(memoryview(content), deadline)
            return None, AnswerError(code=head.code, message=decode_message(content))
        if not head.num_bytes:
            return None, None
        pixels = np.empty((*head.shape, 3), np.uint8)
        self._receive_into(pixels.data.cast("B"), deadline)
        return pixels, None

    def _receive_into(self, view: memoryview, deadline: float | None) -> None:
        with _socket_errors():
            while view:
                self._connection.settimeout(_remaining(deadline))
                count = self._connection.recv_into(view)
                if not count:
                    self.child.has_ended(within_s=REAP_LIMIT_S)  # collects the exit status for the message
                    raise ConnectionAbortedError("it closed the connection")
                view = view[count:]


@contextmanager
def _socket_errors() -> Iterator[None]:
    """Raise TimeoutError or ConnectionError for any error of a socket."""
    try:
        yield
    except (TimeoutError, ConnectionError):
        raise
    except OSError as error:
        raise ConnectionAbortedError(error.strerror) from error


def _remaining(deadline: float | None) -> float | None:
    """Timeout in seconds for one call. It is never 0, so that data that has arrived is still received."""
    return None if deadline is None else max(1e-3, deadline - time.monotonic())


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None
