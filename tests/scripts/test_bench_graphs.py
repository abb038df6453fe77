"""The benchmark of exported models: encoders. Exports of decoders are tested with the program that writes them."""

from pathlib import Path

import pytest

from scripts import bench_graphs
from scripts.pages.render import read


@pytest.mark.slow
def test_exported_encoders_compute_what_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (("float16", 17), ("float16", 18))  # tests/vision/test_export.py exports in float32, too
    assert set(cases) < set(bench_graphs.ENCODER_CASES)
    monkeypatch.setattr(bench_graphs, "ENCODER_CASES", cases)

    assert bench_graphs.main(["--quick", "--part", "encoders", "--out", str(tmp_path)]) == 0

    rows = read("graphs", tmp_path)["encoders"]["rows"]
    assert tuple((row["dtype"], row["opset"]) for row in rows) == cases
    assert all(row["complaints"] == [] and row["max_abs"] < 0.01 for row in rows)
