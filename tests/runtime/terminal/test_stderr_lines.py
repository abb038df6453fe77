"""Lines on stderr, and work that continues if stderr cannot be written."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from llama_adapter.app.command_line.main import main
from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.runtime.terminal.stderr_lines import can_overwrite_lines, say
from tests.parity.golden import model_flags, picture


@contextmanager
def deaf_stderr(way: str) -> Iterator[None]:
    """A stderr on which every write fails.

    It is not a fixture, because pytest replaces stderr between fixture and test.
    """
    if way == "disk full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        nobody, descriptor = os.pipe()
        os.close(nobody)
    stream = open(descriptor, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - by lines, as the interpreter's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield
    with suppress(OSError):
        stream.close()


@pytest.mark.parametrize("way", ["reader gone", "disk full"])
def test_work_and_exit_codes_do_not_depend_on_stderr(way: str, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    flags = [*model_flags(), "--max-new-tokens", "2", "--reader", "thread", "--out", str(out)]

    with deaf_stderr(way):
        for _ in range(3):
            say("a line")
    with deaf_stderr(way):
        refused = main(["caption", "--list", str(tmp_path / "none.txt")])
    with deaf_stderr(way):
        finished = main(["caption", str(tmp_path / "none.png"), str(picture("shapes_200x300.jpg")), *flags])

    assert (refused, finished) == (2, 3)
    assert len(list(read_records(out))) == 2


@pytest.mark.parametrize(
    ("term", "is_terminal", "expected"),
    [("xterm", True, True), ("dumb", True, False), ("", True, False), (None, True, False), ("xterm", False, False)],
)
def test_only_terminals_that_obey_control_sequences_get_them(
    term: str | None, is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    assert can_overwrite_lines() == expected
