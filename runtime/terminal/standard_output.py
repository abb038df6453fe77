"""Complete writes to stdout, also into non-blocking pipes."""

import select
import sys
from typing import BinaryIO

from llama_adapter.runtime.partial import named_after


def give(data: bytes) -> None:
    """Write all of the data to stdout and flush. Raises OSError; BrokenPipeError if the reader is gone."""
    with named_after("stdout"):
        sys.stdout.flush()
        write_whole(sys.stdout.buffer, data)
        flush_whole(sys.stdout.buffer)


def write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of the data. With a non-blocking pipe, the function waits for room in the pipe. Raises OSError.

    For a full pipe, an unbuffered file (stdout under PYTHONUNBUFFERED) returns the number of bytes written or None; a
    buffered one raises BlockingIOError.
    """
    rest = memoryview(data)
    while rest:
        try:
            num_taken = file.write(rest)
        except BlockingIOError as error:
            num_taken = error.characters_written
        rest = rest[num_taken or 0 :]
        if rest:
            select.select([], [file], [])


def flush_whole(file: BinaryIO) -> None:
    """Flush the file's buffer completely, waiting as `write_whole` does. Raises OSError."""
    while True:
        try:
            return file.flush()
        except BlockingIOError:
            select.select([], [file], [])
