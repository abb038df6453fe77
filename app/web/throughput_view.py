"""Runs as HTML: facts of the last one, bars by requests in flight, a table. Figures, nothing of users. No Gradio."""

from collections.abc import Iterable, Sequence
from typing import Final

from llama_adapter.app.captioning.stage_clock import STAGES
from llama_adapter.app.measuring.report import numbers
from llama_adapter.app.measuring.throughput import RunFigures, to_compare
from llama_adapter.app.web.archive import counted
from llama_adapter.app.web.batch_view import rate
from llama_adapter.app.web.escaping import escaped

# Told apart by people with any colour vision, on light and on dark.
_COLOURS: Final = {
    "read": "#8a94a6",
    "clip": "#0072b2",
    "pre": "#56b4e9",
    "forward": "#e69f00",
    "post": "#009e73",
    "decode": "#cc79a7",
    "write": "#6b5b4b",
}
_MEANINGS: Final = {
    "read": "reading and resizing pictures, in threads of their own beside the engine",
    "clip": "encoding pictures",
    "pre": "projecting the encoding to the decoder's layers",
    "forward": "the decoder's steps",
    "post": "choosing tokens",
    "decode": "turning tokens into text",
    "write": "handing answers out",
}
_MAX_TABLE_ROWS: Final = 30


def report(runs: Sequence[RunFigures]) -> str:
    """Everything about the runs, oldest first as they are kept; the empty state where there are none."""
    if not runs:
        return (
            '<div class="la-plots"><div class="la-batch-empty"><strong>Nothing measured yet</strong>'
            "Press Measure, or run a batch: each run gives its stage times and pictures/s here.</div></div>"
        )
    compared = to_compare(runs)
    plots = f"{_rates(compared)}{_stages(compared)}" if compared else ""
    return f'<div class="la-plots">{_last(runs[-1])}{plots}{_table(runs)}</div>'


def sentence_of(run: RunFigures) -> str:
    """What bounds a run, for people."""
    if run.bound_by is None or not run.num_pictures:
        return "No picture was answered, so there is nothing to divide."
    stage, share = run.bound_by
    where = f"Bound by {stage} ({_MEANINGS[stage]}): {share:.0%} of the time of all stages."
    if run.busy_share < 0.7:
        where += f" The engine was at work for {run.busy_share:.0%} of the run; else it waited for pictures."
    if run.num_reused:
        where += f" Encoded before, so that nothing was read or encoded again: {run.num_reused:,} of the pictures."
    others = "Others were served meanwhile: their work is in the stage times." if run.was_shared else ""
    return f"{where} {others or 'Nobody else was served meanwhile.'}"


def _last(run: RunFigures) -> str:
    facts = (
        (rate(run.pictures_per_s), f"{counted(run.num_pictures, 'picture')} in {run.wall_s:.2f} s"),
        (f"{run.tokens_per_s:,.0f} tokens/s", f"{run.num_tokens:,} tokens"),
        (f"{run.in_flight} in flight", f"answered at most {run.rows} at once"),
        (
            f"{run.circumstances.device}, {numbers(run.circumstances.dtype, run.circumstances.precision)}",
            f"{counted(run.circumstances.threads, 'thread')}, {run.circumstances.mode} ({run.circumstances.operators})",
        ),
    )
    boxes = "".join(f"<div><b>{escaped(value)}</b><span>{escaped(what)}</span></div>" for value, what in facts)
    failed = f" {run.num_failed:,} failed." if run.num_failed else ""
    return (
        f"<section><h3>Last run: {_kind(run)}</h3>"
        f'<p class="la-plot-note">{escaped(sentence_of(run) + failed)}</p>'
        f'<div class="la-plot-facts">{boxes}</div></section>'
    )


