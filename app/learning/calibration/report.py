"""Shows a calibration as text, and as a reliability diagram with matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass

from llama_adapter.app.captioning.decisions.calibration import Calibration
from llama_adapter.app.captioning.decisions.measures import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Bin,
    Metrics,
    Threshold,
    wilson_low,
)
from llama_adapter.runtime.partial import named_after

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
    """The measures, the threshold, notes and mistakes as text."""
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
            place = f"line {one.line}, " if one.line else ""  # pictures in folders have no line
            lines.append(f"  {place}{one.picture}: {one.answer} ({one.probability:.2f}), labelled {one.label}")
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


def write_plot(calibration: Calibration, place: str) -> None:
    """Draw accuracy by confidence, before and after calibration, with the counts below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, height_ratios=(3, 1))
    sides = (
        ("before", calibration.bins_before, calibration.before),
        (f"after, temperature {calibration.temperature:.3g}", calibration.bins_after, calibration.after),
    )
    most = max((one.count for one in (*calibration.bins_before, *calibration.bins_after)), default=1)
    for (upper, lower), (title, bins, metrics) in zip(zip(*panels, strict=True), sides, strict=True):
        filled = [one for one in bins if one.count]
        upper.plot((0, 1), (0, 1), color="grey", linewidth=0.8, linestyle="--", label="perfect calibration")
        upper.bar(
            [_middle(one) for one in filled],
            [one.accuracy for one in filled],
            width=[one.high - one.low for one in filled],
            color="#4c72b0",
            edgecolor="white",
            label="share right",
        )
        upper.errorbar(
            [one.confidence or 0.0 for one in filled],
            [one.accuracy or 0.0 for one in filled],
            yerr=_spreads(filled),
            color="#c44e52",
            fmt="o",
            markersize=4,
            linewidth=1,
            clip_on=False,
            label="at the bin's mean, 95 % interval",
        )
        upper.set(title=f"{title}\nECE {metrics.ece:.3f}, NLL {metrics.nll:.3f}, Brier {metrics.brier:.3f}")
        upper.set(xlim=(0, 1), ylim=(0, 1.03), ylabel="share right")
        upper.legend(fontsize="small", loc="upper left")
        lower.bar(
            [_middle(one) for one in bins],
            [one.count for one in bins],
            width=[one.high - one.low for one in bins],
            color="#8c8c8c",
            edgecolor="white",
        )
        lower.set_yscale("symlog", linthresh=1)
        lower.yaxis.set_major_formatter("{x:g}")
        lower.set(xlabel="probability of the likeliest choice", ylabel="examples", ylim=(0, most * 2))
    question = calibration.question or "several questions"
    figure.suptitle(
        f"{question[:80]} ({', '.join(calibration.choices)[:60]}); {calibration.num_examples} labelled examples, "
        f"{calibration.before.accuracy:.1%} right",
        fontsize="medium",
        parse_math=False,  # a question may contain dollar signs
    )
    with named_after(place):
        figure.savefig(place, dpi=120)


def _spreads(bins: Sequence[Bin]) -> tuple[list[float], list[float]]:
    """Distances from the observed share to both ends of Wilson's interval."""
    below, above = [], []
    for one in bins:
        share = one.accuracy or 0.0
        num_right = round(share * one.count)
        below.append(max(0.0, share - wilson_low(num_right, one.count)))
        above.append(max(0.0, 1.0 - wilson_low(one.count - num_right, one.count) - share))
    return below, above


def _middle(one: Bin) -> float:
    return (one.low + one.high) / 2
