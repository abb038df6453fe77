"""The main function of a reading process: reads one picture after another until the parent process ends.

process.py starts it. It imports torch only for fast reading. A hostile picture may make the process hang, crash, or run
foreign code.
"""

import json
import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.app.pictures.reading.wire import (
    REQUEST_HEAD_BYTES,
    WANTED,
    ReplyHead,
    ReplyKind,
    Request,
    encode_message,
    request_sizes,
)
from llama_adapter.runtime.child_process import limit_memory
from llama_adapter.vision.errors import PICTURE_ERROR_CODES
from llama_adapter.vision.pixels import PixelRule

SEND_BUFFER_BYTES = 2**20  # large enough for a square of pixels, which is then sent by one write
_TOO_LARGE = AnswerError(
    code="too_large", message="There is not enough memory to read this picture in a separate process; make it smaller."
)


class _ParentHasGone(Exception):
    pass


def run(*arguments: str) -> None:
    """Read pictures until the parent process ends. `ReadingProcess` passes the arguments as JSON."""
    descriptor, pixels, spec, memory_bytes = map(json.loads, arguments)
    # Signals that interrupt or end the job are ignored here: the parent handles them, and finishes the pictures it has
    # begun.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the system should end this process rather than the job
    if spec["reading"] == "fast":
        import torch  # noqa: F401  (imported before the first picture's time limit begins)

    @cache
    def prepare() -> None:
        import numpy as np  # noqa: F401  (the limit is for the picture alone)

        from llama_adapter.vision import image, preprocess  # noqa: F401

        if memory_bytes is not None:
            limit_memory(memory_bytes)

    reader = PictureReader(ReadingSpec(**spec), pixels=PixelRule(**pixels))
    connection = socket.socket(fileno=descriptor)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    with suppress(_ParentHasGone, BrokenPipeError, ConnectionResetError):
        serve(connection, reader, prepare)


def serve(connection: socket.socket, reader: PictureReader, prepare: Callable[[], None]) -> None:
    """Answer requests. Raises `_ParentHasGone` when the parent has ended.

    `prepare` is called before pictures are decoded. A process that finds only known pictures decodes none.
    """

    def asks_parent(digest: str) -> bool:
        connection.sendall(ReplyHead(kind=ReplyKind.DIGEST, digest=digest).encode())
        if is_wanted := received(connection, 1) == WANTED:
            prepare()
        return is_wanted

    connection.sendall(ReplyHead(kind=ReplyKind.READY).encode())
    while True:
        num_packed, num_data = request_sizes(received(connection, REQUEST_HEAD_BYTES))
        packed = received(connection, num_packed)
        reading: PictureReading | None = None
        try:
            request = Request.decode(packed, received(connection, num_data) if num_data else b"")
            if request.folder is not None:
                os.chdir(request.folder)
            if not request.asks_first:
                prepare()
            reading = reader.read(
                request.source,
                name=request.name,
                wants_pixels=asks_parent if request.asks_first else None,
                side=request.side,
            )
        except MemoryError:
            pass  # the reply is sent after this block, when the memory of the reading has been released
        reply(connection, reading or PictureReading(error=_TOO_LARGE))


def reply(connection: socket.socket, reading: PictureReading) -> None:
    """Send a reading, in one write if it fits into the socket's buffer."""
    code, body, seen = None, memoryview(b""), dict[str, Any]()
    if reading.error is not None:
        code = next(known for known in PICTURE_ERROR_CODES if known == reading.error.code)
        body = memoryview(encode_message(reading.error.message))
    elif reading.pixels is not None:
        import numpy as np

        rows, columns, _ = reading.pixels.shape
        seen = {"size": (reading.width, reading.height), "shape": (rows, columns), "notes": reading.notes}
        body = np.ascontiguousarray(reading.pixels).data.cast("B")  # copied only if it is not stored row by row
    head = ReplyHead(kind=ReplyKind.DONE, digest=reading.digest, code=code, num_bytes=len(body), **seen).encode()
    num_sent = connection.sendmsg([head, body])
    if num_sent < len(head):
        connection.sendall(head[num_sent:])
    connection.sendall(body[max(0, num_sent - len(head)) :])


def received(connection: socket.socket, number: int) -> bytes:
    """Receive exactly `number` bytes. Raises `_ParentHasGone` at the end of the stream."""
    content = connection.recv(number, socket.MSG_WAITALL)
    if len(content) < number:
        raise _ParentHasGone
    return content
