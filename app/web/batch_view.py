"""A batch run as HTML: progress, pictures with their captions, a table. Everything is escaped. No Gradio."""

from collections.abc import Sequence
from typing import Final, Literal

from llama_adapter.app.records.record import Record
from llama_adapter.app.web.archive import counted
from llama_adapter.app.web.batch_types import Progress, Result
from llama_adapter.app.web.escaping import escaped, milliseconds, named, problem_card, size

MAX_CARDS: Final = 60
MAX_ROWS: Final = 100  # of the newest, and as many more that failed

State = Literal["running", "done", "cancelled", "failed"]


def empty() -> str:
    """Before the first run."""
    return (
        '<div class="la-batch"><div class="la-batch-empty"><strong>No pictures yet</strong>'
        "Add pictures, a folder or a zip, and press Start. "
        "Answers appear here as they come; broken files are listed with the reason.</div></div>"
    )


def beginning() -> str:
    """While archives are opened."""
    return '<div class="la-batch la-batch-progress" data-state="running"><p>Looking at the files …</p></div>'


def folder_line(num_files: int) -> str:
    """What the folder button has brought."""
    return f'<p class="la-note" role="status">Folder: {counted(num_files, "file")}</p>' if num_files else ""


def limits_line(*, max_pictures: int, max_bytes: int, max_pixels: int) -> str:
    """What one run takes."""
    return (
        f'<p class="la-note">Up to {max_pictures:,} pictures, each of up to {size(max_bytes)} and '
        f"{max_pixels / 1e6:.0f} megapixels. Zips are read as they are, nothing of them is unpacked to disk.</p>"
    )


def problem(sentence: str, hint: str = "") -> str:
    """Why there is no run."""
    return f'<div class="la-batch" role="alert">{problem_card(sentence, hint)}</div>'


def progress_view(progress: Progress, *, state: State, notes: Sequence[str] = (), trouble: str = "") -> str:
    """How far a run is, or how it ended; only the end is told to screen readers, not every tick."""
    told = "" if state == "running" else _ending(progress, state)
    return (
        f'<div class="la-batch la-batch-progress" data-state="{state}">{_bar(progress)}'
        f'<div class="la-batch-line">{_figures(progress, state)}</div>'
        f'<p role="status">{escaped(told)}</p>'
        f"{problem_card(trouble) if trouble else ''}{_notes(notes)}</div>"
    )


def cards(results: Sequence[Result], *, num_answered: int) -> list[str]:
    """The newest pictures that have an answer, in the order of their files; strings to be put behind one another."""
    if not results:
        return []
    shown = sorted(results, key=_by_index)
    which = f"the newest {len(shown)} of {num_answered:,}" if num_answered > len(shown) else f"{len(shown):,}"
    return [
        f'<div class="la-batch"><h3>Answers<small>{which}</small></h3><div class="la-batch-grid">',
        *(_card(result) for result in shown),
        "</div></div>",
    ]


def table(results: Sequence[Result]) -> list[str]:
    """Files, answers, figures and reasons, the failed first; strings to be put behind one another.

    `results` are all, in the order in which they came. Of many, the failed and the newest are shown.
    """
    if not results:
        return []
    failed = [result for result in results if result.record["error"] is not None][-MAX_ROWS:]
    newest = [result for result in results[-MAX_ROWS:] if result.record["error"] is None]
    shown = [*sorted(failed, key=_by_index), *sorted(newest, key=_by_index)]
    which = f"{len(results):,}"
    if len(shown) < len(results):
        kinds = "the failed and the newest" if failed else "the newest"
        which = f"{kinds}, {len(shown):,} of {len(results):,}; the downloads have all"
    head = "".join(
        f'<th scope="col" role="columnheader"{css}>{text}</th>'
        for text, css in (
            ("File", ""),
            ("Answer", ""),
            ("Finish", ""),
            ("Tokens", ' class="la-batch-number"'),
            ("Time", ' class="la-batch-number"'),
        )
    )
    return [
        f'<div class="la-batch"><h3>Files<small>{which}</small></h3>'
        '<div class="la-batch-scroll" tabindex="0" role="region" aria-label="Files and answers">'
        f'<table role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">',
        *(_row(result.record) for result in shown),
        "</tbody></table></div></div>",
    ]


