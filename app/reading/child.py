"""The life of a reading process: it reads one picture after the other until its parent has gone. Imports no torch.

It is started by app/reading/process.py. A picture may hang it, end it or take it over; so it holds nothing of worth.
"""

import json
import os
import resource
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.reading.reader import PictureLimits, PictureReader, PictureReading
from llama_adapter.app.reading.wire import (
    REQUEST_HEAD_BYTES,
    WANTED,
    ReplyHead,
    ReplyKind,
    Request,
    encode_message,
    request_sizes,
)
from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.vision.errors import PICTURE_ERROR_CODES

SEND_BUFFER_BYTES = 2**20  # a square of pixels fits, so that one write sends it


class _ParentHasGone(Exception):
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildArguments:
    """What a reading process is told at its start."""

    connection: int  # the descriptor
    size: int
    memory_bytes: int | None
    limits: PictureLimits
    spec: CaptionerSpec


def main(arguments: ChildArguments) -> None:
    """Read pictures until there is nobody to read for."""
    # Who interrupts or ends the job means the parent, which finishes what it has begun.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, a picture shall be lost rather than the job
    if arguments.spec.reading == "fast":
        import torch  # noqa: F401  (now, and not within the first picture's time)
    reader = PictureReader(arguments.spec, size=arguments.size, limits=arguments.limits)
    if arguments.memory_bytes is not None:
        limit_memory(arguments.memory_bytes)
    connection = socket.socket(fileno=arguments.connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    with suppress(_ParentHasGone, BrokenPipeError, ConnectionResetError):
        serve(connection, reader)


def run(arguments: Sequence[str]) -> None:
    """`main` with arguments as a command line holds them; see `ReadingProcess`."""
    connection, size, memory_bytes, limits, spec = map(json.loads, arguments)
    main(
        ChildArguments(
            connection=connection,
            size=size,
            memory_bytes=memory_bytes,
            limits=PictureLimits(**limits),
            spec=CaptionerSpec(**spec),
        )
    )


def limit_memory(num_bytes: int) -> None:
    """Let pictures have that much beyond what this process has already, by addresses, whether used or not."""
    with suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = taken + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def serve(connection: socket.socket, reader: PictureReader) -> None:
    """Answer requests; raises `_ParentHasGone` at the end."""

    def asks_parent(digest: str) -> bool:
        connection.sendall(ReplyHead(kind=ReplyKind.DIGEST, digest=digest).encode())
        return received(connection, 1) == WANTED

    connection.sendall(ReplyHead(kind=ReplyKind.READY).encode())
    while True:
        num_packed, num_data = request_sizes(received(connection, REQUEST_HEAD_BYTES))
        packed = received(connection, num_packed)
        try:
            request = Request.decode(packed, received(connection, num_data) if num_data else b"")
            if request.folder is not None:
                os.chdir(request.folder)
            reading = reader.read(
                request.source,
                name=request.name,
                wants_pixels=asks_parent if request.asks_first else None,
                side=request.side,
            )
        except MemoryError:
            reading = _too_large()
        reply(connection, reading)


def reply(connection: socket.socket, reading: PictureReading) -> None:
    """Send a reading in one write, where the buffer takes it."""
    code, body, size, shape = None, memoryview(b""), (0, 0), (0, 0)
    if reading.error is not None:
        code = next(known for known in PICTURE_ERROR_CODES if known == reading.error.code)
        body = memoryview(encode_message(reading.error.message))
    elif reading.pixels is not None:
        rows, columns, _ = reading.pixels.shape
        body, size, shape = pixel_bytes(reading.pixels), (reading.width, reading.height), (rows, columns)
    head = ReplyHead(
        kind=ReplyKind.DONE, digest=reading.digest, code=code, num_bytes=len(body), size=size, shape=shape
    ).encode()
    num_sent = connection.sendmsg([head, body])
    if num_sent < len(head):
        connection.sendall(head[num_sent:])
    connection.sendall(body[max(0, num_sent - len(head)) :])


def pixel_bytes(pixels: np.ndarray) -> memoryview:
    """The bytes of pixels, rows first, copied only where they do not lie so."""
    return np.ascontiguousarray(pixels).data.cast("B")


def received(connection: socket.socket, number: int) -> bytes:
    """Exactly so many bytes; raises `_ParentHasGone` where they end."""
    content = connection.recv(number, socket.MSG_WAITALL)
    if len(content) < number:
        raise _ParentHasGone
    return content


def _too_large() -> PictureReading:
    message = "There is not enough memory to read this picture in a process of its own; make it smaller."
    return PictureReading(digest="", pixels=None, error=AnswerError(code="too_large", message=message), elapsed_ms=0.0)
