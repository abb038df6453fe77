"""Jobs as processes of their own that are killed, run out of disk, lose their input, or meet hostile files."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.records.manifest import read_manifest
from llama_adapter.app.records.record import Record, read_records
from scripts.job_proofs.drawings import write_drawings
from scripts.job_proofs.kills import kill_again_and_again
from tests.app.golden import ROOT, model_flags, picture
from tests.odd_pictures import write_odd_pictures

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "llama_adapter"]


def run(*arguments: str, before: Callable[[], None] | None = None) -> "subprocess.CompletedProcess[str]":
    ran = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT, preexec_fn=before)
    assert "Traceback" not in ran.stderr
    return ran


def records_in(path: Path) -> list[Record]:
    return list(read_records(path))


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_drawings(tmp_path_factory.mktemp("drawings"), 300)


def test_a_job_that_is_killed_again_and_again_loses_nothing_and_doubles_nothing(
    drawings: list[Path], tmp_path: Path
) -> None:
    report = kill_again_and_again(drawings, tmp_path, kills=8, seed=7, batch_size=8)

    assert report.kills == 8
    assert (report.lost, report.doubled, report.different, report.unreadable_lines) == (0, 0, 0, 0)
    assert report.failed_runs == []
    assert report.most_begun_again <= 8  # the batch that was under way


def test_a_full_disk_ends_the_job_with_whole_records_and_a_later_run_completes_it(
    drawings: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["caption", str(drawings[0].parent), "--out", str(out)]

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))

    full = run(*command, before=no_room)
    kept = out.read_bytes()
    completed = run(*command)

    assert full.returncode == 1
    assert "File too large" in full.stderr
    assert 0 < len(kept) <= 40_000
    assert kept.endswith(b"\n")
    assert completed.returncode == 0
    assert out.read_bytes().startswith(kept)
    assert sorted(record["picture"] for record in records_in(out)) == sorted(map(str, drawings))


def test_a_place_where_nothing_can_be_written_is_told_at_once(drawings: list[Path], tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    place = locked if os.geteuid() else Path("/proc")

    ran = run("caption", str(drawings[0]), "--out", str(place / "answers.jsonl"), "--model", "nowhere")

    assert ran.returncode == 1
    assert "answers.jsonl" in ran.stderr
    assert "nowhere" not in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_a_job_is_told_how_to_go_on(
    number: signal.Signals, drawings: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["caption", str(drawings[0].parent), "--out", str(out)]
    process = subprocess.Popen(
        [*COMMAND, *command, "--format", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert process.stdout is not None
    process.stdout.readline()
    os.killpg(process.pid, number)  # as a terminal does: everybody hears it
    _, said = process.communicate()

    assert process.returncode == 130
    assert b"the same command goes on where this one ended" in said
    assert b"Traceback" not in said
    assert 0 < len(records_in(out)) < len(drawings)
    assert read_manifest(out)[0].end_reason == "interrupted"
    assert all(record["error"] is None for record in records_in(out))


def test_a_reader_in_threads_and_one_in_processes_give_the_same_records(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    shutil.copytree(Path(picture()).parent, folder)
    (folder / "broken.jpg").write_bytes((folder / "shapes_200x300.jpg").read_bytes()[:3000])

    def answers(reader: str) -> list[tuple[object, ...]]:
        ran = run("caption", str(folder), *model_flags(), "--max-new-tokens", "4", "--reader", reader)
        records = map(json.loads, ran.stdout.splitlines())
        return sorted((record["picture"], record["id"], record["text"], str(record["error"])) for record in records)

    assert answers("thread") == answers("process")


def test_a_folder_of_broken_and_odd_files_has_a_record_for_each_and_sound_answers_beside_them(tmp_path: Path) -> None:
    odd = write_odd_pictures(tmp_path / "odd")
    sound = [str(path) for path in sorted(sample_pictures().glob("*.[pj][np]g"))]
    # Names on a command line are bytes, but for a null; a list has room for all of them.
    mixed = [name for number, bad in enumerate(odd) for name in (sound[number % len(sound)], bad.path)]
    listed, out = tmp_path / "list", tmp_path / "answers.jsonl"
    listed.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in mixed))
    alone = run("caption", *sound)

    ran = run("caption", "--list", str(listed), "--out", str(out), "--quiet")

    assert len(odd) >= 200
    assert ran.returncode == 3
    records = records_in(out)
    assert len(records) == len(mixed)
    expected = {record["picture"]: record["text"] for record in map(json.loads, alone.stdout.splitlines())}
    answers = [(record["picture"], record["text"]) for record in records if record["picture"] in expected]
    assert len(answers) == len(odd)
    assert all(expected[name] == text for name, text in answers)
    of_odd = {record["picture"]: record for record in records if record["picture"] not in expected}
    files = [bad for bad in odd if not (os.path.isdir(bad.path) and os.listdir(bad.path))]  # else its picture counts
    assert of_odd.keys() >= {bad.path for bad in files}
    assert len(of_odd) == len(odd)
    for bad in files:
        error = of_odd[bad.path]["error"]
        assert bad.expected == "either" or (error is None) == (bad.expected == "readable"), (bad.why, error)
