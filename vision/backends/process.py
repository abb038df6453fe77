"""An encoder in a process of its own: apart from the language model's memory, runtime and device context."""

import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import EncoderCard
from llama_adapter.vision.backends.exported import ExportedBackend, check_owner

CLOSE_LIMIT_S = 10.0
# A fresh interpreter: a device's runtime does not survive a fork, and multiprocessing's own way would run the caller's
# script again. What to import and what to do comes through the connection; until then -P keeps the current folder,
# which may hold a `socket.py`, out of the way.
_BOOT = (
    "import sys; from multiprocessing.connection import Connection; connection = Connection(int(sys.argv[1])); "
    "sys.path[:] = connection.recv(); connection.recv()(connection)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """What the other process says of the backend it opened."""

    name: str
    image_size: int
    card: EncoderCard | None
    batch_sizes: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """To the call of this number; exactly one of the others says how it went, but for the time."""

    number: int
    output: np.ndarray | None = None
    device_ms: float | None = None
    error: GraphError | None = None
    fault: str = ""  # the traceback of what is no GraphError


class ProcessVisionBackend:
    """What `opener` opens, run in another process; its errors are raised here.

    The process is in a session of its own, so that Ctrl-C reaches this one only, and ends when this one does, however
    that happens. POSIX systems only.
    """

    def __init__(self, opener: Callable[[], ExportedBackend], *, file: str) -> None:
        """`opener` must be picklable; `file` is for messages. Raises what it raises, and GraphError where it dies."""
        self._file = file
        self._owner = os.getpid()
        self._process, self._connection = _start()
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, self._owner)
        self._lock, self._number, self._was_cut = threading.Lock(), 0, False
        self.device_ms: float | None = None  # of the last `encode`, where the backend measures it
        try:
            self._send(sys.path)
            self._send(_Server(opener))
            self._facts: _Facts = self._receive(_Facts)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """That of the backend, and that it is elsewhere."""
        return f"{self._facts.name}, own process"

    @property
    def image_size(self) -> int:
        return self._facts.image_size

    @property
    def card(self) -> EncoderCard | None:
        """What the file says of itself."""
        return self._facts.card

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """As of the backend."""
        return self._facts.batch_sizes

    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels uint8 (B, S, S, 3) RGB -> visual query (B, Q, D) on the CPU.

        Raises GraphError as the backend does, and when its process is no more.
        """
        with self._lock:
            if self._was_cut:
                raise GraphError(
                    f"The process of the encoder `{self._file}` was ended, because a message to it or from it was "
                    "interrupted half-way",
                    hint="open the encoder again",
                )
            if not self._finalizer.alive:
                raise GraphError(f"`{self._file}` was closed and encodes nothing more")
            check_owner(self._owner, file=self._file)
            self._number += 1
            self._send((self._number, pixels_BHWC))
            reply: _Reply = self._receive(_Reply)
            while reply.number != self._number:  # to a call that was interrupted while it waited
                reply = self._receive(_Reply)
        assert reply.output is not None
        self.device_ms = reply.device_ms
        return torch.from_numpy(reply.output)

    def close(self) -> None:
        """Ask the process to end, and end it when it does not within a few seconds."""
        self._finalizer()

    def _send(self, message: Any) -> None:
        # Pickled first: a message that cannot be must not look like a broken connection.
        data = pickle.dumps(message)
        with self._message():
            self._connection.send_bytes(data)

    def _receive(self, kind: type[Any]) -> Any:
        # Waited for first: an interrupt does no harm as long as nothing of the message is read.
        with suppress(OSError):
            self._connection.poll(None)
        with self._message():
            message = self._connection.recv()
        if isinstance(message, _Reply) and message.number in (0, self._number):
            if message.error is not None:
                raise message.error
            if message.fault:
                raise RuntimeError(f"the process of the encoder `{self._file}` failed:\n{message.fault}")
        assert isinstance(message, kind)
        return message

    @contextmanager
    def _message(self) -> Iterator[None]:
        """While a message is under way; half of one puts all that follow out of step, so then the process is ended."""
        try:
            yield
        except (EOFError, OSError) as error:
            raise self._death() from error
        except BaseException:
            self._was_cut = True
            self._process.kill()
            self.close()
            raise

    def _death(self) -> GraphError:
        """The process has gone: how."""
        try:
            code = self._process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            return GraphError(f"The process of the encoder `{self._file}` no longer answers")
        if code >= 0:
            how, hint = f"with exit code {code}", "what it said last is above, on stderr"
        else:
            how = f"by {_signal_name(-code)}"
            hint = "it crashed; what it said last is above, on stderr"
            if -code == signal.SIGKILL:
                hint = "the system may have run out of memory: try a smaller --batch-size"
        return GraphError(f"The process of the encoder `{self._file}` was ended {how}", hint=hint)


@dataclass(frozen=True, slots=True)
class _Server:
    """The other process's whole life."""

    opener: Callable[[], ExportedBackend]

    def __call__(self, connection: Connection) -> None:
        with suppress(EOFError, OSError):  # the other side has gone away: there is nothing left to do
            backend = _answer(connection, 0, self.opener)
            if backend is not None:
                with closing(backend):
                    _serve(backend, connection)


def _serve(backend: ExportedBackend, connection: Connection) -> None:
    """Answer until None comes."""
    connection.send(
        _Facts(name=backend.name, image_size=backend.image_size, card=backend.card, batch_sizes=backend.batch_sizes)
    )
    while (call := connection.recv()) is not None:
        number, pixels = call
        output = _answer(connection, number, functools.partial(backend.encode, pixels))
        if output is not None:
            time = getattr(backend, "device_ms", None)
            connection.send(_Reply(number=number, output=output.numpy(), device_ms=time))


def _answer(connection: Connection, number: int, function: Callable[[], Any]) -> Any:
    """What `function` returns; None after its error was sent to the other side."""
    try:
        return function()
    except GraphError as error:
        connection.send(_Reply(number=number, error=GraphError(error.message, hint=error.hint)))
    except Exception:
        connection.send(_Reply(number=number, fault=traceback.format_exc()))
    return None


def _start() -> tuple["subprocess.Popen[bytes]", Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", "-c", _BOOT, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # ours is for data
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            # The encoder's runtime shall be alone there with its device.
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
    return process, Connection(ours.detach())


def _end(process: "subprocess.Popen[bytes]", connection: Connection, owner: int) -> None:
    """Does nothing to the process but in the one that started it: one that was forked off shares the connection."""
    if os.getpid() != owner:
        connection.close()
        return
    with suppress(OSError):
        connection.send(None)
    connection.close()
    if _has_ended(process):
        return
    process.terminate()
    if not _has_ended(process):
        process.kill()
        process.wait()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Within a few seconds."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_LIMIT_S)
    return process.returncode is not None


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
