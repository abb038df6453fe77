"""Everything written to stdout arrives, even through non-blocking pipes."""

import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from llama_adapter.runtime.terminal.standard_output import give

LINES = [f"{number:>6} {'x' * 4000}\n".encode() for number in range(40)]  # twice the capacity of a pipe


class SlowReader:
    """The end of a pipe that is not read at first, and then a little at a time."""

    def __init__(self, descriptor: int) -> None:
        self.content = b""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        time.sleep(0.05)
        while piece := os.read(self._descriptor, 3000):
            self.content += piece

    def join(self) -> None:
        self._thread.join()
        os.close(self._descriptor)


@contextmanager
def stdout_that_does_not_wait(*, is_buffered: bool) -> Iterator[SlowReader]:
    """Stdout on a pipe as the interpreter sets it up, with and without PYTHONUNBUFFERED."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    raw = open(writing, "wb", buffering=-1 if is_buffered else 0)  # noqa: SIM115 - closed below
    reader = SlowReader(reading)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8", write_through=not is_buffered))
        try:
            yield reader
        finally:
            with suppress(OSError):
                sys.stdout.close()
            reader.join()


@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "unbuffered"])
def test_non_blocking_pipe_gets_every_line(is_buffered: bool) -> None:
    with stdout_that_does_not_wait(is_buffered=is_buffered) as reader:
        for line in LINES:
            give(line)

    assert reader.content == b"".join(LINES)
