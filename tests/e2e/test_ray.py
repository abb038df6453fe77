"""A job on a real Ray cluster whose machines are local processes: a lost machine or process loses no answer."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.jobs.clusters.cluster import RayOptions
from llama_adapter.app.jobs.clusters.runner import RayRunner
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.manifest import read_manifest
from llama_adapter.app.jobs.records.record import Record, read_records
from llama_adapter.app.jobs.run import run_job
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.inputs import InputSpec
from llama_adapter.runtime.errors import ExitCode
from tests.app.models.parallel.processes import started

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray uses functions that it has deprecated itself
]

SAMPLES = Path(__file__).resolve().parents[2] / "assets" / "pictures"
MACHINE = {"num_cpus": 1, "object_store_memory": 100_000_000}
SYSTEM = {
    # A killed machine counts as gone after one second, not after half a minute.
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 5,
    # Processes start when they are needed.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One machine, which also computes."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray import cluster_utils

    head = {**MACHINE, "include_dashboard": False, "_system_config": SYSTEM}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", print)  # Ray replaces `print`, also for later tests
        handler = signal.getsignal(signal.SIGTERM)  # Ray sets a handler and does not restore it
        try:
            cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
            yield cluster
            cluster.shutdown()
        finally:
            signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 files, 4 of which are no pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    samples = sorted(path for path in SAMPLES.iterdir() if path.suffix in (".png", ".jpg"))
    for number in range(76):
        sample = samples[number % len(samples)]
        shutil.copy(sample, folder / f"{number}{sample.suffix}")
    for number in range(4):
        (folder / f"bad{number}.png").write_bytes(b"no picture %d" % number)
    return folder


def job_of(*paths: Path | str, out: Path) -> Job:
    return Job(
        spec=CaptionerSpec(),
        inputs=InputSpec(paths=tuple(map(str, paths))),
        questions=(Question(), Question(instruction="Is there a red star?", task=OneOf(("yes", "no")))),
        out=str(out),
        reader="thread",
        quiet=True,
    )


def seen(path: Path) -> Counter[str]:
    """The records of a file, without the fields that differ between runs."""

    def plain(record: Record) -> str:
        kept = {name: value for name, value in record.items() if name not in ("ms", "run", "choice")}
        return json.dumps(kept, sort_keys=True)

    return Counter(plain(record) for record in read_records(path))


def kill_a_captioner() -> None:
    """Kill one of the captioners on this machine. Ray names its processes after their work."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            if (process / "cmdline").read_bytes().startswith(b"ray::CaptionWorker"):
                return os.kill(int(process.name), signal.SIGKILL)
    raise AssertionError("there is no captioner")


def at_records(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], object]]) -> None:
    """Call each action after its number of records has been written."""
    write, num_written = RecordWriter.write, 0

    def counting(self: RecordWriter, record: Record) -> None:
        nonlocal num_written
        write(self, record)
        num_written += 1
        actions.get(num_written, lambda: None)()

    monkeypatch.setattr(RecordWriter, "write", counting)


@pytest.mark.proves("Ray clusters", "CPU")
def test_a_lost_process_and_a_lost_machine_cost_and_repeat_nothing(
    cluster: Any, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, alone = tmp_path / "answers.jsonl", tmp_path / "alone.jsonl"
    assert run_job(job_of(pictures, out=alone)) == ExitCode.PICTURE_ERRORS
    expected = seen(alone)
    doomed = cluster.add_node(**MACHINE)
    lost = []
    lose = {16: kill_a_captioner, 60: lambda: lost.append(cluster.remove_node(doomed, allow_graceful=False))}
    at_records(monkeypatch, lose)
    handler = signal.getsignal(signal.SIGTERM)

    code = run_job(job_of(pictures, out=out), RayRunner(RayOptions(address=cluster.address)))

    assert signal.getsignal(signal.SIGTERM) is handler, "Ray sets its own"
    assert lost, "the machine was lost while the job ran"
    assert code == ExitCode.PICTURE_ERRORS
    assert (expected - seen(out), seen(out) - expected) == (Counter(), Counter()), "missing, and too many"
    (run,) = read_manifest(out)
    assert run.end_reason == "finished"
    assert sum(run.counts.values()) == sum(expected.values())
    assert run.job["engine"] == {"name": "ray", "captioners": 2}


def test_an_interrupted_job_answers_what_is_begun_and_no_more(
    cluster: Any, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(pictures, out=tmp_path / "answers.jsonl")
    at_records(monkeypatch, {30: lambda: os.kill(os.getpid(), signal.SIGINT)})

    assert run_job(job, RayRunner(RayOptions(address=cluster.address, actors=1))) == ExitCode.INTERRUPTED

    assert 30 <= seen(tmp_path / "answers.jsonl").total() < 80 * len(job.questions)
    assert [run.end_reason for run in read_manifest(tmp_path / "answers.jsonl")] == ["interrupted"]


def test_pictures_are_read_from_an_address_and_what_is_not_there_is_told(
    cluster: Any, pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    address = pictures.as_uri()
    some = [f"{address}/{name}" for name in ("0.png", "bad0.png", "none.png")]

    code = run_job(job_of(*some, out=out), RayRunner(RayOptions(address=cluster.address, actors=1)))

    assert code == ExitCode.PICTURE_ERRORS
    found = {
        (record["picture"].rpartition("/")[2], (record["error"] or {}).get("code")) for record in read_records(out)
    }
    assert found == {("0.png", None), ("bad0.png", "not_a_picture"), ("none.png", "missing")}
    assert all(record["picture"].startswith(address) for record in read_records(out))


def test_the_death_of_the_driver_s_own_node_is_told_and_the_same_command_goes_on(
    pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["caption", str(pictures), "--out", str(out), "--reader", "thread", "--batch-size", "4"]
    variables = {f"RAY_{name}": str(value).lower() for name, value in SYSTEM.items()}
    driver = subprocess.Popen(
        [sys.executable, "-m", "llama_adapter", *command, "--engine", "ray", "--actors", "1"],
        cwd=SAMPLES.parents[1],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | variables,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ray ends a whole process group, which must not be that of the tests
    )
    while driver.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 4):
        time.sleep(0.02)
    raylets = []
    for child in started(driver.pid):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.name() == "raylet":
                child.kill()
                raylets.append(child)
    _, said = driver.communicate(timeout=120)
    assert len(raylets) == 1, said
    kept = list(read_records(out))

    assert driver.returncode == 1
    assert "error: This process was ended from outside" in said
    assert "the same command goes on where this one ended" in said
    assert 4 <= len(kept) < 80
    assert run_job(dataclasses.replace(job_of(pictures, out=out), questions=(Question(),))) == ExitCode.PICTURE_ERRORS
    records = list(read_records(out))
    assert records[: len(kept)] == kept
    assert Counter(record["picture"] for record in records) == Counter(map(str, pictures.iterdir()))
