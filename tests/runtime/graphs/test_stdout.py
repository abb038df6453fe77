"""Output of native libraries is captured; other output during the capture is not lost."""

import ctypes
import logging
import os
import subprocess
import sys
from contextlib import suppress

import pytest

from llama_adapter.runtime.graphs.stdout import root_logger_kept, stdout_caught

LIBC = ctypes.CDLL(None)


def test_output_of_c_and_of_the_system_is_caught(capfd: pytest.CaptureFixture[str]) -> None:
    LIBC.printf(b"before\n")
    with stdout_caught() as caught:
        LIBC.printf(b"[INFO] by C\n")
        os.write(1, b"[INFO] by the system\n")
    LIBC.printf(b"after\n")
    LIBC.fflush(None)
    assert sorted(caught.text.splitlines()) == ["[INFO] by C", "[INFO] by the system"]  # C may buffer
    assert capfd.readouterr() == ("before\nafter\n", "")


def test_lines_of_the_library_are_logged_and_others_reach_stderr(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="llama_adapter.runtime.graphs.stdout"), stdout_caught():
        os.write(1, b"[INFO] load model success\n[WARN] acl init twice\nsomebody else's line\n")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "[INFO] load model success"),
        ("WARNING", "[WARN] acl init twice"),
    ]
    assert capfd.readouterr() == ("", "somebody else's line\n")


def test_after_an_error_the_last_complaints_are_kept_and_the_rest_is_passed_on(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    said = ["[ACL ERROR] first", "[INFO] fine", "a stranger", "", "TraceBack", *(f"[ERROR] {n}" for n in range(5))]
    with (
        caplog.at_level(logging.WARNING, logger="llama_adapter.runtime.graphs.stdout"),
        suppress(RuntimeError),
        stdout_caught() as caught,
    ):
        os.write(1, "\n".join(said).encode())
        raise RuntimeError
    assert caught.complaints() == " | ".join(said[4:])
    assert [record.message for record in caplog.records] == said[:1]
    assert capfd.readouterr() == ("", "a stranger\n")


def test_after_an_interrupt_everything_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(KeyboardInterrupt), stdout_caught():
        os.write(1, b"a stranger\n")
        raise KeyboardInterrupt
    assert capfd.readouterr() == ("", "a stranger\n")


def test_a_closed_stdout_stays_closed() -> None:
    code = """
import os
from llama_adapter.runtime.graphs.stdout import stdout_caught
os.close(1)
with stdout_caught() as caught:
    pass
try:
    os.fstat(1)
except OSError:
    os.write(2, b"closed" + caught.text.encode())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.startswith("closed")


def test_a_root_logger_set_up_by_an_import_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = logging.NullHandler()
    monkeypatch.setattr(logging.root, "handlers", [ours])
    level = logging.root.level
    with root_logger_kept():
        logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, force=True)
    assert logging.root.level == level
    assert not any(isinstance(handler, logging.StreamHandler) for handler in logging.root.handlers)
