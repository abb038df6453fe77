"""Shows a calibration as text, and as a reliability diagram with matplotlib."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llama_adapter.app.captioning.decisions.calibration import Calibration
from llama_adapter.app.captioning.decisions.measures import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Bin,
    Metrics,
    Threshold,
)
from llama_adapter.app.learning.scores.intervals import wilson_interval
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
    """The promise as a headline, then the measures, the threshold, notes and mistakes as text."""
    found = calibration
    unreadable = f", {found.num_unreadable} could not be answered" if found.num_unreadable else ""
    lines = [
        headline(found),
        "",
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
    more = [] if found.threshold is None else [_figures(found, found.threshold)]
    if found.threshold is not None and found.held_out_precision is not None and not found.is_promised:
        more.append(f"cross-validated precision of the threshold: {found.held_out_precision:.1%}")
    more += [f"note: {note}" for note in _notes(found)]
    lines += ["", *more] if more else []
    if mistakes:
        lines += ["", f"answers that differ from their labels: {len(mistakes)}, the most confident first:"]
        for one in mistakes[:_NUM_MISTAKES]:
            place = f"line {one.line}, " if one.line else ""  # pictures in folders have no line
            lines.append(f"  {place}{one.picture}: {one.answer} ({one.probability:.2f}), labelled {one.label}")
    return "\n".join(lines)


def _row(name: str, metrics: Metrics) -> str:
    return f"{name:<34} {metrics.nll:>8.4f} {metrics.brier:>8.4f} {metrics.ece:>8.4f}"


def headline(found: Calibration) -> str:
    """What holds for new pictures, in a sentence: the promised bound, and how many pictures reach the threshold."""
    target, threshold, promise = _share(found.target_precision), found.threshold, found.promise
    if threshold is None:
        best = "" if found.best is None else f"; the best: {_figures(found, found.best)}"
        return f"{_what(found)} reaches no precision of {target} on these examples{best}"
    on_these = f"{_share(threshold.precision)} on these examples"
    if promise is None:
        return f"{_what(found)} has {on_these}; nothing is promised for other pictures"
    low, high, taken = promise.taken_low, promise.taken_high, threshold.count / found.num_examples
    if len(found.choices) == 2:
        among = f"answers {_what(found)}"
        share = f"given to {_percent(taken)} % ({_percent(low)} to {_percent(high)} %) of the pictures"
    else:
        among = "answered"
        share = f"abstains on {_percent(1 - taken)} % ({_percent(1 - high)} to {_percent(1 - low)} %)"
    bound = (
        f"at least {_share(math.floor(promise.bound * 1000 + 1e-9) / 1000)} right among the {among} "
        f"({_percent(promise.confidence)} % confidence; {on_these}), {share}"
    )
    if found.is_promised:
        return bound
    needed = ""
    if promise.num_needed is not None:
        needed = f" (about {_rounded(promise.num_needed):,} would do with the same share of errors)"
    return f"{found.num_examples} examples are too few to promise {target}{needed}; they promise: {bound}"


def _figures(found: Calibration, threshold: Threshold) -> str:
    return (
        f"{_what(found)} from {threshold.threshold:.4f} on has {threshold.precision:.1%}, "
        f"recall {f'{threshold.recall:.1%}' if threshold.num_right else '-'}, "
        f"{threshold.count} of {found.num_examples} examples"
    )


def _share(share: float) -> str:
    return f"{share * 100:.1f} %"


def _percent(share: float) -> str:
    return f"{share * 100:.0f}"


def _rounded(number: int) -> int:
    """A number with two significant digits, rounded up."""
    unit: int = 10 ** max(len(str(number)) - 2, 0)
    return -(-number // unit) * unit


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
    if found.promise is not None and found.promise.num_pictures < found.num_examples:
        notes.append(
            f"the bound takes the {found.num_examples} examples as independent, and they are about "
            f"{found.promise.num_pictures} pictures: it is too high if the answers about a picture are right together"
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
    shares = [one.accuracy or 0.0 for one in bins]
    ends = [wilson_interval(round(share * one.count), one.count) for share, one in zip(shares, bins, strict=True)]
    pairs = list(zip(shares, ends, strict=True))
    return [max(0.0, share - low) for share, (low, _) in pairs], [max(0.0, high - share) for share, (_, high) in pairs]


def _middle(one: Bin) -> float:
    return (one.low + one.high) / 2
