"""The report on rows: both caches give equal ids, and the one in blocks takes less. Speed is not tested."""

import pytest

from scripts.rows_report import main


@pytest.mark.slow
def test_the_report_compares_both_caches(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--size", "tiny", "--rows", "4", "--context", "600", "--requests", "6", "--rounds", "1"])

    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [len(row) for row in rows] == [7] * 6 + [7] * 3
    for row in rows[2:6]:
        assert float(row[6].strip(" |")) <= float(row[5])
    assert int(rows[8][5]) > int(rows[8][4])
