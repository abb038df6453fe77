"""One reading process as its parent sees it: started, asked, and ended without ever being waited for without bound."""

import dataclasses
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.reading.reader import PictureLimits, PictureReading
from llama_adapter.app.reading.sources import FileSlice
from llama_adapter.app.reading.wire import (
    NOT_WANTED,
    REPLY_HEAD_BYTES,
    WANTED,
    ReplyHead,
    ReplyKind,
    Request,
    decode_message,
)
from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.runtime.child_process import last_line

# Packages are found where this process finds them, whatever the child's own start would add or leave out; -P for what
# it imports before it knows, which a `json.py` in the current folder must not be.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from llama_adapter.runtime.parent_watch import die_with; die_with(int(sys.argv[2])); "
    "from llama_adapter.app.reading.child import run; run(sys.argv[3:])"
)
# One thread each: there are as many processes as there shall be threads. And glibc keeps up to 128 MiB between
# pictures: by itself it gives pages back after each and has them cleared again for the next, which was a tenth of the
# time of drawings and a fifth of that of large photographs.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "MALLOC_MMAP_THRESHOLD_": f"{64 * 2**20}",
    "MALLOC_TRIM_THRESHOLD_": f"{128 * 2**20}",
    "MALLOC_TOP_PAD_": f"{16 * 2**20}",
    # glibc clears what it hands out. Some decoders leave parts of a damaged picture as memory was: it may hold another
    # client's picture, and the pixels differ from time to time.
    "MALLOC_PERTURB_": "255",
}
REAP_LIMIT_S = 1.0
PIPE_BYTES = 65536
MAX_SAID_BYTES = 4096
TICK_S = 0.05  # between two calls of `keep_waiting`
SLOW_NICENESS = 5  # about a quarter of the processor time of what computes beside it
# A process that holds more memory than this after a picture is replaced, so that one picture's memory is given back.
MAX_KEPT_BYTES = 384 * 2**20
_CHECK_MEMORY_AFTER_MS = 100.0  # pictures that are read sooner have not filled much

# Called while a reading goes on, with the process and the processor seconds that it has used for this picture. What it
# raises ends the reading.
KeepWaiting = Callable[["ReadingProcess", float], None]