def duration(seconds: float) -> str:
    """Such as: 4 s, 3 min 20 s, 1 h 5 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def rate(per_second: float) -> str:
    """Pictures a second, or a minute where they take long."""
    if per_second and per_second < 0.5:
        return f"{per_second * 60:.1f} pictures/min"
    return f"{per_second:.1f} pictures/s" if per_second < 100 else f"{per_second:.0f} pictures/s"


def answer_text(record: Record) -> str:
    """The answer, with its probability where it was chosen."""
    probability = (record["choice"] or {}).get(record["text"])
    return record["text"] if probability is None else f"{record['text']} ({probability:.0%})"


def _bar(progress: Progress) -> str:
    total = progress.num_pictures or 0
    share = progress.num_done / total if total else 0.0
    return (
        f'<div class="la-batch-bar" role="progressbar" aria-label="Pictures done" aria-valuemin="0" '
        f'aria-valuemax="{total}" aria-valuenow="{progress.num_done}"><span style="width:{share:.1%}"></span></div>'
    )


def _figures(progress: Progress, state: State) -> str:
    of = "" if progress.num_pictures is None else f" of {progress.num_pictures:,}"
    items = [f"<strong>{progress.num_done:,}{of} pictures</strong>"]
    if progress.num_failed:
        items.append(f'<span class="la-batch-bad">{progress.num_failed:,} failed</span>')
    if progress.pictures_per_s:
        items.append(f"<span>{rate(progress.pictures_per_s)}</span>")
    if state != "running":
        items.append(f"<span>{_took(progress.elapsed_s)}</span>")
    elif progress.remaining_s is not None:
        items.append(f"<span>about {duration(progress.remaining_s)} left</span>")
    if progress.waits_for:
        items.append(f"<span>waiting: {escaped(progress.waits_for)}</span>")
    return "".join(items)


def _took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _ending(progress: Progress, state: State) -> str:
    answered = progress.num_done - progress.num_failed
    counts = f"{answered:,} answered" + (f", {progress.num_failed:,} failed" if progress.num_failed else "")
    if state == "done":
        return f"Done: {counts}."
    left = (progress.num_pictures or progress.num_done) - progress.num_done
    begin = "Cancelled" if state == "cancelled" else "Ended early"
    return f"{begin}: {counts}, {left:,} not asked. What is done is kept below and in the downloads."


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return f'<ul class="la-batch-notes">{"".join(f"<li>{escaped(note)}</li>" for note in notes)}</ul>'


def _by_index(result: Result) -> int:
    return result.index


def _card(result: Result) -> str:
    record = result.record
    source = escaped(result.thumbnail) if result.thumbnail else ""
    picture = f'<img src="{source}" alt="" width="160" height="160">' if source else ""
    return (
        f'<figure class="la-batch-card">{picture}<figcaption>'
        f'<span class="la-batch-text">{escaped(answer_text(record)) or "(nothing)"}</span>{_doubt(record)}'
        f'<span class="la-batch-name" title="{escaped(record["picture"])}">{named(record["picture"])}</span>'
        "</figcaption></figure>"
    )


def _doubt(record: Record) -> str:
    """A mark behind an answer about a picture that the model was not made for."""
    if not record.get("unfamiliar"):
        return ""
    return '<span class="la-batch-doubt">unlike the pictures the model was trained on</span>'


def _row(record: Record) -> str:
    error = record["error"]
    total_ms = record["ms"].get("total")
    if error is None:
        answer = (escaped(answer_text(record)) or "(nothing)") + _doubt(record)
    else:
        answer = f'<span class="la-batch-code">{escaped(error["code"])}</span>{escaped(error["message"])}'
    tokens = f"{record['tokens']:,}" if error is None else ""
    time = milliseconds(total_ms) if error is None and total_ms is not None else ""
    return (
        f'<tr role="row"{"" if error is None else " class=la-batch-failed"}>'
        f'<td role="cell" class="la-batch-file">{named(record["picture"])}</td>'
        f'<td role="cell" class="la-batch-answer">{answer}</td>'
        f'<td role="cell" class="la-batch-short" data-label="Finish">{escaped(record["finish"])}</td>'
        f'<td role="cell" class="la-batch-number la-batch-short" data-label="Tokens">{tokens}</td>'
        f'<td role="cell" class="la-batch-number la-batch-short" data-label="Time">{time}</td></tr>'
    )
