"""The HTML of the Batch tab for a run. Imports no Gradio."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Final, Literal

from llama_adapter.app.captioning.decisions.rule import Rule, decide, explain
from llama_adapter.app.serving.web.batch_run import Progress, Result
from llama_adapter.app.serving.web.html import render

MAX_CARDS: Final = 60
MAX_FAILURES: Final = 100

State = Literal["running", "done", "cancelled", "failed"]


def progress_view(progress: Progress, *, state: State, notes: Sequence[str] = (), trouble: str = "") -> str:
    """The progress of a run, or how it ended."""
    ending = "" if state == "running" else _ending(progress, state)
    return render(
        "batch", "progress", progress=progress, state=state, ending=ending, notes=list(notes), trouble=trouble
    )


def _ending(progress: Progress, state: State) -> str:
    answered = progress.num_done - progress.num_failed
    counts = f"{answered:,} answered" + (f", {progress.num_failed:,} failed" if progress.num_failed else "")
    if state == "done":
        return f"Done: {counts}."
    left = (progress.num_pictures or progress.num_done) - progress.num_done
    begin = "Cancelled" if state == "cancelled" else "Ended early"
    return f"{begin}: {counts}, {left:,} not asked. The answers so far are below and in the downloads."


def cards(results: Sequence[Result], *, num_answered: int, rule: Rule) -> list[str]:
    """The answered pictures in the order of their files, as strings to concatenate.

    With choices, each has bars of probabilities.
    """
    if not results:
        return []
    which = (
        f"newest {len(results)} of {num_answered:,}; the downloads have all"
        if num_answered > len(results)
        else f"{len(results):,}"
    )
    is_judged = results[0].record["choice"] is not None
    return [
        render("batch", "cards_head", which=which, judged=is_judged),
        *(
            render("batch", "judged" if is_judged else "card", result=result, rule=rule, decided=_decided(result, rule))
            for result in sorted(results, key=attrgetter("index"))
        ),
        render("batch", "cards_tail", judged=is_judged),
    ]


def failures(results: Sequence[Result]) -> list[str]:
    """The failed files with their reasons, as strings to concatenate. If there are many, the newest are shown."""
    failed = [result for result in results if result.record["error"] is not None]
    if not failed:
        return []
    shown = sorted(failed[-MAX_FAILURES:], key=attrgetter("index"))
    which = f"{len(failed):,}"
    if len(shown) < len(failed):
        which = f"newest {len(shown)} of {which}; the downloads have all"
    return [
        render("batch", "failed_head", which=which),
        *(render("batch", "failed", record=result.record) for result in shown),
        render("batch", "failed_tail"),
    ]


def decisions(results: Sequence[Result], choices: tuple[str, ...], rule: Rule) -> str:
    """The number of pictures for each decision, and the rule as a sentence; empty without choices."""
    if not choices:
        return ""
    answered = [result for result in results if result.record["error"] is None]
    decided = Counter(_decided(result, rule) for result in answered)
    counts = [(name, decided[name]) for name in choices if decided[name]]
    if decided[None]:
        counts.append(("undecided", decided[None]))
    if failed := len(results) - len(answered):
        counts.append(("failed", failed))
    return render("batch", "decisions", counts=counts, sentence=explain(choices, rule))


def _decided(result: Result, rule: Rule) -> str | None:
    choice = {name: value or 0.0 for name, value in (result.record["choice"] or {}).items()}
    return decide(choice, rule) if choice else None