class ReadingProcess:
    """A process that reads pictures, for one caller at a time. After an error it is of no more use than to be ended."""

    def __init__(self, spec: CaptionerSpec, *, size: int, memory_bytes: int | None, limits: PictureLimits) -> None:
        """Starts it without waiting for it. Raises OSError."""
        self._size, self._folder = size, _current_folder()
        self.is_ready = False  # has started, and said so
        self.is_spent = False  # reads well, but should be replaced: its priority is low, or it holds much memory
        self._said = b""
        self.digest = ""  # of the picture that is read, as far as it is known
        ours, theirs = socket.socketpair()
        said, says = os.pipe()
        # What nobody reads soon enough is lost, so that a talkative decoder never waits for a reader.
        os.set_blocking(says, False)
        os.set_blocking(said, False)
        # Not one for all processes: whom the kernel shall kill is kept with the open pipe.
        lifeline, ours_of_lifeline = os.pipe()
        about = (theirs.fileno(), size, memory_bytes, dataclasses.asdict(limits), dataclasses.asdict(spec))
        arguments = [json.dumps(value) for value in (sys.path, lifeline, *about)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=says,
                stderr=says,
                pass_fds=[theirs.fileno(), lifeline],
                start_new_session=True,  # Ctrl-C is for the parent, which finishes what it has begun
                env={**os.environ, **ENVIRONMENT},
            )
        except BaseException:
            ours.close()
            os.close(said)
            os.close(ours_of_lifeline)
            raise
        finally:
            theirs.close()
            os.close(says)
            os.close(lifeline)
        self._connection, self._stderr, self._lifeline = ours, io.FileIO(said), io.FileIO(ours_of_lifeline, "w")

    @property
    def process_id(self) -> int:
        return self._process.pid

    def wait_until_ready(self, *, timeout_s: float) -> None:
        """Wait until it has started; later, whether it is still there. Raises as `read` does."""
        if not self.is_ready:
            self._receive_head(time.monotonic() + timeout_s)
            self.is_ready = True
        elif self._process.poll() is not None:
            raise ConnectionAbortedError("it has gone")

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

        Raises TimeoutError when `timeout_s` is over, ConnectionError when the process has ended, ChildProcessError when
        its reply is malformed, and what `wants_pixels` and `keep_waiting` raise.
        """
        self.digest = ""
        started = time.perf_counter()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        folder = _current_folder()
        moved, self._folder = folder if folder != self._folder else None, folder
        asks_first = wants_pixels is not None
        request = Request(source=source, name=name, asks_first=asks_first, folder=moved, side=side)
        self._send(*request.encode(), deadline=deadline)
        max_side = self._size if side is None else side
        if keep_waiting is not None:
            self._wait(keep_waiting, deadline=deadline)
        head = self._receive_head(deadline, max_side=max_side)
        if head.kind is ReplyKind.DIGEST:
            asked = time.monotonic()
            is_wanted = wants_pixels is None or wants_pixels(head.digest)
            deadline = None if deadline is None else deadline + time.monotonic() - asked  # which was our own time
            self._send(WANTED if is_wanted else NOT_WANTED, deadline=deadline)
            if keep_waiting is not None:
                self._wait(keep_waiting, deadline=deadline)
            head = self._receive_head(deadline, max_side=max_side)
        if head.kind is not ReplyKind.DONE:
            raise ChildProcessError(f"it said {head.kind.name} where a picture was due")
        if head.num_bytes and head.code is None and side is None and head.shape != (self._size, self._size):
            raise ChildProcessError(f"it sent {head.shape} pixels in place of a square of {self._size}")
        pixels, error = self._receive_body(head, deadline)
        self._listen()
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if elapsed_ms > _CHECK_MEMORY_AFTER_MS and self._resident_bytes() > MAX_KEPT_BYTES:
            self.is_spent = True
        width, height = head.size
        return PictureReading(
            digest=head.digest, pixels=pixels, error=error, elapsed_ms=elapsed_ms, width=width, height=height
        )

    def slow_down(self) -> None:
        """Leave the processor to others from now on. Its priority cannot be raised again, so it is spent."""
        self.is_spent = True
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.process_id, SLOW_NICENESS)

    def kill(self) -> None:
        """Have it end, now or when the operating system lets it; for any thread."""
        self._process.kill()

    def end(self) -> bool:
        """Kill it, let go of what it has here, and whether it is gone: one that hangs in the system goes later.

        Harmless when repeated.
        """
        self._process.kill()
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=REAP_LIMIT_S)
        if not self._stderr.closed:
            self._listen()
            self._stderr.close()
        self._lifeline.close()
        return self._process.returncode is not None

    def has_gone(self) -> bool:
        """Whether it is gone by now."""
        return self._process.poll() is not None

    def let_go(self) -> None:
        """For a process that was forked off: close what was inherited, and leave the process to its real parent."""
        self._connection.close()
        self._stderr.close()
        self._lifeline.close()
        self._process.returncode = 0  # it is no child of this process, which could not wait for it

    @property
    def said(self) -> str:
        """The last line that it wrote on stdout or stderr, after `end`."""
        return last_line(self._said.decode(errors="replace"))

    def how_it_ended(self) -> str:
        """In words, after it ended without being asked to: "by SIGSEGV"."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=REAP_LIMIT_S)
        code = self._process.returncode
        if code is None:
            return "in the middle of its talk"
        if code >= 0:
            return f"with exit code {code}"
        with suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
        return f"by signal {-code}"

    def _send(self, *parts: bytes, deadline: float | None) -> None:
        try:
            for part in parts:
                if part:
                    self._connection.settimeout(_remaining(deadline))
                    self._connection.sendall(part)
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:  # the kernel's, for whatever else a socket can have
            raise ConnectionAbortedError(error.strerror) from error

    def _wait(self, keep_waiting: KeepWaiting, *, deadline: float | None) -> None:
        """Until something can be received or the deadline is over."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        cpu_before: float | None = None
        while not poll.poll(min(TICK_S, _remaining(deadline) or TICK_S) * 1e3):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
            cpu_s = self._cpu_seconds()
            cpu_before = cpu_s if cpu_before is None else cpu_before
            keep_waiting(self, cpu_s - cpu_before)

    def _cpu_seconds(self) -> float:
        """Processor seconds of its whole life; where the system does not tell, those of the clock."""
        try:
            with open(f"/proc/{self.process_id}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, IndexError, ValueError):
            return time.monotonic()

    def _resident_bytes(self) -> int:
        """Memory in use; 0 where the system does not tell."""
        try:
            with open(f"/proc/{self.process_id}/statm", "rb") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0

    def _receive_head(self, deadline: float | None, *, max_side: int = 0) -> ReplyHead:
        content = bytearray(REPLY_HEAD_BYTES)
        self._receive_into(memoryview(content), deadline)
        try:
            head = ReplyHead.decode(content, max_side=max_side)
        except ValueError as error:
            raise ChildProcessError(f"it said what no reading process says: {error}") from None
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
        try:
            while view:
                self._connection.settimeout(_remaining(deadline))
                count = self._connection.recv_into(view)
                if not count:
                    with suppress(subprocess.TimeoutExpired):  # it says how it ended
                        self._process.wait(timeout=REAP_LIMIT_S)
                    raise ConnectionAbortedError("it has hung up")
                view = view[count:]
        except (TimeoutError, ConnectionError):
            raise
        except OSError as error:  # the kernel's, for whatever else a socket can have
            raise ConnectionAbortedError(error.strerror) from error

    def _listen(self) -> None:
        """Keep the end of what it wrote, so that there is room for more."""
        said = self._stderr.read(PIPE_BYTES)
        if said:
            self._said = (self._said + said)[-MAX_SAID_BYTES:]


def _remaining(deadline: float | None) -> float | None:
    """Seconds for one call; never none at all, so that what has come is taken even then."""
    return None if deadline is None else max(1e-3, deadline - time.monotonic())


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None
