"""The plot of a training's curves."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.train_embedded.curves import STAGES, draw, lines, mean_of_tasks, read
from tests.app.learning.labelled.tables import write_lines

FEW = {"caption": 0.5, "exist": 0.75, "pair-caption": 0.25}
MANY = FEW | {"color": 1.0, "count": 0.75, "pair-exist": 0.5}


def point(step: int, **values: dict[str, float]) -> dict[str, Any]:
    return {"step": step, "num_steps": 400, "processor_s": step * 0.3, **values}


POINTS = [point(200, figures={"loss": 1.0}), point(200, scores=MANY), point(400, figures={"loss": 0.5, "words": 0.5})]


def test_the_curves_of_a_training_are_plotted_by_stage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no NAME\.curve\.jsonl"):
        read(tmp_path)
    write_lines(tmp_path / "reading.curve.jsonl", *POINTS)
    write_lines(tmp_path / "code.curve.jsonl", point(200, figures={"loss": 1.0}), point(400, scores=FEW))

    stages = read(tmp_path)
    draw(stages, tmp_path / "curves.png")

    assert list(stages) == [stage for stage in STAGES if stage in ("code", "reading")]
    with Image.open(tmp_path / "curves.png") as picture:
        assert len(picture.convert("RGB").getcolors(10**6) or []) > 20  # the plot is not empty


def test_values_stand_at_their_minutes_and_tasks_of_never_drawn_pairs_have_a_mean_of_their_own() -> None:
    assert lines(POINTS, "figures") == {"loss": ([1.0, 2.0], [1.0, 0.5]), "words": ([2.0], [0.5])}
    assert mean_of_tasks(POINTS) == ([1.0], [0.75])
    assert mean_of_tasks(POINTS, pairs=True) == ([1.0], [0.375])
