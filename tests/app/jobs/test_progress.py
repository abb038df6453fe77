"""The line with a job's progress."""

import fcntl
import os
import struct
import sys
import termios
import threading

import pytest

from llama_adapter.app.jobs.progress import Progress, duration


@pytest.fixture(autouse=True)
def _count_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.run)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (425, "7 min 5 s"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_a_duration_has_two_parts_at_most(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_the_line_tells_rate_time_left_and_failures() -> None:
    progress = Progress(visible=True, count=lambda: 1500)
    begin = progress._started

    line = progress.line(answered=90, failed=10, known=400, now=begin + 10)

    assert line == "500 of 1,500 pictures, 10.00 pictures/s, 1 min 40 s left, 400 by an earlier run, 10 failed"


def test_a_count_that_fails_is_not_known_and_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    def count() -> int | None:
        raise OSError("the list went away")

    progress = Progress(visible=True, what="question", count=count)

    assert progress.line(answered=1, failed=0, known=0, now=progress._started + 1) == "1 questions, 1.00 questions/s"
    assert capsys.readouterr().err == ""


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    progress = Progress(visible=True)
    begin = progress._started
    for second in range(0, 60, 5):
        progress.line(answered=second * 100, failed=0, known=0, now=begin + second)

    slower = [progress.line(answered=5500 + second, failed=0, known=0, now=begin + 55 + second) for second in (20, 40)]

    assert slower[1] == "5,540 pictures, 1.00 pictures/s"
    assert "left" not in slower[0]


def test_without_a_terminal_lines_come_seldom_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(visible=True)
    progress.show(answered=1, failed=0, known=0)
    invisible = Progress(visible=False, count=lambda: pytest.fail("nobody wants to know"))
    invisible._shown_at -= 61.0
    invisible.show(answered=1, failed=0, known=0)
    assert capsys.readouterr().err == ""

    progress._shown_at -= 61.0
    progress.show(answered=2, failed=0, known=0)
    progress.show(answered=3, failed=0, known=0)

    assert capsys.readouterr().err.count("\n") == 1


def test_the_line_fits_a_narrow_terminal_since_only_one_line_can_be_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with open(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        progress = Progress(visible=True)
        progress._shown_at = float("-inf")
        progress.show(answered=123_456, failed=7, known=0)
        shown = os.read(ours, 1000).decode()
    os.close(ours)

    line = shown.removeprefix("\r\x1b[K")
    assert line.startswith("123,463 pictures, ")
    assert len(line) == 19
