"""A reliability diagram, by matplotlib."""

from collections.abc import Sequence

from llama_adapter.app.calibration.file import Calibration
from llama_adapter.app.calibration.measures import Bin, wilson_low


def write_plot(calibration: Calibration, place: str) -> None:
    """Accuracy by confidence, before and after calibration, with the counts below."""
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
        parse_math=False,  # a question may hold dollar signs
    )
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
