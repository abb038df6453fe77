"""A campaign ends in time, reports its results, and keeps its corpus."""

from pathlib import Path

import pytest

from tests.fuzz.__main__ import main


@pytest.mark.slow
def test_campaign_counts_inputs_and_keeps_new_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--minutes", "0.05", "--target", "wire-reply", "--by-outcome", "--folder", str(tmp_path)]

    assert main(["run", *flags]) == 0

    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| wire-reply | outcome"))
    assert int(row.split("|")[4].replace(",", "")) > 20
    assert list((tmp_path / "wire-reply" / "corpus").iterdir())


def test_unknown_target_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--target", "nothing"])
    assert "wire-reply" in capsys.readouterr().err
