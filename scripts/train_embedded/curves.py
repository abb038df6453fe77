"""Plots the curves of a training: `python -m scripts.train_embedded.curves .work/embedded/run FILE.png`.

Each stage with a NAME.curve.jsonl gets a column: its loss, and its shares of right answers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import parser_of

STAGES = ("vision", "code", "wording", "slots", "reading")  # in training order
LOSSES = ("loss", "answers")  # figures that are losses; all others are shares
MOST_LABELLED = 5  # scores; of more, there is the mean
PAIRS = "pair-"  # prefix of tasks about never-drawn pairs

Point = Mapping[str, Any]


def read(run: Path) -> dict[str, list[Point]]:
    """The points of each stage. Raises ValueError without any."""
    files = {stage: run / f"{stage}.curve.jsonl" for stage in STAGES}
    found = {
        stage: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for stage, file in files.items()
        if file.is_file()
    }
    if not found:
        raise ValueError(f"no NAME.curve.jsonl in {run}: name the folder of a training")
    return found


def draw(stages: Mapping[str, Sequence[Point]], place: Path) -> None:
    """Draw the plot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 * len(stages) + 0.5, 5), layout="constrained")
    panels = figure.subplots(2, len(stages), sharex="col", squeeze=False, height_ratios=(2, 3))
    for (stage, points), losses, shares in zip(stages.items(), *panels, strict=True):
        for name, (minutes, values) in lines(points, "figures").items():
            if name in LOSSES:
                losses.plot(minutes, values, color="black")
            else:
                shares.plot(minutes, values, label=f"{name}, in training")
        scores = lines(points, "scores")
        is_few = len(scores) <= MOST_LABELLED
        for name, (minutes, values) in scores.items():
            shares.plot(minutes, values, label=name) if is_few else shares.plot(minutes, values, color="silver")
        if not is_few:
            shares.plot(*mean_of_tasks(points), color="black", label="mean of tasks")
            shares.plot(*mean_of_tasks(points, pairs=True), color="black", linestyle="--", label="never-drawn pairs")
        losses.set_yscale("log", nonpositive="mask")
        losses.set_title(stage)
        shares.set(xlabel="processor minutes", ylim=(0, 1.03))
        if shares.lines:
            shares.legend(fontsize="small", loc="lower right")
    panels[0][0].set_ylabel("loss")
    panels[1][0].set_ylabel("share of right answers")
    figure.savefig(place, dpi=110)


def lines(points: Sequence[Point], kind: str) -> dict[str, tuple[list[float], list[float]]]:
    """Minutes and values of each name among the "figures" or "scores"."""
    having = [point for point in points if kind in point]
    names = dict.fromkeys(name for point in having for name in point[kind])
    return {
        name: (
            [point["processor_s"] / 60 for point in having if name in point[kind]],
            [point[kind][name] for point in having if name in point[kind]],
        )
        for name in names
    }


def mean_of_tasks(points: Sequence[Point], *, pairs: bool = False) -> tuple[list[float], list[float]]:
    """Minutes, and the mean over the tasks at each; with `pairs`, over the tasks of never-drawn pairs."""
    minutes, means = [], []
    for point in points:
        values = [value for name, value in point.get("scores", {}).items() if name.startswith(PAIRS) == pairs]
        if values:
            minutes.append(point["processor_s"] / 60)
            means.append(sum(values) / len(values))
    return minutes, means


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="the folder of a training")
    parser.add_argument("file", type=Path, help="the picture to write")
    options = parser.parse_args()
    try:
        draw(read(options.run), options.file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
