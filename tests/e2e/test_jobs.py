"""Jobs as processes: they are killed, interrupted, lose their disk, reader or terminal, or read hostile files."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llama_adapter.app.jobs.records.manifest import manifest_path, read_manifest
from llama_adapter.app.jobs.records.record import Record, parse_record, read_records
from llama_adapter.app.models.resources import sample_pictures
from scripts.train_embedded.render import draw_scene
from scripts.train_embedded.world import sample_scene
from tests.app.command import Run
from tests.app.conftest import run as run
from tests.app.golden import ROOT, picture
from tests.odd_pictures import write_odd_pictures

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "llama_adapter"]
# Runs a script of a shell; returns the exit code and the lines of the file of records.
Interrupted = Callable[..., tuple[int, list[bytes]]]


def start(*arguments: str, **options: Any) -> Any:
    """The command line as a process. Its streams are pipes; standard input is that of the tests, if not given."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *arguments], **pipes | options, cwd=ROOT)


def records_in(path: Path) -> list[Record]:
    return list(read_records(path))


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """32 different drawings of the embedded model's world."""
    folder = tmp_path_factory.mktemp("drawings")
    paths = [folder / f"{number:02}.png" for number in range(32)]
    for number, path in enumerate(paths):
        rng = np.random.default_rng([4711, number])
        Image.fromarray(draw_scene(sample_scene(rng), rng)).save(path, compress_level=1)
    return paths


# The command line, which notes the picture of every request before the engine gets it.
NOTING = """
import os, sys
from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.command_line.main import main
log, submit = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), CaptionLoop.submit
def noted(self, request, picture):
    os.write(log, request.picture.encode() + b"\\n")
    return submit(self, request, picture)
CaptionLoop.submit = noted
sys.exit(main())
"""


@pytest.mark.proves("caption: resume after kill -9", "CPU")
def test_a_job_that_is_killed_again_and_again_loses_nothing_and_doubles_nothing(
    drawings: list[Path], tmp_path: Path, run: Run
) -> None:
    out, alone, begun = (tmp_path / name for name in ("killed.jsonl", "alone.jsonl", "begun"))

    command = ["caption", str(drawings[0].parent), "--quiet", "--batch-size", "8", "--out"]

    def killed_after(least: int) -> int:
        """The exit code of a run that is killed when the file has this many records."""
        begun.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", NOTING, str(begun), *command, str(out)], cwd=ROOT)
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < least):
            time.sleep(0.001)
        process.kill()
        return process.wait()

    for least in (1, 13):
        while (code := killed_after(least)) == 0:  # it ended before the kill, so the job begins again
            out.unlink()
            manifest_path(out).unlink()
        assert code == -signal.SIGKILL
        whole = [parse_record(line) for line in out.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        assert None not in whole
        answered = {record["picture"] for record in whole if record is not None}
        assert len({*begun.read_text().splitlines()} - answered) <= 8, "more than the batch in progress"

    assert [run(*command, str(place)).code for place in (alone, out)] == [0, 0]
    killed, undisturbed = (
        sorted((record["picture"], record["text"]) for record in records_in(place)) for place in (out, alone)
    )
    assert killed == undisturbed
    assert [picture for picture, _ in killed] == [*map(str, drawings)]


def test_a_full_disk_ends_the_job_with_whole_records_and_a_later_run_completes_it(
    drawings: list[Path], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["caption", str(drawings[0].parent), "--out", str(out)]

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))

    full = start(*command, preexec_fn=no_room)
    _, said = full.communicate()
    kept = out.read_bytes()
    completed = run(*command)

    assert full.returncode == 1
    assert b"File too large" in said
    assert b"Traceback" not in said
    assert 0 < len(kept) <= 8_000
    assert kept.endswith(b"\n")
    assert completed.code == 0
    assert out.read_bytes().startswith(kept)
    assert sorted(record["picture"] for record in records_in(out)) == sorted(map(str, drawings))


