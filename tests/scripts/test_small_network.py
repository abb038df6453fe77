"""The small network that is trained from scratch, beside `train`."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from scripts import small_network


def test_the_small_network_learns_bright_and_dark_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_network, "time", SimpleNamespace(perf_counter=count().__next__))  # a step takes a second
    for level in (*range(4), *range(252, 256)):
        path = tmp_path / ("held" if level % 4 < 2 else "learn") / str(level > 128) / f"{level}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (level,) * 3).save(path)

    assert small_network.accuracy_after(40, tmp_path / "learn", tmp_path / "held") == 1.0
