"""The benchmark of reading. Speed is not tested."""

from pathlib import Path

import pytest

from scripts.bench_reading import QUICK, main
from scripts.pages.render import read
from scripts.photographs import photograph


@pytest.mark.slow
def test_a_short_measurement_has_a_row_for_each_way_and_kind(tmp_path: Path) -> None:
    main(["--quick", "--out", str(tmp_path)])

    figures = read("reading", tmp_path)
    ways = [(row["pictures"], row["reader"], row["at_once"]) for row in figures["rows"]]
    assert len(set(ways)) == len(ways) == 8
    assert all(row["pictures_per_s"] > 0 and len(row["rounds"]) == QUICK.rounds for row in figures["rows"])
    assert [cost["pictures"] for cost in figures["overhead"]] == list(QUICK.kinds)
    page = (tmp_path / "reading.md").read_text(encoding="utf-8")
    assert all(f"| {pictures} |" in page for pictures in QUICK.kinds)


def test_photograph_is_deterministic_and_of_typical_size(tmp_path: Path) -> None:
    photograph(288, 216, seed=3).save(tmp_path / "photograph.jpg", quality=90)
    num_bytes = (tmp_path / "photograph.jpg").stat().st_size

    assert photograph(288, 216, seed=3).tobytes() == photograph(288, 216, seed=3).tobytes()
    assert 1.0 < num_bytes * 8 / (288 * 216) < 6.0  # bits per pixel