def test_who_interrupts_a_job_is_told_how_to_go_on(drawings: list[Path], tmp_path: Path, run: Run) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["caption", str(drawings[0].parent), "--batch-size", "8", "--out", str(out)]
    process = start(*command, "--format", "jsonl", start_new_session=True)
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # like a terminal, which sends it to the whole process group
    _, said = process.communicate()
    kept = records_in(out)
    completed = run(*command)

    assert process.returncode == 130
    assert b"finishing what is begun" in said
    assert b"the same command goes on where this one ended" in said
    assert b"Traceback" not in said
    assert 0 < len(kept) < len(drawings)
    assert all(record["error"] is None for record in kept)
    assert completed.code == 0
    assert sorted(record["picture"] for record in records_in(out)) == sorted(map(str, drawings))
    first, second = read_manifest(out)
    assert (first.end_reason, second.end_reason) == ("interrupted", "finished")
    assert sum(first.counts.values()) == len(kept)


def test_a_folder_of_broken_and_odd_files_has_a_record_for_each_and_sound_answers_beside_them(
    tmp_path: Path, run: Run
) -> None:
    odd = write_odd_pictures(tmp_path / "odd")[::6]  # the others are read in tests/app/pictures/reading
    sound = [str(path) for path in sorted(sample_pictures().glob("*.[pj][np]g"))]
    # Names on a command line may have any bytes except null; a list file can hold all of them.
    mixed = [name for number, bad in enumerate(odd) for name in (sound[number % len(sound)], bad.path)]
    listed, out = tmp_path / "list", tmp_path / "answers.jsonl"
    listed.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in mixed))
    alone = run("caption", *sound)  # read in threads

    ran = run("caption", "--list", str(listed), "--out", str(out), "--quiet", "--reader", "process")

    assert ran.code == 3
    records = records_in(out)
    assert len(records) == len(mixed)
    expected = {record["picture"]: (record["id"], record["text"]) for record in alone.records}
    answers = [record for record in records if record["picture"] in expected]
    assert len(answers) == len(odd)
    assert all(expected[one["picture"]] == (one["id"], one["text"]) for one in answers)
    of_odd = {record["picture"]: record for record in records if record["picture"] not in expected}
    files = [bad for bad in odd if not (os.path.isdir(bad.path) and os.listdir(bad.path))]  # others hold a picture
    assert of_odd.keys() >= {bad.path for bad in files}
    assert len(of_odd) == len(odd)
    for bad in files:
        error = of_odd[bad.path]["error"]
        assert bad.expected == "either" or (error is None) == (bad.expected == "readable"), (bad.why, error)


@pytest.fixture
def many_pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(200):
        shutil.copy(picture("noise_128x96.png"), folder / f"{number}.png")
    return folder


def test_a_reader_that_goes_away_ends_the_run_quietly(many_pictures: Path) -> None:
    with start("caption", str(many_pictures), "--quiet") as process:
        json.loads(process.stdout.readline())
        process.stdout.close()
        said = process.stderr.read()

    assert process.returncode == 0
    assert said == b""


def test_help_into_a_closed_pipe_is_quiet() -> None:
    script = f"{sys.executable} -m llama_adapter caption --help | true"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)

    assert ran.stderr == ""


@pytest.fixture
def interrupted(many_pictures: Path, tmp_path: Path) -> Interrupted:
    """Runs a shell script (in it "$@" is the command with its `flags`), and sends SIGINT after the first record.

    Returns the exit code, and the lines of the file.
    """

    def interrupted(script: str, *flags: str) -> tuple[int, list[bytes]]:
        out = tmp_path / "answers.jsonl"
        arguments = ["caption", str(many_pictures), "--max-new-tokens", "8", "--out", str(out), *flags]
        command = ["bash", "-c", script, "bash", *COMMAND, *arguments, "--quiet"]
        process = subprocess.Popen(command, cwd=ROOT)
        while process.poll() is None and not (out.exists() and out.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return process.wait(), out.read_bytes().splitlines()

    return interrupted


def test_ctrl_c_with_stderr_closed_leaves_records_only(interrupted: Interrupted) -> None:
    code, lines = interrupted('exec "$@" 2>&-')

    assert code == 130
    assert 0 < len(lines) < 200
    assert all(json.loads(line)["finish"] for line in lines)


def test_ctrl_c_that_was_ignored_before_is_still_ignored(interrupted: Interrupted) -> None:
    code, lines = interrupted('trap "" INT; exec "$@"', "--limit", "60")

    assert code == 0
    assert len(lines) == 60


def test_a_list_that_comes_slowly_is_answered_line_by_line_and_ctrl_c_does_not_wait_for_its_next() -> None:
    process = start("caption", "--list", "-", "--max-new-tokens", "4", "--quiet", stdin=subprocess.PIPE)
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
