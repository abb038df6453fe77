"""A graph in a separate process, with its own memory, runtime and device context."""

import functools
import os
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from llama_adapter.runtime.child_process import ChildProcess
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.session import GraphInfo, GraphSession, check_owner, closed_error

CLOSE_LIMIT_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    """The reply to the call with this number: the outputs, or one of the errors."""

    number: int
    outputs: list[np.ndarray] | None = None
    device_ms: float | None = None
    error: GraphError | None = None
    fault: str = ""  # the traceback of any other exception


class ProcessSession:
    """The session that `opener` opens in another process. Its errors are raised in this process. See `GraphSession`.

    The child process runs in a new process session, so that Ctrl-C reaches only this process. It ends when this process
    ends for any reason. It is a new interpreter, because a device's runtime does not survive a fork, and spawning with
    multiprocessing would run the caller's script again. POSIX systems only.
    """

    def __init__(self, opener: Callable[[], GraphSession], *, file: str) -> None:
        """`opener` must be picklable. Raises the exceptions of `opener`, and GraphError if the process dies."""
        self._file = file
        self._owner = os.getpid()
        self._child = ChildProcess(
            f"{__name__}:serve",
            options=("-X", "faulthandler"),
            environ={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},  # only the graph's runtime may use the device
        )
        self._connection = Connection(self._child.connection.detach())
        self._finalizer = weakref.finalize(self, _end, self._child, self._connection, self._owner)
        self._lock, self._number, self._was_cut = threading.Lock(), 0, False
        self.device_ms: float | None = None
        try:
            self._send(opener)
            info: GraphInfo = self._receive(GraphInfo)
        except BaseException:
            self.close()
            raise
        self.info = replace(info, name=f"{info.name}, own process")

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `GraphSession.run`. Also raises GraphError if the process has ended."""
        with self._lock:
            if self._was_cut:
                raise GraphError(
                    f"The process of `{self._file}` was ended, because a message to it or from it was interrupted "
                    "half-way",
                    hint="open it again",
                )
            if not self._finalizer.alive:
                raise closed_error(self._file)
            check_owner(self._owner, file=self._file)
            self._number += 1
            self._send((self._number, list(inputs)))
            reply: _Reply = self._receive(_Reply)
            while reply.number != self._number:  # the reply to an earlier call that was interrupted while it waited
                reply = self._receive(_Reply)
        assert reply.outputs is not None
        self.device_ms = reply.device_ms
        return reply.outputs

    def close(self) -> None:
        """Ask the process to end, and kill it if it does not end within seconds. May be repeated."""
        self._finalizer()

    def _send(self, message: Any) -> None:
        # Pickled before it is sent, so that a message that cannot be pickled does not look like a broken connection.
        data = pickle.dumps(message)
        with self._message():
            self._connection.send_bytes(data)

    def _receive(self, kind: type[Any]) -> Any:
        # Wait first: an interrupt is harmless as long as no part of the message has been read.
        with suppress(OSError):
            self._connection.poll(None)
        with self._message():
            message = self._connection.recv()
        if isinstance(message, _Reply) and message.number in (0, self._number):
            if message.error is not None:
                raise message.error
            if message.fault:
                raise RuntimeError(f"the process of `{self._file}` failed:\n{message.fault}")
        assert isinstance(message, kind)
        return message

    @contextmanager
    def _message(self) -> Iterator[None]:
        """Context for sending or receiving a message.

        After an incomplete message the later ones cannot be read, so an interruption kills the process.
        """
        try:
            yield
        except (EOFError, OSError) as error:
            raise self._death() from error
        except BaseException:
            self._was_cut = True
            self._child.process.kill()
            self.close()
            raise

    def _death(self) -> GraphError:
        if not self._child.has_ended(within_s=CLOSE_LIMIT_S):
            return GraphError(f"The process of `{self._file}` no longer answers")
        how, hint = self._child.how_it_ended(), "its last words are above, on stderr"
        if how == "by SIGKILL":
            hint = "the system may have run out of memory: try a smaller --batch-size"
        return GraphError(f"The process of `{self._file}` was ended {how}", hint=hint)


def serve(descriptor: str) -> None:
    """The main function of the child process."""
    connection = Connection(int(descriptor))
    with suppress(EOFError, OSError):  # the parent process has ended
        session: GraphSession | None = _answer(connection, 0, connection.recv())
        if session is not None:
            with closing(session):
                _serve(session, connection)


def _serve(session: GraphSession, connection: Connection) -> None:
    """Answer calls until None is received."""
    connection.send(session.info)
    while (call := connection.recv()) is not None:
        number, inputs = call
        outputs = _answer(connection, number, functools.partial(session.run, inputs))
        if outputs is not None:
            connection.send(_Reply(number=number, outputs=outputs, device_ms=session.device_ms))


def _answer(connection: Connection, number: int, function: Callable[[], Any]) -> Any:
    """The result of `function`; None if it raised an error, which is then sent to the other process."""
    try:
        return function()
    except GraphError as error:
        connection.send(_Reply(number=number, error=GraphError(error.message, hint=error.hint)))
    except Exception:
        connection.send(_Reply(number=number, fault=traceback.format_exc()))
    return None


def _end(child: ChildProcess, connection: Connection, owner: int) -> None:
    """End the child process. A process that was forked from the owner only closes its copy of the connection."""
    if os.getpid() != owner:
        connection.close()
        return
    with suppress(OSError):
        connection.send(None)
    connection.close()
    if child.has_ended(within_s=CLOSE_LIMIT_S):
        return
    child.process.terminate()
    if not child.has_ended(within_s=CLOSE_LIMIT_S):
        child.process.kill()
        child.process.wait()
