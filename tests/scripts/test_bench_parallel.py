"""The benchmark of ranks: its output."""

import json
from pathlib import Path

import pytest

from scripts.bench_parallel import main


@pytest.mark.slow
def test_a_quick_run_measures_whole_and_split_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, because six new ones would import torch for most of the time.
    monkeypatch.setattr("scripts.bench_parallel.in_fresh_process", lambda work, *given: work(*given))
    main(["--quick", "--out", str(tmp_path)])

    parts = json.loads((tmp_path / "parallel.json").read_text(encoding="utf-8"))
    steps, memory = parts["steps"]["rows"], parts["memory"]["rows"]
    for rows in (steps, memory):
        assert [(row["ranks"], row["is_split"]) for row in rows] == [(1, False), (2, False), (2, True)]
    assert memory[1]["share_mib"] == memory[2]["share_mib"] < 0.55 * memory[0]["share_mib"]
    assert [len(row["peaks_mib"]) for row in memory] == [1, 2, 2]
    assert steps[0]["batches"]["1"]["decode_collectives"] == 0.0
    assert 0 < steps[1]["batches"]["5"]["decode_collectives"] < 1
    assert "| 2 | split |" in (tmp_path / "parallel.md").read_text(encoding="utf-8")
