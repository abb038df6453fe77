"""The benchmark of exported models: encoders. Exports of decoders are tested with the program that writes them."""

from pathlib import Path

import pytest

from scripts.bench_graphs import ENCODER_CASES, main
from scripts.pages.render import read


@pytest.mark.slow
def test_exported_encoders_compute_what_torch_does(tmp_path: Path) -> None:
    assert main(["--quick", "--part", "encoders", "--out", str(tmp_path)]) == 0

    rows = read("graphs", tmp_path)["encoders"]["rows"]
    assert tuple((row["dtype"], row["opset"]) for row in rows) == ENCODER_CASES
    assert all(row["complaints"] == [] and row["max_abs"] < 0.01 for row in rows)
