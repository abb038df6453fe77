"""The command line as a separate process: pipes, signals and a terminal."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.app.golden import ROOT, case, model_flags, picture

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "llama_adapter"]


def hear_interrupts() -> None:
    """Handle Ctrl-C even if the tests run in the background of a shell, which makes its children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def many_pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(200):
        shutil.copy(picture("noise_128x96.png"), folder / f"{number}.png")
    return folder


def test_a_reader_that_goes_away_ends_the_run_quietly(many_pictures: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "caption", str(many_pictures), *model_flags(), "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    json.loads(process.stdout.readline())
    process.stdout.close()

    said = process.stderr.read()

    assert process.wait() == 0
    assert said == b""
    process.stderr.close()


def test_help_into_a_closed_pipe_is_quiet() -> None:
    script = f"{sys.executable} -m llama_adapter caption --help | true"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)

    assert ran.stderr == ""


@pytest.fixture
def interrupted(many_pictures: Path, tmp_path: Path) -> Callable[..., tuple[int, list[bytes]]]:
    """Runs a shell script (in it "$@" is the command with its `flags`), and sends SIGINT after the first record.

    Returns the exit code, and the lines of the file.
    """

    def interrupted(script: str, *flags: str) -> tuple[int, list[bytes]]:
        out = tmp_path / "answers.jsonl"
        arguments = ["caption", str(many_pictures), *model_flags(), "--max-new-tokens", "8", "--out", str(out), *flags]
        command = ["bash", "-c", script, "bash", *COMMAND, *arguments, "--quiet"]
        process = subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_interrupts)
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return process.wait(), out.read_bytes().splitlines()

    return interrupted


def test_ctrl_c_with_stderr_closed_leaves_records_only(
    interrupted: Callable[..., tuple[int, list[bytes]]],
) -> None:
    code, lines = interrupted('exec "$@" 2>&-')

    assert code == 130
    assert 0 < len(lines) < 200
    assert all(json.loads(line)["finish"] for line in lines)


def test_ctrl_c_that_was_ignored_before_is_still_ignored(
    interrupted: Callable[..., tuple[int, list[bytes]]],
) -> None:
    code, lines = interrupted('trap "" INT; exec "$@"', "--limit", "60")

    assert code == 0
    assert len(lines) == 60


def test_a_list_that_comes_slowly_is_answered_line_by_line_and_ctrl_c_does_not_wait_for_its_next() -> None:
    arguments = ["caption", "--list", "-", *model_flags(), "--max-new-tokens", "4", "--quiet"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *arguments], **pipes, cwd=ROOT, preexec_fn=hear_interrupts)
    assert process.stdin is not None
    assert process.stdout is not None
    for name in ("noise_128x96.png", "shapes_200x300.jpg"):
        process.stdin.write(f"{picture(name)}\n".encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["picture"] == picture(name)

    process.send_signal(signal.SIGINT)
    code = process.wait()  # while stdin is still open
    left, said = process.communicate()

    assert code == 130
    assert left == b""
    assert said == b"\nfinishing what is begun; Ctrl-C again stops at once\n"


def test_a_terminal_gets_lines_of_text() -> None:
    main, follower = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "caption", picture(), *model_flags(), "--prompt", "Describe the image.", "--max-new-tokens", "16"],
        stdout=follower,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    os.close(follower)
    _, said = process.communicate()
    shown = b""
    while select.select([main], [], [], 0)[0]:
        try:
            shown += os.read(main, 4096)
        except OSError:  # the other end is closed
            break
    os.close(main)

    assert process.returncode == 0
    assert shown.decode() == f"{picture()}: {case('bias_b1')['output_text'][0]}\r\n"
    assert said.startswith(b"note: computing on cpu in float32")
    assert said.count(b"\n") == 1
