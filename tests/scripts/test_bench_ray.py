"""The benchmark of jobs with Ray: the comparison of records."""

from collections import Counter
from pathlib import Path
from typing import Any

from scripts.bench_ray import make_pictures, row_of
from scripts.pages.render import read


def run(rate: float, records: dict[str, int]) -> dict[str, Any]:
    return {"pictures_per_s": rate, "wall_s": 2 * rate, "records": Counter(records)}


def test_a_row_is_the_median_of_its_rounds_and_counts_what_differs() -> None:
    expected = Counter({"a": 1, "b": 2})
    runs = [run(3.0, {"a": 1, "b": 2}), run(1.0, {"a": 2, "b": 2}), run(2.0, {"a": 1, "b": 1, "c": 1})]

    row = row_of(2, runs, expected)

    assert row == {
        "actors": 2,
        "pictures_per_s": 2.0,
        "rounds": [3.0, 1.0, 2.0],
        "wall_s": 4.0,
        "different": 2,
        "missing": 1,
    }


def test_pictures_are_copies_of_the_samples(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "pictures", number=34)

    files = list(folder.iterdir())
    assert len(files) == 34
    assert len({file.read_bytes() for file in files}) == 32


def test_ray_gives_the_records_of_one_process() -> None:
    assert all(row["different"] == row["missing"] == 0 for row in read("ray")["rows"])
