"""The command line as its own process: golden texts, pipes, signals and a terminal."""

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
from typing import Any

import pytest

from tests.app.golden import ROOT, case, case_runs, model_flags, picture

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "llama_adapter"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert "Traceback" not in ran.stderr
    return ran


def hear_interrupts() -> None:
    """Also where these tests run in the background of a shell, which has its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def many_pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(200):
        shutil.copy(picture("noise_128x96.png"), folder / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("bias_b1", False),
        ("bias_b3_equal", True),
        ("bias_b1_empty_input", False),
        ("lora_b3_equal", False),
        ("trainckpt_b1", True),
    ],
)
def test_golden_checkpoints_give_the_texts_of_the_reference(name: str, raw: bool) -> None:
    ((arguments, texts),) = case_runs(case(name), raw=raw)

    ran = run(*arguments)

    answers = {record["picture"]: record["text"] for record in map(json.loads, ran.stdout.splitlines())}
    assert ran.returncode == 0
    assert [answers[picture] for picture in arguments[-len(texts) :]] == texts


def test_a_folder_with_bad_files_ends_with_3_and_a_record_for_each_file(tmp_path: Path) -> None:
    for name in ("shapes_200x300.jpg", "rgba_180x140.png"):
        shutil.copy(picture(name), tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture, and not named like one")

    ran = run("caption", "assets/broken", str(tmp_path), *model_flags(), "--max-new-tokens", "4")

    records: list[dict[str, Any]] = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 3
    codes = {Path(record["picture"]).name: record["error"] and record["error"]["code"] for record in records}
    assert len(records) == len(codes)
    assert codes == {
        "empty.png": "empty",
        "text.jpg": "not_a_picture",
        "truncated.png": "truncated",
        "rgba_180x140.png": None,
        "shapes_200x300.jpg": None,
    }
    assert {record["finish"] for record in records} == {"error", "length"}


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


def test_ctrl_c_finishes_what_is_begun_and_ends_with_130(many_pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    arguments = ["caption", str(many_pictures), *model_flags(), "--max-new-tokens", "32", "--out", str(out)]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--format", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        preexec_fn=hear_interrupts,
    )
    assert process.stdout is not None
    process.stdout.readline()

    process.send_signal(signal.SIGINT)
    _, said = process.communicate()

    assert process.returncode == 130
    assert b"Traceback" not in said
    assert b"finishing the pictures that are begun" in said
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0 < len(records) < 200
    manifest = json.loads((tmp_path / "answers.jsonl.manifest.json").read_text())
    assert sum(manifest["runs"][0]["counts"].values()) == len(records)
    # The next run goes on where this one ended.
    again = run(*arguments)
    assert again.returncode == 0
    assert sorted(json.loads(line)["picture"] for line in out.read_text().splitlines()) == sorted(
        str(path) for path in many_pictures.iterdir()
    )


@pytest.fixture
def interrupted(many_pictures: Path, tmp_path: Path) -> Callable[[str], tuple[int, list[bytes]]]:
    """Runs a line of shell (the command is "$@"), sends SIGINT after the first record; exit code, lines of the file."""

    def interrupted(script: str) -> tuple[int, list[bytes]]:
        out = tmp_path / "answers.jsonl"
        arguments = ["caption", str(many_pictures), *model_flags(), "--max-new-tokens", "8", "--out", str(out)]
        command = ["bash", "-c", script, "bash", *COMMAND, *arguments, "--quiet"]
        process = subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_interrupts)
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return process.wait(), out.read_bytes().splitlines()

    return interrupted


def test_ctrl_c_with_stderr_closed_leaves_records_only(
    interrupted: Callable[[str], tuple[int, list[bytes]]],
) -> None:
    code, lines = interrupted('exec "$@" 2>&-')

    assert code == 130
    assert 0 < len(lines) < 200
    assert all(json.loads(line)["finish"] for line in lines)


def test_ctrl_c_that_was_ignored_before_is_still_ignored(
    interrupted: Callable[[str], tuple[int, list[bytes]]],
) -> None:
    code, lines = interrupted('trap "" INT; exec "$@"')

    assert code == 0
    assert len(lines) == 200


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
    assert said == b"\nfinishing the pictures that are begun; Ctrl-C again stops at once\n"


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
    assert said == b""
