"""Tests of folder jobs at full size: their committed results, and their inputs."""

from pathlib import Path

import pytest

from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.record import read_records
from scripts.job_proofs.drawings import write_drawings, write_variations
from scripts.pages.render import read
from scripts.prove_jobs import time_scan


def test_committed_results_keep_the_promises() -> None:
    content = read("jobs")
    kills, disks = content["kills"], content["disks"]

    assert kills["kills"] >= 200
    assert kills["num_pictures"] >= 300
    assert kills["lost"] == kills["doubled"] == kills["different"] == kills["unreadable_lines"] == 0
    assert kills["failed_runs"] == []
    assert kills["most_begun_again"] <= kills["batch_size"]
    assert (disks["full_exit_code"], disks["completed_exit_code"], disks["lost"], disks["doubled"]) == (1, 0, 0, 0)
    assert disks["is_whole"]


def test_records_for_the_scan_are_records(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    figures = time_scan(path, 50, rounds=2)

    assert figures["num_records"] == len(list(read_records(path))) == len(RecordIndex([path])) == 50
    assert len({record["id"] for record in read_records(path)}) == 50


@pytest.mark.slow
def test_pictures_of_a_folder_are_different(tmp_path: Path) -> None:
    drawings = write_drawings(tmp_path / "drawings", 6)
    write_variations(tmp_path / "many", 12, drawings=4)

    assert len({path.read_bytes() for path in drawings}) == 6
    assert len({path.read_bytes() for path in (tmp_path / "many").iterdir()}) == 12
