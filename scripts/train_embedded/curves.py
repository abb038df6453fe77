"""The curves of a training: collected for docs/embedded-model.json, and plotted as docs/embedded-curves.png.

Usage: python -m scripts.train_embedded.curves [FOLDER]

FOLDER has embedded-model.json (default: docs).
"""

import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from llama_adapter.runtime.atomic_write import atomic_write
from scripts.common import DOCS
from scripts.pages.render import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = ("vision", "code", "wording", "slots", "reading")  # stages of the product, in training order
LOSSES = ("loss", "answers")  # figures that are losses; all others are shares
MOST_POINTS = 120
MOST_LINES = 5  # labelled lines in a plot
COLORS = 128  # number of colours in the PNG
PAIRS = "pair-"  # prefix of tasks about never-drawn pairs

Series = Mapping[str, Sequence[float | None]]  # "step", "minutes", and a column for each name
Curves = Mapping[str, Mapping[str, Series]]  # stage -> "figures" or "scores" -> series


def collect(run: Path) -> dict[str, dict[str, Any]]:
    """The `curves` of a training and the rows of its table, `stages`, by stage. Raises ValueError without curves."""
    found: dict[str, dict[str, Any]] = {"stages": {}, "curves": {}}
    for path in sorted(run.glob("*.curve.jsonl")):
        name = path.name.removesuffix(".curve.jsonl")
        points = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        last = points[-1]
        found["curves"][name] = {kind: thin(points, kind) for kind in ("figures", "scores")}
        found["stages"][name] = {
            "steps": last["step"],
            "num_steps": last["num_steps"],
            "processor_s": last["processor_s"],
            "minutes": round(last["processor_s"] / 60, 1),
        }
    if not found["curves"]:
        raise ValueError(f"no NAME.curve.jsonl in {run}: give the training's folder with --run")
    return found


def thin(points: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[float | None]]:
    """At most 120 of the points that have `kind`, as columns: step, minutes, and the values of each name.

    A value that is missing or not finite is None. The first and the last point are always kept.
    """
    having = [point for point in points if kind in point]
    if not having:
        return {}
    places = np.unique(np.linspace(0, len(having) - 1, min(len(having), MOST_POINTS)).round().astype(int))
    kept = [having[place] for place in places]
    names = list(dict.fromkeys(name for point in having for name in point[kind]))
    return {
        "step": [point["step"] for point in kept],
        "minutes": [round(point["processor_s"] / 60, 2) for point in kept],
        **{name: [_rounded(point[kind].get(name)) for point in kept] for name in names},
    }


def mean_of_tasks(scores: Series, *, pairs: bool = False) -> list[float | None]:
    """The mean over tasks at each point, None if a task has no value; with `pairs`, over tasks of never-drawn pairs."""
    points = zip(*(scores[name] for name in _tasks(scores, pairs=pairs)), strict=True)
    return [None if None in values else sum(filter(None, values)) / len(values) for values in points]


def draw(curves: Curves, place: Path) -> None:
    """Draw a column for each stage with a curve: its loss, and its shares of right answers."""
    from matplotlib.figure import Figure

    curves = {name: curves[name] for name in STAGES if name in curves}
    figure = Figure(figsize=(2.5 * len(curves) + 0.5, 5), layout="constrained")
    panels = figure.subplots(2, len(curves), sharex="col", squeeze=False, height_ratios=(2, 3))
    for stage, losses, shares in zip(curves, *panels, strict=True):
        figures = curves[stage]["figures"]
        for name in LOSSES:
            if name in figures:
                losses.plot(_numbers(figures["minutes"]), _numbers(figures[name]), color="black", linewidth=1.2)
        losses.set_yscale("log", nonpositive="mask")
        losses.set_title(stage, fontsize="medium")
        _draw_shares(shares, figures, curves[stage]["scores"])
        shares.set(xlabel="processor minutes", ylim=(0, 103))
        for panel in (losses, shares):
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("loss")
    panels[1][0].set_ylabel("right, %")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    with atomic_write(place) as file:  # few colours reduce the file to a third of its size
        Image.open(buffer).convert("RGB").quantize(COLORS).save(file, format="png", optimize=True)


def _draw_shares(panel: "Axes", figures: Series, scores: Series) -> None:
    for name in _names(figures):
        if name not in LOSSES:
            _line(panel, figures, figures[name], linewidth=1.2, label=f"{name}, in training")
    if len(_names(scores)) <= MOST_LINES:
        for name in _names(scores):
            _line(panel, scores, scores[name], marker=".", linewidth=1.2, label=_label(name))
    else:
        for number, name in enumerate(_tasks(scores)):
            label = "each task" if number == 0 else None
            _line(panel, scores, scores[name], color="grey", linewidth=0.6, alpha=0.7, label=label)
        if "caption" in scores:
            _line(panel, scores, scores["caption"], color="#c44e52", linewidth=1.6, label="caption")
        _line(panel, scores, mean_of_tasks(scores), color="black", linewidth=1.6, label="mean of tasks")
        if _tasks(scores, pairs=True):
            means = mean_of_tasks(scores, pairs=True)
            _line(panel, scores, means, color="black", linewidth=1.2, linestyle="--", label="never-drawn pairs")
    if panel.lines:
        panel.legend(fontsize="small", loc="lower right")


def _line(panel: "Axes", series: Series, shares: Sequence[float | None], **style: Any) -> None:
    panel.plot(_numbers(series["minutes"]), [100 * share for share in _numbers(shares)], **style)


def _label(name: str) -> str:
    kind, _, what = name.replace("-", " ").partition(" ")
    return {"check": what, "pair": f"{what}, never drawn"}.get(kind, name)


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _names(series: Series) -> list[str]:
    return [name for name in series if name not in ("step", "minutes")]


def _tasks(series: Series, *, pairs: bool = False) -> list[str]:
    return [name for name in _names(series) if name.startswith(PAIRS) == pairs]


def _numbers(values: Sequence[float | None]) -> list[float]:
    """Gaps as NaN, which plots skip."""
    return [math.nan if value is None else value for value in values]


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    draw(read("embedded-model", place)["training"]["curves"], place / "embedded-curves.png")
