"""Collects the curves of a training into docs/embedded-model.json, and plots them. Trains and measures nothing.

Usage: python -m scripts.train_embedded.curves [--run FOLDER] [--into FILE] [--redraw]

Every NAME.curve.jsonl in the folder gives a curve and its row of the training table, every ablation-NAME.json what is
told of an arm of the ablation, every variant of the stage `code` its last scores; stages that the folder lacks keep
what they have. The plots stand beside the file: embedded-curves.png and embedded-ablation.png.
"""

import argparse
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
from scripts.train_embedded.results import PLACE, put, read, take

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STAGES = ("vision", "code", "slots", "reading")  # of the product, in the order of the training
ARM = "ablation-"
VARIANT = "code-"  # before the names of the code stage with one thing left out
COMPARED = ("caption", "exist", "color", "rel_yn", "count_shape")
LOSSES = ("loss", "answers")  # figures that are losses; all others are shares
MOST_POINTS = 120
MOST_LINES = 5  # shares of one stage that are told apart by name
COLORS = 128  # of a PNG
PAIRS = "pair-"  # before tasks that were asked about never-drawn pairs

Series = Mapping[str, Sequence[float | None]]  # "step", "minutes" and the values beside them
Curves = Mapping[str, Mapping[str, Series]]  # stage -> "figures" or "scores" -> series


def collect(run: Path, into: Path) -> None:
    """Put curves, the training table and what arms say of themselves into the JSON file `into`.

    Raises OSError, and ValueError for a folder without curves and for lines that are none.
    """
    paths = sorted(run.glob("*.curve.jsonl"))
    if not paths:
        raise ValueError(
            f"Wanted files named NAME.curve.jsonl in {run}, found none. Name the training's folder by --run"
        )
    for path in paths:
        name = path.name.removesuffix(".curve.jsonl")
        points = _read_points(path)
        put(into, "curves", name, value={kind: thin(points, kind) for kind in ("figures", "scores")})
        steps, num_steps, processor_s = (points[-1][key] for key in ("step", "num_steps", "processor_s"))
        told = {
            "steps": steps,
            "num_steps": num_steps,
            "processor_s": processor_s,
            "minutes": round(processor_s / 60, 1),
        }
        put(into, "training", name, value=told)
        if name.startswith(VARIANT):
            scores: dict[str, float] = next((point["scores"] for point in reversed(points) if "scores" in point), {})
            put(into, "variants", name, value=scores)
    for path in sorted(run.glob(f"{ARM}*.json")):
        known = read(into).get("ablation", {}).get(path.stem, {})
        put(into, "ablation", path.stem, value={**known, **read(path)})


