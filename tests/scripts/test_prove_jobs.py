"""Tests of folder jobs at full size: their committed results, their inputs, and the comparison of records."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.jobs.records.index import RecordIndex
from llama_adapter.app.jobs.records.record import read_records
from scripts.job_proofs.drawings import write_drawings, write_variations
from scripts.job_proofs.ray import compare_jobs, row_of
from scripts.pages.render import read
from scripts.photographs import photograph
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
    assert all(row["different"] == row["missing"] == 0 for row in content["ray"]["rows"])


def test_records_for_the_scan_are_records(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    figures = time_scan(path, 50, rounds=2)

    assert figures["num_records"] == len(list(read_records(path))) == len(RecordIndex([path])) == 50
    assert len({record["id"] for record in read_records(path)}) == 50


def test_a_row_is_the_median_of_its_rounds_and_counts_what_differs() -> None:
    counts = ({"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": 1, "b": 1, "c": 1})
    runs = [
        {"pictures_per_s": rate, "wall_s": 2 * rate, "records": Counter(records)}
        for rate, records in zip((3.0, 1.0, 2.0), counts, strict=True)
    ]

    row = row_of(2, runs, Counter(counts[0]))

    medians = {"pictures_per_s": 2.0, "rounds": [3.0, 1.0, 2.0], "wall_s": 4.0}
    assert row == {"actors": 2, **medians, "different": 2, "missing": 1}


def test_jobs_on_a_cluster_have_the_pictures_of_their_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def run_job(pictures: Path, *, actors: int | None) -> dict[str, Any]:
        counts.append(len(list(pictures.iterdir())))
        return {"pictures_per_s": 1.0, "wall_s": 1.0, "records": Counter[str]()}

    monkeypatch.setattr("scripts.job_proofs.ray._run_job", run_job)
    for number in (3, 2):
        compare_jobs(tmp_path, number=number, rounds=1)

    assert counts == [3] * 3 + [2] * 3


@pytest.mark.slow
def test_pictures_of_a_folder_are_different(tmp_path: Path) -> None:
    drawings = write_drawings(tmp_path / "drawings", 6)
    write_variations(tmp_path / "many", 12, drawings=4)

    assert len({path.read_bytes() for path in drawings}) == 6
    assert len({path.read_bytes() for path in (tmp_path / "many").iterdir()}) == 12


def test_photograph_is_deterministic_and_of_typical_size(tmp_path: Path) -> None:
    photograph(288, 216, seed=3).save(tmp_path / "photograph.jpg", quality=90)
    num_bytes = (tmp_path / "photograph.jpg").stat().st_size

    assert photograph(288, 216, seed=3).tobytes() == photograph(288, 216, seed=3).tobytes()
    assert 1.0 < num_bytes * 8 / (288 * 216) < 6.0  # bits per pixel
