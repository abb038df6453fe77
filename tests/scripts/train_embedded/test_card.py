"""The embedded model's card: its scores and other figures, and curves of trainings."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.common import DOCS
from scripts.pages.render import as_text, read
from scripts.train_embedded.card import main
from scripts.train_embedded.curves import MOST_POINTS, STAGES, mean_of_tasks, thin
from tests.app.learning.labelled.tables import write_lines

TASKS = {"caption": 0.5, "exist": 0.75, "pair-caption": 0.25}


def point(step: int, **values: dict[str, float]) -> dict[str, Any]:
    return {"step": step, "num_steps": 400, "processor_s": step * 0.3, **values}


def test_the_scores_are_those_of_the_model_in_the_repository() -> None:
    manifest = json.loads((DOCS.parent / "assets" / "embedded" / "manifest.json").read_text(encoding="utf-8"))

    assert read("embedded-model")["scores"]["float32"]["model"] == manifest["digest"]


def test_the_curves_of_a_training_replace_those_before(tmp_path: Path) -> None:
    (tmp_path / "embedded-model.json").write_text(json.dumps(read("embedded-model")))
    values = [point(25, figures={"loss": 1.0}), point(200, scores=TASKS)]
    for stage in STAGES:
        write_lines(tmp_path / "run" / f"{stage}.curve.jsonl", *values)

    main(["--out", str(tmp_path), "--part", "training", "--run", str(tmp_path / "run")])

    assert "| code | 200 of 400 |" in (tmp_path / "embedded-model.md").read_text(encoding="utf-8")
    figures = read("embedded-model", tmp_path)
    assert figures["training"]["curves"]["code"]["scores"]["caption"] == [0.5]
    assert figures["scores"] == read("embedded-model")["scores"]
    with Image.open(tmp_path / "embedded-curves.png") as picture:
        assert len(picture.convert("RGB").getcolors(10**6) or []) > 20  # the plot is not empty


def test_a_folder_without_curves_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scripts.train_embedded.card.run_bench", lambda *given, **options: pytest.fail("measured"))

    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "--run", str(tmp_path)])

    assert "no NAME.curve.jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_a_bundle_is_scored_in_both_types_and_shown_other_pictures(tmp_path: Path) -> None:
    (tmp_path / "embedded-model.json").write_text(json.dumps(read("embedded-model")))

    main(["--quick", "--out", str(tmp_path), "--part", "scores", "--part", "familiar"])

    figures, before = read("embedded-model", tmp_path), read("embedded-model")
    for name, found in before["scores"].items():
        scored = figures["scores"][name]
        assert scored.keys() == found.keys()
        assert sum(scored["asked"].values()) > 10
        assert scored["num_wrong"] == 0
    rows = {row[0]: row[1:] for row in figures["familiar"]["rows"]}
    assert rows.keys() == {row[0] for row in before["familiar"]["rows"] if not row[0].startswith("folder: ")}
    assert (rows["of the world"][0], rows["samples"][:2], rows["drawn: noise"][1:3]) == (4, [32, 0.0], [100.0, 1.0])


def test_thinned_series_keeps_its_ends() -> None:
    series = thin([point(step, figures={"loss": 1 / (step + 1)}) for step in range(400)], "figures")

    assert {len(column) for column in series.values()} == {MOST_POINTS}
    assert (series["step"][0], series["step"][-1]) == (0, 399)
    assert series["minutes"][-1] == 1.99  # 119.7 s
    assert series["loss"][:2] == [1.0, 0.25]  # the values at steps 0 and 3
    assert series["loss"][-1] == 0.0025


def test_missing_and_infinite_values_are_gaps() -> None:
    points = [
        point(25, figures={"loss": float("nan")}),
        point(50, figures={"loss": 0.123456, "words": 0.5}),
        point(50, scores={"caption": 0.98765}),
    ]

    columns = {"step": [25, 50], "minutes": [0.12, 0.25]}
    assert thin(points, "figures") == {**columns, "loss": [None, 0.1235], "words": [None, 0.5]}
    assert thin(points, "scores") == {"step": [50], "minutes": [0.25], "caption": [0.9877]}
    assert thin(points[:1], "scores") == {}


def test_the_mean_is_over_tasks_and_over_never_drawn_pairs_apart() -> None:
    scores = thin([point(1, scores=TASKS), point(2, scores={"caption": 0.5})], "scores")

    assert mean_of_tasks(scores) == [0.625, None]
    assert mean_of_tasks(scores, pairs=True) == [0.25, None]


def test_file_of_figures_has_one_line_per_series() -> None:
    content = {"a": {"b": [1, 2.5, None]}, "rows": [["x", 1], ["y", 2]], "none": {}, "empty": []}

    assert json.loads(as_text(content)) == content
    assert '  "b": [1, 2.5, null]\n' in as_text(content)
    assert '  ["y", 2]\n' in as_text(content)