def thin(points: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[float | None]]:
    """The points that have `kind`, at most 120 of them, as columns: step, minutes, and each name's values.

    A value that a point lacks, or that is no finite number, is None. The first and the last point stay.
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


def mean_of_tasks(scores: Series, *, prefix: str = "") -> list[float | None]:
    """The mean over tasks at each point, None where one is missing; with `prefix`, over tasks named so."""
    chosen = [scores[name] for name in _tasks(scores, prefix=prefix)]
    points = zip(*chosen, strict=True)
    return [None if None in values else sum(filter(None, values)) / len(values) for values in points]


def draw_stages(curves: Curves, place: Path) -> None:
    """A column for each stage of the product that has a curve: its loss, and what share it gets right."""
    from matplotlib.figure import Figure

    stages = [name for name in STAGES if name in curves]
    figure = Figure(figsize=(2.5 * len(stages) + 0.5, 5), layout="constrained")
    panels = figure.subplots(2, len(stages), sharex="col", squeeze=False, height_ratios=(2, 3))
    for stage, losses, shares in zip(stages, *panels, strict=True):
        figures = curves[stage]["figures"]
        for name in LOSSES:
            if name in figures:
                losses.plot(_minutes(figures), _numbers(figures[name]), color="black", linewidth=1.2)
        losses.set_yscale("log", nonpositive="mask")
        losses.set_title(stage, fontsize="medium")
        _draw_shares(shares, curves[stage])
        shares.set(xlabel="processor minutes", ylim=(0, 103))
        for panel in (losses, shares):
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("loss")
    panels[1][0].set_ylabel("right, %")
    _save(figure, place)


def _draw_shares(panel: "Axes", curve: Mapping[str, Series]) -> None:
    figures, scores = curve["figures"], curve["scores"]
    for name in _names(figures):
        if name not in LOSSES:
            panel.plot(_minutes(figures), _percent(figures[name]), linewidth=1.2, label=f"{name}, in training")
    names = _names(scores)
    if len(names) <= MOST_LINES:
        for name in names:
            panel.plot(_minutes(scores), _percent(scores[name]), marker=".", linewidth=1.2, label=_label(name))
    else:
        _summarise(panel, scores)
    if panel.lines:
        panel.legend(fontsize="small", loc="lower right")


def _summarise(panel: "Axes", scores: Series) -> None:
    minutes = _minutes(scores)
    for number, name in enumerate(_tasks(scores)):
        label = "each task" if number == 0 else None
        panel.plot(minutes, _percent(scores[name]), color="grey", linewidth=0.6, alpha=0.7, label=label)
    if "caption" in scores:
        panel.plot(minutes, _percent(scores["caption"]), color="#c44e52", linewidth=1.6, label="caption")
    panel.plot(minutes, _percent(mean_of_tasks(scores)), color="black", linewidth=1.6, label="mean of tasks")
    if _tasks(scores, prefix=PAIRS):
        pairs = _percent(mean_of_tasks(scores, prefix=PAIRS))
        panel.plot(minutes, pairs, color="black", linewidth=1.2, linestyle="--", label="never-drawn pairs")


def draw_arms(curves: Curves, place: Path) -> None:
    """The arms of the ablation that have scores, in six panels: the mean over tasks, and five of the tasks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.8), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    arms = [name for name in sorted(curves) if name.startswith(ARM) and curves[name]["scores"]]
    for panel, task in zip(panels.flat, ("mean of tasks", *COMPARED), strict=True):
        for arm in arms:
            scores = curves[arm]["scores"]
            values = mean_of_tasks(scores) if task == "mean of tasks" else scores.get(task)
            if values is not None:
                label = arm.removeprefix(ARM)
                panel.plot(_minutes(scores), _percent(values), marker=".", linewidth=1.4, label=label)
        panel.set_title(task, fontsize="medium")
        panel.set(xlim=(0, None), ylim=(0, 103))
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("processor minutes")
    for row in panels:
        row[0].set_ylabel("right answers, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms))
    _save(figure, place)


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what `content` has curves of into `folder`; returns the files. Raises ValueError where it has none."""
    curves = take(content, "curves")
    written = []
    if any(name in STAGES for name in curves):
        written.append(folder / "embedded-curves.png")
        draw_stages(curves, written[-1])
    if any(name.startswith(ARM) and curves[name]["scores"] for name in curves):
        written.append(folder / "embedded-ablation.png")
        draw_arms(curves, written[-1])
    return written


def _label(name: str) -> str:
    kind, _, what = name.replace("-", " ").partition(" ")
    return {"check": what, "pair": f"{what}, never drawn"}.get(kind, name)


def _save(figure: "Figure", place: Path) -> None:
    """As a PNG of few colours, which is a third of the size."""
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
            raise ValueError(
                f"Wanted JSON with step, num_steps and processor_s, steps ascending, in {path} line {number}, got "
                f"`{line[:60]}` ({error}). Take the line out"
            ) from None
    if not points:
        raise ValueError(f"Wanted a line for each point in {path}, it is empty. Take it away, or train the stage")
    return points


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _names(series: Series) -> list[str]:
    return [name for name in series if name not in ("step", "minutes")]


def _tasks(series: Series, *, prefix: str = "") -> list[str]:
    names = _names(series)
    return (
        [name for name in names if name.startswith(prefix)] if prefix else [n for n in names if not n.startswith(PAIRS)]
    )


def _minutes(series: Series) -> list[float]:
    return _numbers(series["minutes"])


def _percent(values: Sequence[float | None]) -> list[float]:
    return [100 * value for value in _numbers(values)]


def _numbers(values: Sequence[float | None]) -> list[float]:
    """Gaps as NaN, which plots leave out."""
    return [math.nan if value is None else value for value in values]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: the names of the plots on stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.train_embedded.curves", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument(
        "--run",
        type=Path,
        default=Path(".work/embedded/run"),
        help="where the training left its curves (default: %(default)s)",
    )
    parser.add_argument("--into", type=Path, default=PLACE, help="the file of figures (default: %(default)s)")
    parser.add_argument("--redraw", action="store_true", help="collect nothing, draw what the file has")
    options = parser.parse_args(arguments)
    try:
        import matplotlib.figure  # noqa: F401

        if not options.redraw:
            collect(options.run, options.into)
        for path in draw(read(options.into), options.into.parent):
            print(path)
    except ImportError as error:
        parser.error(f"Plots need matplotlib, and it cannot be imported: {error}. pip install --editable '.[bench]'")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
