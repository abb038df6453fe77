"""Draws docs/training-proofs.png: scores of the trainings on scans by step, and losses in float32 and bfloat16.

Usage: python -m scripts.training_proofs.curves
"""

import itertools
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from scripts.common import DOCS
from scripts.pages.render import read


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """Draw the parts `digits` and `precision` of the page's figures, if they were measured."""
    from matplotlib.figure import Figure

    precision = figures.get("precision", {})
    figure = Figure(figsize=(11, 4), layout="constrained")
    scores, losses = figure.subplots(1, 2)
    rows = figures.get("digits", {}).get("rows", ())
    longest = {(row["answers"], row["per_digit"], row["sets"]): row for row in sorted(rows, key=itemgetter("length"))}
    sizes = sorted({row["per_digit"] for row in rows}, reverse=True)
    styles = dict(zip(sizes, itertools.cycle(("-", "--", ":"))))
    colors = {sets: f"C{number}" for number, sets in enumerate(sorted({row["sets"] for row in rows}))}
    for row in longest.values():
        label = f"{row['answers']}, {row['per_digit']} a digit, {row['sets']}"
        points = [(point["step"], 100 * point["validation_score"]) for point in row["curve"]]
        style = "-." if row["answers"] == "words" else styles[row["per_digit"]]
        scores.plot(*zip(*points, strict=True), label=label, color=colors[row["sets"]], linestyle=style)
    scores.set_title("scans of digits")
    scores.set_ylabel("right in the validation part, %")
    for row in precision.get("rows", ()):
        points = [(point["step"], point["validation_loss"]) for point in row["curve"]]
        losses.plot(*zip(*points, strict=True), label=row["dtype"])
    losses.set_title(f"new question: {precision.get('task', '')}")
    losses.set_ylabel("validation loss a token")
    if precision:
        losses.set_yscale("log")
    for axes in (scores, losses):
        axes.set_xlabel("step")
        if axes.lines:
            axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(read("training-proofs"), DOCS / "training-proofs.png")
