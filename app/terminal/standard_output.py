"""Answers on stdout: all of them, however slow their reader is. Talk for people goes to stderr: see talk.py."""

import select
import sys
from typing import BinaryIO


def give(data: bytes) -> None:
    """Write all of it on stdout, at once. Raises OSError, BrokenPipeError where the reader has gone away."""
    sys.stdout.flush()
    write_whole(sys.stdout.buffer, data)
    flush_whole(sys.stdout.buffer)


def write_whole(file: BinaryIO, data: bytes) -> None:
    """Write all of it, also into a pipe that whoever shares it has told not to wait: then the waiting is done here.

    Such a pipe takes what there is room for. A file without a buffer, which stdout is under PYTHONUNBUFFERED, returns
    how much that was, None for nothing; one with a buffer raises. Raises OSError.
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
    """Give on all that is in the file's buffer, as `write_whole` does. Raises OSError."""
    while True:
        try:
            return file.flush()
        except BlockingIOError:
            select.select([], [file], [])
