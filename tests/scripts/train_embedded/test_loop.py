"""The training loop: the same weights with and without a stop, schedules, curves."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scripts.train_embedded import loop


class _StoppedError(Exception):
    pass


def _train(folder: Path, *, num_steps: int = 12, stop_at: int | None = None) -> Tensor:
    """The weights of a small layer after training with dropout, so that torch's random numbers have an effect."""
    torch.manual_seed(0)
    layer = nn.Sequential(OrderedDict(layers=nn.Linear(3, 3)))  # its matrix has a hidden one's name

    def batch_at(step: int) -> Tensor:
        if step == stop_at:
            raise _StoppedError
        return torch.from_numpy(np.random.default_rng(step).standard_normal((4, 3), dtype=np.float32))

    def compute(batch: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss = nn.functional.dropout(layer(batch), 0.5).square().sum()
        return loss, {"loss": float(loss.detach())}

    options = {"lr": 0.1, "num_steps": num_steps, "seed": 1, "folder": folder, "evaluate_every": 4}
    loop.train("toy", {"layer": layer}, batch_at, compute, evaluate=lambda: {"right": 0.5}, **options)
    return layer[0].weight.detach().clone()


def test_resumed_stage_gives_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _train(tmp_path / "whole")
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY_S", 0)
    with pytest.raises(_StoppedError):
        _train(tmp_path / "stopped", stop_at=7)
    assert torch.equal(_train(tmp_path / "stopped"), whole)
    assert not torch.equal(_train(tmp_path / "other", num_steps=11), whole)
    assert torch.equal(_train(tmp_path / "whole", stop_at=0), whole)  # a finished stage is not trained again


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path: Path) -> None:
    _train(tmp_path, num_steps=3)
    with pytest.raises(ValueError, match="begun for 3 steps, now 12"):
        _train(tmp_path)


def test_the_curve_goes_on_behind_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CURVE_EVERY", 3)
    _train(tmp_path / "whole")
    with pytest.raises(_StoppedError):  # the first checkpoint would be written only after a minute
        _train(tmp_path / "stopped", stop_at=7)
    assert len(_points(tmp_path / "stopped")) == 3
    _train(tmp_path / "stopped")
    points, expected = _points(tmp_path / "stopped"), _points(tmp_path / "whole")
    assert [point["step"] for point in points] == [3, 4, 6, 8, 9, 12, 12]
    assert [point.get("figures", point.get("scores")) for point in points] == [
        point.get("figures", point.get("scores")) for point in expected
    ]
    assert points[1]["scores"] == {"right": 0.5}


def _points(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "toy.curve.jsonl").read_text().splitlines()]


def test_epochs_visit_each_example_once() -> None:
    epochs = [
        np.concatenate([loop.shuffled_at(step, count=10, batch_size=5, seed=3) for step in steps])
        for steps in ((0, 1), (2, 3))
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert list(epochs[0]) != list(epochs[1])


def test_the_rate_rises_falls_and_never_reaches_zero() -> None:
    rates = [loop.cosine(progress / 100) for progress in range(101)]
    assert max(rates) == 1
    assert rates[0] < 0.5
    assert 0 < rates[-1] < 0.05
