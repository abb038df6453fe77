"""Draws docs/own-pictures.png: accuracy by the number of learned pictures, of the adapter and of the best baseline.

Usage: python -m scripts.own_pictures.curves [FOLDER]

FOLDER has own-pictures.json (default: docs).
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.common import DOCS
from scripts.pages.render import read


def draw(examples: Mapping[str, Any], path: Path) -> None:
    """Draw the part `examples` of the page's figures, one panel for each set."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["set"] for row in examples["rows"]))
    figure = Figure(figsize=(3.2 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        rows = sorted((row for row in examples["rows"] if row["set"] == name), key=lambda row: row["per_class"])
        counts = [row["per_class"] for row in rows]
        for label, style, values in (
            ("LLaMA-Adapter", "C0o-", [row["choices"]["value"] for row in rows]),
            ("best baseline", "C1s--", [max(row["baselines"].values()) for row in rows]),
        ):
            axes.plot(counts, [100 * value for value in values], style, label=label)
        axes.set(title=name, xscale="log", xlabel="learned pictures of a class", ylim=(0, 102))
        axes.set_xticks(counts, labels=list(map(str, counts)), minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out accuracy, %")
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    draw(read("own-pictures", folder)["examples"], folder / "own-pictures.png")
