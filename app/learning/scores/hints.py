"""A recommendation that follows from metrics, as a sentence."""

from collections.abc import Mapping
from typing import Final

from llama_adapter.app.learning.scores.intervals import Figure

# Two normal distributions with equal variances have a ROC-AUC of A = Φ(d / √2), and the best threshold between them
# has a balanced accuracy of Φ(d / 2). The difference is at most 0.084. If it is greater, the threshold is bad.
LEAST_GAP: Final = 0.15


def threshold_hint(figures: Mapping[str, Figure], *, num_classes: int) -> str | None:
    """A sentence that recommends calibration, if another threshold between two choices would be right much more often.

    This is the case if the ROC-AUC exceeds the balanced accuracy by `LEAST_GAP` or more. With more than two choices, a
    calibration does not change the most probable choice, so the result is None.
    """
    area, share = (figures[name].value if name in figures else None for name in ("ROC-AUC", "balanced accuracy"))
    if num_classes != 2 or area is None or share is None or area - share < LEAST_GAP:
        return None
    return (
        f"The balanced accuracy is {share:.1%}, and a ROC-AUC of {area:.3f} says that another threshold between the "
        "two choices would be right more often. `llama-adapter ask --calibrate` finds it with labelled pictures that "
        "were not learned: see docs/choices.md."
    )
