"""A calibration as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from llama_adapter.app.calibration.file import Calibration
from llama_adapter.app.calibration.measures import MAX_TEMPERATURE, MIN_TEMPERATURE, Metrics, Threshold

_FEW_EXAMPLES = 100
_NUM_MISTAKES = 5  # shown at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """An answer that differs from its label."""

    picture: str
    answer: str
    label: str
    probability: float  # calibrated
    line: int  # of the table


def format_calibration(calibration: Calibration, *, mistakes: Sequence[Mistake] = ()) -> str:
    """The measures, the threshold, notes and mistakes."""
    found = calibration
    unreadable = f", {found.num_unreadable} could not be answered" if found.num_unreadable else ""
    lines = [
        f"{found.question or 'several questions'} ({', '.join(found.choices)})",
        f"{found.num_examples} labelled examples{unreadable}; {found.before.accuracy:.1%} right; "
        f"temperature {found.temperature:.3f}",
        "",
        f"{'':<34} {'NLL':>8} {'Brier':>8} {'ECE':>8}",
        _row("before", found.before),
        _row("after", found.after),
    ]
    if found.held_out is not None:
        lines.append(_row("after, cross-validated", found.held_out))
    lines += ["", *_threshold_lines(found), *(f"note: {note}" for note in _notes(found))]
    if mistakes:
        lines += ["", f"{len(mistakes)} answers differ from their labels, the most confident first:"]
        for one in mistakes[:_NUM_MISTAKES]:
            lines.append(
                f"  line {one.line}, {one.picture}: {one.answer} ({one.probability:.2f}), labelled {one.label}"
            )
    return "\n".join(lines)


def _row(name: str, metrics: Metrics) -> str:
    return f"{name:<34} {metrics.nll:>8.4f} {metrics.brier:>8.4f} {metrics.ece:>8.4f}"


def _threshold_lines(found: Calibration) -> list[str]:
    target = f"precision of {found.target_precision:.1%}"
    if found.threshold is None:
        best = "" if found.best is None else f"; the best is {_figures(found, found.best)}"
        return [f"{_what(found)} reaches no {target} on these examples{best}"]
    lines = [f"for a {target}: {_figures(found, found.threshold)}"]
    if found.held_out_precision is not None:
        lines.append(f"cross-validated precision of the threshold: {found.held_out_precision:.1%}")
    return lines


def _figures(found: Calibration, threshold: Threshold) -> str:
    return (
        f"{_what(found)} from {threshold.threshold:.4f} on has {threshold.precision:.1%} "
        f"(at least {threshold.precision_low:.1%} with 95 % confidence), recall {threshold.recall:.1%}, "
        f"{threshold.count} of {found.num_examples} pictures"
    )


def _what(found: Calibration) -> str:
    return f"“{found.choices[0]}”" if len(found.choices) == 2 else "the likeliest choice"


def _notes(found: Calibration) -> list[str]:
    notes = []
    if found.before.accuracy == 1.0:
        notes.append("every answer is right, which determines no temperature: it stays 1")
    elif found.temperature in (MIN_TEMPERATURE, MAX_TEMPERATURE):
        notes.append(
            f"the temperature is at its limit, {found.temperature:g}: the probabilities carry little information"
        )
    if found.num_examples < _FEW_EXAMPLES:
        notes.append(f"{found.num_examples} examples are few: the figures are imprecise")
    return notes
