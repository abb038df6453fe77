"""The curves of a training are collected into the figures and drawn."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.pages.render import as_text
from scripts.train_embedded.card import PLACE, put, read
from scripts.train_embedded.curves import MOST_POINTS, collect, draw, main, mean_of_tasks, thin
from tests.app.learning.labelled.tables import write_lines

TASKS = {"caption": 0.5, "exist": 0.75, "pair-caption": 0.25}


def point(step: int, **values: dict[str, float]) -> dict[str, Any]:
    return {"step": step, "num_steps": 400, "processor_s": step * 0.3, **values}


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

    assert thin(points, "figures") == {
        "step": [25, 50],
        "minutes": [0.12, 0.25],
        "loss": [None, 0.1235],
        "words": [None, 0.5],
    }
    assert thin(points, "scores") == {"step": [50], "minutes": [0.25], "caption": [0.9877]}
    assert thin(points[:1], "scores") == {}


def test_the_mean_is_over_tasks_and_over_never_drawn_pairs_apart() -> None:
    scores = thin([point(1, scores=TASKS), point(2, scores={"caption": 0.5})], "scores")

    assert mean_of_tasks(scores) == [0.625, None]
    assert mean_of_tasks(scores, pairs=True) == [0.25, None]


def test_collecting_keeps_known_figures_and_plots_are_drawn_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, into = tmp_path / "run", tmp_path / "figures.json"
    put(into, "training", "vision", value={"steps": 7})
    put(into, "ablation", value={"caption": 50.0})
    write_lines(run / "code.curve.jsonl", point(25, figures={"loss": 1.0}), point(200, scores=TASKS))

    collect(run, into)

    content = read(into)
    assert content["training"]["code"] == {"steps": 200, "num_steps": 400, "processor_s": 60.0, "minutes": 1.0}
    assert content["training"]["vision"] == {"steps": 7}
    assert content["curves"]["code"]["scores"]["caption"] == [0.5]
    assert content["ablation"] == {"caption": 50.0}
    assert main(["--redraw", "--into", str(into)]) == 0
    plot = tmp_path / "embedded-curves.png"
    assert capsys.readouterr().out.split() == [str(plot)]
    with Image.open(plot) as picture:
        assert len(picture.convert("RGB").getcolors(10**6) or []) > 20  # the plot is not empty


@pytest.mark.parametrize(
    "text",
    [
        '{"step": 1, "num_steps": 2}\n',
        '{"step": 1, "num_steps": 2, "processor_s": 1.0}\n{"ste',
        '{"step": 2, "num_steps": 2, "processor_s": 1}\n{"step": 1, "num_steps": 2, "processor_s": 1}',
        "[1]\n",
        "",
    ],
    ids=["incomplete", "torn", "descending", "no object", "empty"],
)
def test_an_invalid_curve_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "code.curve.jsonl").write_text(text)

    with pytest.raises(ValueError, match=r"code\.curve\.jsonl"):
        collect(tmp_path, tmp_path / "figures.json")


def test_without_curves_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no curves"):
        draw({}, tmp_path / "plot.png")
    with pytest.raises(SystemExit):
        main(["--run", str(tmp_path), "--into", str(tmp_path / "figures.json")])


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_holds_no_object_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "figures.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"figures\.json"):
        put(path, "scores", value=1)
    assert path.read_text() == text


def test_file_of_figures_has_one_line_per_series() -> None:
    content = {"a": {"b": [1, 2.5, None]}, "rows": [["x", 1], ["y", 2]], "none": {}, "empty": []}

    assert json.loads(as_text(content)) == content
    assert '  "b": [1, 2.5, null]\n' in as_text(content)
    assert '  ["y", 2]\n' in as_text(content)
    assert PLACE.read_text(encoding="utf-8") == as_text(read(PLACE)) + "\n"
