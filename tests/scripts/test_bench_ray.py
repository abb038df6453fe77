"""The benchmark of jobs on many machines: what it counts as equal, and what its page says."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from scripts.bench_ray import DOCS, main, make_pictures, row_of
from scripts.ray_bench.page import as_markdown


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


def test_pictures_are_copies_of_the_samples_under_names_of_their_own(tmp_path: Path) -> None:
    folder = make_pictures(tmp_path / "pictures", number=34)

    files = list(folder.iterdir())
    assert len(files) == 34
    assert len({file.read_bytes() for file in files}) == 32


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--pictures", "-1"], ["--actors", "1", "0"]])
def test_amounts_that_cannot_be_measured_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "above 0" in capsys.readouterr().err


def test_a_busy_machine_is_told_on_the_page() -> None:
    about = {"cpu": "one", "num_cpus": 2, "omp_num_threads": "1", "versions": {}, "commit": "c", "time": "t"}
    rows = [row_of(None, [run(1.0, {})], Counter()), row_of(1, [run(2.0, {})], Counter())]
    content = {"rows": rows, "num_pictures": 10, "rounds": 1, "lead": 0.2}

    quiet = as_markdown(content | {"circumstances": about | {"load_before": [0.2, 0.2, 0.2]}})
    busy = as_markdown(content | {"circumstances": about | {"load_before": [3.0, 0.2, 0.2]}})

    assert "not alone" in busy
    assert "not alone" not in quiet
    assert "| Ray, 1 | 2.0 |" in quiet


@pytest.mark.skipif(not (DOCS / "ray.json").exists(), reason="not measured yet")
def test_the_page_is_that_of_its_figures() -> None:
    content = json.loads((DOCS / "ray.json").read_text(encoding="utf-8"))

    assert (DOCS / "ray.md").read_text(encoding="utf-8") == as_markdown(content)
    assert all(row["different"] == row["missing"] == 0 for row in content["rows"])