def _rates(runs: Sequence[RunFigures]) -> str:
    most = max(run.pictures_per_s for run in runs)
    rows = "".join(
        _bar_row(run, value=f"{run.pictures_per_s:.1f}", parts=[("var(--color-accent)", run.pictures_per_s / most, "")])
        for run in runs
    )
    label = "; ".join(f"{run.in_flight} in flight: {run.pictures_per_s:.1f} pictures/s" for run in runs)
    return _plot("Pictures/s", "by pictures under way at once; the newest run of each", rows, label=label)


def _stages(runs: Sequence[RunFigures]) -> str:
    most = max(sum(run.stage_ms.values()) for run in runs) or 1.0
    rows = "".join(
        _bar_row(
            run,
            value=f"{sum(run.stage_ms.values()):.2f} ms",
            parts=[
                (_COLOURS[stage], value / most, f"{stage}: {value:.2f} ms")
                for stage, value in run.stage_ms.items()
                if value
            ],
        )
        for run in runs
    )
    legend = "".join(
        f'<span title="{_MEANINGS[stage]}"><i style="background:{_COLOURS[stage]}"></i>{stage}</span>'
        for stage in STAGES
    )
    label = "; ".join(
        f"{run.in_flight} in flight: " + ", ".join(f"{stage} {value:.2f} ms" for stage, value in run.stage_ms.items())
        for run in runs
    )
    note = "milliseconds per picture; all but read follow one another in the engine"
    return _plot("Stage times", note, rows, label=label, legend=f'<div class="la-plot-legend">{legend}</div>')


def _plot(title: str, note: str, rows: str, *, label: str, legend: str = "") -> str:
    bars = f'<div class="la-plot" role="img" aria-label="{escaped(f"{title}: {label}")}">{rows}</div>'
    return f'<section><h3>{title}</h3><p class="la-plot-note">{note}</p>{bars}{legend}</section>'


def _bar_row(run: RunFigures, *, value: str, parts: Iterable[tuple[str, float, str]]) -> str:
    bar = "".join(
        f'<i style="width:{share:.2%};background:{colour}" title="{escaped(title)}"></i>'
        for colour, share, title in parts
    )
    reused = "<small>encoded before</small>" if run.num_reused else ""
    return (
        f'<span class="la-plot-label">{run.in_flight} in flight{reused}</span>'
        f'<span class="la-plot-track"><span class="la-plot-bar">{bar}</span></span>'
        f'<span class="la-plot-value">{value}</span>'
    )


def _table(runs: Sequence[RunFigures]) -> str:
    columns = ("Run", "In flight", "Pictures", "Failed", "Pictures/s", "Tokens/s", *STAGES, "Bound by", "Others")
    head = "".join(
        f'<th scope="col"{"" if name in ("Run", "Bound by", "Others") else _NUMBER}>{name}</th>' for name in columns
    )
    rows = "".join(_row(run) for run in reversed(runs[-_MAX_TABLE_ROWS:]))
    return (
        f'<section><h3>All runs</h3><p class="la-plot-note">newest first, stages in milliseconds per picture; '
        f"kept until the server ends</p>"
        '<div class="la-batch-scroll" tabindex="0" role="region" aria-label="All runs">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


_NUMBER: Final = ' class="la-batch-number"'


def _row(run: RunFigures) -> str:
    stages = [f"{run.stage_ms[stage]:.2f}" if run.stage_ms else "" for stage in STAGES]
    figures = [run.in_flight, run.num_pictures, run.num_failed, f"{run.pictures_per_s:.1f}", f"{run.tokens_per_s:,.0f}"]
    cells = "".join(f"<td{_NUMBER}>{value}</td>" for value in (*figures, *stages))
    bound_by = "" if run.bound_by is None else f"{run.bound_by[0]} {run.bound_by[1]:.0%}"
    when = escaped(run.started_at[11:19])
    return (
        f'<tr><th scope="row">{_kind(run)} <span class="la-muted">{when}</span></th>{cells}'
        f"<td>{bound_by}</td><td>{'yes' if run.was_shared else 'no'}</td></tr>"
    )


def _kind(run: RunFigures) -> str:
    return "Batch" if run.kind == "batch" else "Measure"
