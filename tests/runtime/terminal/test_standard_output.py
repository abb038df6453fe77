"""Everything written to stdout arrives, even through non-blocking pipes."""

import io
import os
import sys
import threading
import time

import pytest

from llama_adapter.runtime.terminal.standard_output import give

LINES = [f"{number:>6} {'x' * 4000}\n".encode() for number in range(40)]  # twice the capacity of a pipe


@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "unbuffered"])
def test_non_blocking_pipe_gets_every_line(is_buffered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout is set up as by the interpreter, with and without PYTHONUNBUFFERED, and is read late and slowly."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    content = bytearray()

    def read() -> None:
        time.sleep(0.05)
        while piece := os.read(reading, 3000):
            content.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    raw = open(writing, "wb", buffering=-1 if is_buffered else 0)  # noqa: SIM115 - closed by the wrapper
    with (
        io.TextIOWrapper(raw, encoding="utf-8", write_through=not is_buffered) as stdout,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", stdout)
        for line in LINES:
            give(line)

    reader.join()
    os.close(reading)
    assert bytes(content) == b"".join(LINES)
