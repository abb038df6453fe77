"""Collects the curves of a training in docs/embedded-model.json, and plots them beside it.

Usage: python -m scripts.train_embedded.curves [--run FOLDER] [--into FILE] [--redraw]

Each NAME.curve.jsonl in the folder gives a curve and a row of the training table, each ablation-NAME.json the
description of an arm, and each variant of the stage `code` its last scores. Stages missing in the folder stay as they
are. The plots are embedded-curves.png and embedded-ablation.png.
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
from scripts.common import parser_of
from scripts.train_embedded.results import PLACE, put, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = ("vision", "code", "slots", "reading")  # of the product, in the order of training
ARM = "ablation-"
VARIANT = "code-"  # prefix of the code stage with one thing left out
COMPARED = ("caption", "exist", "color", "rel_yn", "count_shape")
LOSSES = ("loss", "answers")  # figures that are losses; all others are shares
MOST_POINTS = 120
MOST_LINES = 5  # labelled lines in a plot
COLORS = 128  # of a PNG
PAIRS = "pair-"  # prefix of tasks about never-drawn pairs

Series = Mapping[str, Sequence[float | None]]  # "step", "minutes", and a column for each name
Curves = Mapping[str, Mapping[str, Series]]  # stage -> "figures" or "scores" -> series


def collect(run: Path, into: Path) -> None:
    """Put curves, the training table and descriptions of arms into the JSON file `into`.

    Raises OSError, and ValueError for a folder without curves and for invalid lines.
    """
    paths = sorted(run.glob("*.curve.jsonl"))
    if not paths:
        raise ValueError(f"no NAME.curve.jsonl in {run}: give the training's folder with --run")
    for path in paths:
        name = path.name.removesuffix(".curve.jsonl")
        points = _read_points(path)
        put(into, "curves", name, value={kind: thin(points, kind) for kind in ("figures", "scores")})
        last = {key: points[-1][key] for key in ("step", "num_steps", "processor_s")}
        training = {"steps": last.pop("step"), **last, "minutes": round(last["processor_s"] / 60, 1)}
        put(into, "training", name, value=training)
        if name.startswith(VARIANT):
            scores: dict[str, float] = next((point["scores"] for point in reversed(points) if "scores" in point), {})
            put(into, "variants", name, value=scores)
    for path in sorted(run.glob(f"{ARM}*.json")):
        known = read(into).get("ablation", {}).get(path.stem, {})
        put(into, "ablation", path.stem, value={**known, **read(path)})


def thin(points: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[float | None]]:
    """At most 120 of the points that have `kind`, as columns: step, minutes, and the values of each name.

    A value that is missing or not finite is None. The first and the last point stay.
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
    """The mean over tasks at each point, None where one is missing; with `pairs` over those of never-drawn pairs."""
    points = zip(*(scores[name] for name in _tasks(scores, pairs=pairs)), strict=True)
    return [None if None in values else sum(filter(None, values)) / len(values) for values in points]


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the curves of `content` into `folder`; returns the files. Raises ValueError if there are none."""
    curves: Curves = content.get("curves", {})
    plots = {
        "embedded-curves.png": (draw_stages, [name for name in STAGES if name in curves]),
        "embedded-ablation.png": (
            draw_arms,
            [name for name in sorted(curves) if name.startswith(ARM) and curves[name]["scores"]],
        ),
    }
    written = []
    for file, (draw_plot, names) in plots.items():
        if names:
            draw_plot({name: curves[name] for name in names}, folder / file)
            written.append(folder / file)
    if not written:
        raise ValueError("there are no curves: collect those of a training first")
    return written


def draw_stages(curves: Curves, place: Path) -> None:
    """A column for each stage: its loss, and the shares it gets right."""
    from matplotlib.figure import Figure

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
    _save(figure, place)


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


def draw_arms(curves: Curves, place: Path) -> None:
    """The arms of the ablation in six panels: the mean over tasks, and five of the tasks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.8), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for panel, task in zip(panels.flat, ("mean of tasks", *COMPARED), strict=True):
        for arm, curve in curves.items():
            scores = curve["scores"]
            values = mean_of_tasks(scores) if task == "mean of tasks" else scores.get(task)
            if values is not None:
                _line(panel, scores, values, marker=".", linewidth=1.4, label=arm.removeprefix(ARM))
        panel.set_title(task, fontsize="medium")
        panel.set(xlim=(0, None), ylim=(0, 103))
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("processor minutes")
    for row in panels:
        row[0].set_ylabel("right answers, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(curves))
    _save(figure, place)


def _line(panel: "Axes", series: Series, shares: Sequence[float | None], **style: Any) -> None:
    panel.plot(_numbers(series["minutes"]), [100 * share for share in _numbers(shares)], **style)


def _label(name: str) -> str:
    kind, _, what = name.replace("-", " ").partition(" ")
    return {"check": what, "pair": f"{what}, never drawn"}.get(kind, name)


def _save(figure: "Figure", place: Path) -> None:
    """Write a PNG of few colours, which is a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    with atomic_write(place) as file:
        Image.open(buffer).convert("RGB").quantize(COLORS).save(file, format="png", optimize=True)


def _read_points(path: Path) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            point = json.loads(line)
            if points and point["step"] < points[-1]["step"]:
                raise ValueError(f"step {point['step']} comes after step {points[-1]['step']}")
            points.append({key: point[key] for key in ("step", "num_steps", "processor_s")} | point)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"invalid point in {path} line {number}: `{line[:60]}` ({error})") from None
    if not points:
        raise ValueError(f"{path} is empty")
    return points


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _names(series: Series) -> list[str]:
    return [name for name in series if name not in ("step", "minutes")]


def _tasks(series: Series, *, pairs: bool = False) -> list[str]:
    return [name for name in _names(series) if name.startswith(PAIRS) == pairs]


def _numbers(values: Sequence[float | None]) -> list[float]:
    """Gaps as NaN, which plots leave out."""
    return [math.nan if value is None else value for value in values]


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect and draw; the names of the plots go to stdout."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", type=Path, default=Path(".work/embedded/run"), help="folder of the curves (default: %(default)s)"
    )
    parser.add_argument("--into", type=Path, default=PLACE, help="file of the figures (default: %(default)s)")
    parser.add_argument("--redraw", action="store_true", help="collect nothing, draw the known curves")
    options = parser.parse_args(arguments)
    try:
        if not options.redraw:
            collect(options.run, options.into)
        for path in draw(read(options.into), options.into.parent):
            print(path)
    except ImportError as error:
        parser.error(f"plots need matplotlib ({error}): pip install --editable '.[bench]'")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
