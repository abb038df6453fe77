"""Stand-ins for a reading process, each with a different misbehaviour."""

import os
import socket
import sys
from contextlib import suppress
from typing import Any

from llama_adapter.app.pictures.reading import child
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading
from llama_adapter.app.pictures.reading.wire import REPLY_HEAD_BYTES, ReplyHead, ReplyKind


def entry(behaviour: str) -> str:
    """The value for `app.pictures.reading.process.ENTRY` that selects this behaviour."""
    return f"{__name__}:{behaviour}"


def ends_at_once(*_: str) -> None:
    print("noise")
    sys.exit("no luck today")


def talks_nonsense(*arguments: str) -> None:
    connection = socket.socket(fileno=int(arguments[0]))
    connection.sendall(ReplyHead(kind=ReplyKind.READY).encode())
    connection.recv(1)
    connection.sendall(b"\xff" * REPLY_HEAD_BYTES)
    while connection.recv(2**20):
        pass


def writes_a_lot(*arguments: str) -> None:
    class Talker(PictureReader):
        def read(self, *given: Any, **named: Any) -> PictureReading:
            for _ in range(200):
                with suppress(BlockingIOError):  # C's printf ignores this error too
                    os.write(2, b"tiff: warning\n" * 1000)
            return super().read(*given, **named)

    _run_with(Talker, arguments)


def has_a_fault(*arguments: str) -> None:
    class Faulty(PictureReader):
        def read(self, *given: Any, **named: Any) -> PictureReading:
            raise RuntimeError("a fault of ours")

    _run_with(Faulty, arguments)


def _run_with(reader: type[PictureReader], arguments: tuple[str, ...]) -> None:
    child.__dict__["PictureReader"] = reader
    child.run(*arguments)
