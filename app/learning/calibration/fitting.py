"""Fits a calibration to labelled examples."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llama_adapter.app.captioning.decisions.calibration import Calibration
from llama_adapter.app.captioning.decisions.measures import (
    Floats,
    Ints,
    apply_temperature,
    best_precision,
    cross_fitted,
    find_threshold,
    fit_temperature,
    folds,
    measure,
    reliability,
)
from llama_adapter.app.learning.calibration.promising import choose


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Answered labelled pictures: N of them, with C choices."""

    probabilities_NC: Floats
    labels_N: Ints  # indices of the right choices
    groups_N: Ints  # equal for questions about the same picture


def calibrate(
    examples: Examples,
    *,
    choices: tuple[str, ...],
    question: str | None,
    model_digest: str,
    target_precision: float,
    num_unreadable: int = 0,
) -> Calibration:
    """Fit a temperature, choose the threshold, and measure both. Raises ValueError without examples.

    The threshold promises the target precision for new pictures if the examples suffice for that (see `promising`).
    Otherwise it is the one of highest recall with that precision on the examples.
    """
    raw_NC, labels_N = examples.probabilities_NC, examples.labels_N
    temperature = fit_temperature(raw_NC, labels_N)
    scaled_NC = apply_temperature(raw_NC, temperature)
    held_out_NC = cross_fitted(raw_NC, labels_N, examples.groups_N)
    scores_N, is_right_N = _decisive(scaled_NC, labels_N)
    is_likely_N = scaled_NC.argmax(axis=1) == 0 if len(choices) == 2 else np.ones(len(labels_N), dtype=bool)
    threshold, promise = choose(
        scores_N,
        is_right_N,
        target_precision=target_precision,
        num_likely=int(is_likely_N.sum()),
        num_pictures=len(np.unique(examples.groups_N)),
    )
    return Calibration(
        question=question,
        choices=choices,
        model_digest=model_digest,
        temperature=temperature,
        target_precision=target_precision,
        threshold=threshold,
        held_out_precision=_held_out_precision(examples, target_precision),
        best=best_precision(scores_N, is_right_N),
        num_examples=len(labels_N),
        num_unreadable=num_unreadable,
        before=measure(raw_NC, labels_N),
        after=measure(scaled_NC, labels_N),
        held_out=None if held_out_NC is None else measure(held_out_NC, labels_N),
        bins_before=reliability(raw_NC, labels_N),
        bins_after=reliability(scaled_NC, labels_N),
        promise=promise,
    )


def _decisive(probabilities_NC: Floats, labels_N: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """The probability that thresholds apply to (first of two, else most likely), and whether that choice is right."""
    if probabilities_NC.shape[1] == 2:
        return probabilities_NC[:, 0], labels_N == 0
    return probabilities_NC.max(axis=1), probabilities_NC.argmax(axis=1) == labels_N


def _held_out_precision(examples: Examples, target_precision: float) -> float | None:
    """The cross-validated precision of thresholds with this precision on the examples that they were found on."""
    num_taken = num_right = 0
    for held_N in folds(examples.groups_N):
        temperature = fit_temperature(examples.probabilities_NC[~held_N], examples.labels_N[~held_N])
        scores_N, is_right_N = _decisive(apply_temperature(examples.probabilities_NC, temperature), examples.labels_N)
        threshold = find_threshold(scores_N[~held_N], is_right_N[~held_N], precision=target_precision)
        if threshold is not None:
            is_taken = scores_N[held_N] >= threshold.threshold
            num_taken += int(is_taken.sum())
            num_right += int(is_right_N[held_N][is_taken].sum())
    return num_right / num_taken if num_taken else None
