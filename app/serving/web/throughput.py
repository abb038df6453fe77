"""The Throughput tab: speed and stage times of this page's batches."""

from collections.abc import Sequence
from typing import Final

import gradio as gr

from llama_adapter.app.jobs.report import numbers
from llama_adapter.app.serving.web.html import render
from llama_adapter.app.serving.web.run_history import RunFigures
from llama_adapter.app.serving.web.runs import Runs
from llama_adapter.app.serving.web.widgets import PRIVATE, html_view
from llama_adapter.runtime.text import counted

_MAX_BARS: Final = 5
_MAX_TABLE_ROWS: Final = 30
_MEANINGS: Final = {  # stage -> its meaning, in the order of the stages
    "read": "reading and resizing pictures, in threads beside the engine",
    "clip": "encoding pictures",
    "pre": "projecting the encoding to the decoder's layers",
    "forward": "the decoder's steps",
    "post": "choosing tokens",
    "decode": "turning tokens into text",
    "write": "delivering answers",
}


def build_throughput(*, runs: Runs, tab: gr.Tab) -> None:
    """Lay out the tab. Call it inside `tab` or a tab within it. Opening `tab` shows new runs."""
    view = html_view(report(()), elem_id="throughput-report")

    def show(request: gr.Request) -> str:
        return report(runs.history(str(request.session_hash)))

    tab.select(show, None, view, **PRIVATE)


def report(runs: Sequence[RunFigures]) -> str:
    """The runs as HTML, oldest first: facts of the last one, bars of the newest, a table."""
    return render(
        "throughput",
        "report",
        runs=list(runs),
        plotted=[run for run in runs if run.num_pictures][-_MAX_BARS:],
        sentence=sentence_of(runs[-1]) if runs else "",
        meanings=_MEANINGS,
        max_rows=_MAX_TABLE_ROWS,
        numbers=numbers,
    )


def sentence_of(run: RunFigures) -> str:
    """A sentence about what limits the speed of a run."""
    failed = f" {run.num_failed:,} failed." if run.num_failed else ""
    if run.bound_by is None or not run.num_pictures:
        return f"No picture was answered.{failed}"
    stage, share = run.bound_by
    sentence = f"Bottleneck: {stage} ({_MEANINGS[stage]}), {share:.0%} of all stage times."
    if run.busy_share < 0.7:
        sentence += f" The engine was busy {run.busy_share:.0%} of the time and waited for pictures otherwise."
    if run.num_reused:
        sentence += f" Already encoded: {counted(run.num_reused, 'picture')}."
    if run.was_shared:
        sentence += " The stage times include requests of other clients."
    return sentence + failed
