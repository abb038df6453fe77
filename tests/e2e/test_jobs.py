"""Jobs as separate processes that are killed, run out of disk space, lose their input, or read hostile files."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llama_adapter.app.command_line.main import main
from llama_adapter.app.jobs.records.manifest import read_manifest
from llama_adapter.app.jobs.records.record import Record, read_records
from llama_adapter.app.models.resources import sample_pictures
from scripts.job_proofs.drawings import write_drawings
from scripts.job_proofs.kills import kill_again_and_again
from tests.app.command import Ran, Run
from tests.app.golden import ROOT, model_flags, picture
from tests.odd_pictures import write_odd_pictures

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "llama_adapter"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process."""

    def run(*arguments: str) -> Ran:
        return Ran(main(arguments), *capsys.readouterr())

    return run


def records_in(path: Path) -> list[Record]:
    return list(read_records(path))


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_drawings(tmp_path_factory.mktemp("drawings"), 60)


@pytest.mark.proves("caption, ask: resume after kill -9", "CPU")
def test_a_job_that_is_killed_again_and_again_loses_nothing_and_doubles_nothing(
    drawings: list[Path], tmp_path: Path
) -> None:
    report = kill_again_and_again(drawings, tmp_path, kills=2, seed=7, batch_size=8)

    assert report.kills == 2
    assert (report.lost, report.doubled, report.different, report.unreadable_lines) == (0, 0, 0, 0)
    assert report.failed_runs == []
    assert report.most_begun_again <= 8  # the batch in progress


def test_a_full_disk_ends_the_job_with_whole_records_and_a_later_run_completes_it(
    drawings: list[Path], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["caption", str(drawings[0].parent), "--out", str(out)]

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))

    full = subprocess.run([*COMMAND, *command], stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=no_room)
    kept = out.read_bytes()
    completed = run(*command)

    assert full.returncode == 1
    assert "File too large" in full.stderr
    assert "Traceback" not in full.stderr
    assert 0 < len(kept) <= 8_000
    assert kept.endswith(b"\n")
    assert completed.code == 0
    assert out.read_bytes().startswith(kept)
    assert sorted(record["picture"] for record in records_in(out)) == sorted(map(str, drawings))


def test_a_place_where_nothing_can_be_written_is_told_at_once(drawings: list[Path], tmp_path: Path, run: Run) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    place = locked if os.geteuid() else Path("/proc")

    ran = run("caption", str(drawings[0]), "--out", str(place / "answers.jsonl"), "--model", "nowhere")

    assert ran.code == 1
    assert "answers.jsonl" in ran.err
    assert "nowhere" not in ran.err


def test_who_interrupts_a_job_is_told_how_to_go_on(drawings: list[Path], tmp_path: Path, run: Run) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["caption", str(drawings[0].parent), "--batch-size", "8", "--out", str(out)]
    process = subprocess.Popen(
        [*COMMAND, *command, "--format", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
        # Handle Ctrl-C even if the tests run in the background of a shell, which makes its children ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert process.stdout is not None
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


def test_a_reader_in_threads_and_one_in_processes_give_the_same_records(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "pictures"
    shutil.copytree(Path(picture()).parent, folder)
    (folder / "broken.jpg").write_bytes((folder / "shapes_200x300.jpg").read_bytes()[:3000])

    def answers(reader: str) -> list[tuple[object, ...]]:
        ran = run("caption", str(folder), *model_flags(), "--max-new-tokens", "4", "--reader", reader)
        return sorted((one["picture"], one["id"], one["text"], str(one["error"])) for one in ran.records)

    assert answers("thread") == answers("process")


def test_a_folder_of_broken_and_odd_files_has_a_record_for_each_and_sound_answers_beside_them(
    tmp_path: Path, run: Run
) -> None:
    odd = write_odd_pictures(tmp_path / "odd")[::6]  # the others are read in tests/app/pictures/reading
    sound = [str(path) for path in sorted(sample_pictures().glob("*.[pj][np]g"))]
    # Names on a command line may have any bytes except null; a list file can hold all of them.
    mixed = [name for number, bad in enumerate(odd) for name in (sound[number % len(sound)], bad.path)]
    listed, out = tmp_path / "list", tmp_path / "answers.jsonl"
    listed.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in mixed))
    alone = run("caption", *sound)

    ran = run("caption", "--list", str(listed), "--out", str(out), "--quiet")

    assert ran.code == 3
    records = records_in(out)
    assert len(records) == len(mixed)
    expected = {record["picture"]: record["text"] for record in alone.records}
    answers = [(record["picture"], record["text"]) for record in records if record["picture"] in expected]
    assert len(answers) == len(odd)
    assert all(expected[name] == text for name, text in answers)
    of_odd = {record["picture"]: record for record in records if record["picture"] not in expected}
    files = [bad for bad in odd if not (os.path.isdir(bad.path) and os.listdir(bad.path))]  # others hold a picture
    assert of_odd.keys() >= {bad.path for bad in files}
    assert len(of_odd) == len(odd)
    for bad in files:
        error = of_odd[bad.path]["error"]
        assert bad.expected == "either" or (error is None) == (bad.expected == "readable"), (bad.why, error)
