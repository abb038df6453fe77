"""The proofs about folder jobs: what they write down, and what their page says of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.records.index import RecordIndex
from llama_adapter.app.records.record import read_records
from scripts.job_proofs.drawings import write_drawings, write_variations
from scripts.job_proofs.page import NOT_MEASURED, PARTS, as_markdown
from scripts.job_proofs.resuming import time_scan
from scripts.prove_jobs import DOCS, write_part

ABOUT = {
    "cpu": "a processor",
    "num_cpus": 2,
    "threads": 1,
    "versions": {"python": "3.11"},
    "commit": "abc",
    "time": "now",
    "load_before": [0.1, 0.1, 0.1],
}


def scan() -> dict[str, Any]:
    figures = {"num_records": 100_000, "file_mb": 39.0, "seconds": 0.4, "rounds": [0.4, 0.5], "index_mb": 3.8}
    return figures | {"circumstances": ABOUT}


def test_a_part_is_put_beside_the_others(tmp_path: Path) -> None:
    write_part("resuming", scan(), tmp_path)
    write_part("disks", json.loads((DOCS / "jobs.json").read_text())["disks"], tmp_path)

    content = json.loads((tmp_path / "jobs.json").read_text())
    page = (tmp_path / "jobs.md").read_text()
    assert set(content) == {"resuming", "disks"}
    assert "Looking through 100,000 records (39 MB) takes 0.40 s" in page
    assert page.count(NOT_MEASURED) == len(PARTS) - 2


def test_a_machine_that_was_not_alone_is_told() -> None:
    busy = {"resuming": scan() | {"circumstances": ABOUT | {"load_before": [1.5, 1.0, 1.0]}}}

    assert "not alone" not in as_markdown({"resuming": scan()})
    assert "**The machine was not alone**: 1.5 programs" in as_markdown(busy)


def test_the_page_in_the_repository_is_that_of_its_figures() -> None:
    content = json.loads((DOCS / "jobs.json").read_text(encoding="utf-8"))

    assert (DOCS / "jobs.md").read_text(encoding="utf-8") == as_markdown(content)
    assert set(content) == set(PARTS)


def test_what_is_promised_is_what_was_measured() -> None:
    content = json.loads((DOCS / "jobs.json").read_text(encoding="utf-8"))
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

    assert figures.num_records == len(list(read_records(path))) == len(RecordIndex([path])) == 50
    assert len({record["id"] for record in read_records(path)}) == 50


@pytest.mark.slow
def test_no_two_pictures_of_a_folder_are_alike(tmp_path: Path) -> None:
    drawings = write_drawings(tmp_path / "drawings", 6)
    write_variations(tmp_path / "many", 12, drawings=4)

    assert len({path.read_bytes() for path in drawings}) == 6
    assert len({path.read_bytes() for path in (tmp_path / "many").iterdir()}) == 12
