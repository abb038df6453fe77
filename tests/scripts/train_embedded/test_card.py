"""The embedded model's card: its figures, and how results and curves are added."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.common import DOCS
from scripts.pages.render import as_text, read
from scripts.train_embedded.card import add_scores, main
from scripts.train_embedded.curves import MOST_POINTS, mean_of_tasks, thin
from tests.app.learning.labelled.tables import write_lines

TASKS = {"caption": 0.5, "exist": 0.75, "pair-caption": 0.25}


def point(step: int, **values: dict[str, float]) -> dict[str, Any]:
    return {"step": step, "num_steps": 400, "processor_s": step * 0.3, **values}


def test_the_scores_are_those_of_the_model_in_the_repository() -> None:
    manifest = json.loads((DOCS.parent / "assets" / "embedded" / "manifest.json").read_text(encoding="utf-8"))

    assert read("embedded-model")["scores"]["float32"]["model"] == manifest["digest"]


def scored(**changes: Any) -> dict[str, Any]:
    return {**read("embedded-model")["scores"]["int8"], **changes}


def test_results_and_curves_are_put_into_the_figures_and_the_page(tmp_path: Path) -> None:
    (tmp_path / "embedded-model.json").write_text(json.dumps(read("embedded-model")))
    (tmp_path / "int8.json").write_text(json.dumps(scored(scores=dict.fromkeys(scored()["scores"], 12.3))))
    (tmp_path / "table.json").write_text('{"heads": ["kind", "AUC"], "rows": [["a|b", 0.98760]]}')
    write_lines(tmp_path / "run" / "code.curve.jsonl", point(25, figures={"loss": 1.0}), point(200, scores=TASKS))
    flags = ["--scores", f"int8={tmp_path / 'int8.json'}", "--familiar", str(tmp_path / "table.json")]

    assert main(["--out", str(tmp_path), *flags, "--run", str(tmp_path / "run")]) == 0

    page = (tmp_path / "embedded-model.md").read_text(encoding="utf-8")
    assert f"| caption | {scored()['asked']['caption']} | 100.0 | 12.3 |" in page
    assert "| kind | AUC |\n| --- | --- |\n| a\\|b | 0.9876 |\n" in page
    assert "| code | 200 of 400 |" in page
    figures = read("embedded-model", tmp_path)
    assert figures["curves"]["code"]["scores"]["caption"] == [0.5]
    assert figures["curves"]["vision"] == read("embedded-model")["curves"]["vision"]
    with Image.open(tmp_path / "embedded-curves.png") as picture:
        assert len(picture.convert("RGB").getcolors(10**6) or []) > 20  # the plot is not empty


@pytest.mark.parametrize(("name", "changes"), [("int8", {"seed": 3}), ("int8", {"asked": {}}), ("int4", {})])
def test_scores_that_cannot_be_compared_are_refused(name: str, changes: dict[str, Any]) -> None:
    figures: dict[str, Any] = {"scores": {"float32": scored()}}

    with pytest.raises(ValueError, match=f"asked|{name}"):
        add_scores(figures, name, scored(**changes))
    assert figures["scores"].keys() == {"float32"}


def test_a_folder_without_curves_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--run", str(tmp_path)])
    assert "no NAME.curve.jsonl" in capsys.readouterr().err


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
