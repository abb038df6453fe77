"""Streams: all of stdout arrives, work goes on without a stderr, and names are the same in every locale."""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from llama_adapter.app.command_line.main import main
from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.terminal.standard_output import give
from llama_adapter.runtime.terminal.stderr_lines import can_overwrite_lines, say
from tests.parity.golden import model_flags, picture

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


def test_names_are_utf8_also_in_the_locale_c(tmp_path: Path) -> None:
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    picture = next(path for path in sorted(Path(sample_pictures()).iterdir()) if path.suffix == ".png")
    names = ["grün.png", os.fsdecode(b"inv\xff.png")]
    for name in names:
        shutil.copy(picture, tmp_path / name)
    command = [sys.executable, "-m", "llama_adapter", "caption", ".", "nö.png", "--prompt", "Größe?", "--quiet"]
    ran = subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, check=False)

    records = [json.loads(line) for line in ran.stdout.decode().splitlines()]
    assert {one["picture"] for one in records} == {*(f"./{name}" for name in names), "nö.png"}
    assert {one["prompt"] for one in records} == {"Größe?"}
    assert [one["picture"] for one in records if one["error"]] == ["nö.png"]
    assert ran.returncode == 3
