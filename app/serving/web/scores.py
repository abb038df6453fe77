"""The Scores tab: saved reports of `eval`, read when the page starts. Files that they name are never opened."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import pydantic

from llama_adapter.app.learning.scores.compare import Comparison
from llama_adapter.app.learning.scores.report import SCORES, SCORES_FORMAT, SCORES_VERSION, contents
from llama_adapter.app.learning.scores.scoring import Scores
from llama_adapter.app.serving.web.html import render
from llama_adapter.app.serving.web.widgets import html_view
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_excerpt, shown_name

MAX_REPORT_BYTES: Final = 32 * 2**20
MAX_ROWS: Final = 200  # rows of a table on the page; the JSON report has all rows
_ADDRESS: Final = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")


def _is_picture(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ValueError("a picture is no JPEG in a data address")
    return text


_Address = Annotated[str, pydantic.AfterValidator(_is_picture)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """The fields of a report in addition to its scores."""

    format: Literal["llama-adapter-scores"]
    version: Literal[1]
    comparison: Comparison | None = None
    pictures: tuple[_Address | None, ...] = ()  # the pictures of the worst answers, in the same order


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedReport:
    """A report that `eval` wrote."""

    name: str  # the name of its folder
    scores: Scores
    head: _Head


_HEAD, _SCORES = pydantic.TypeAdapter(_Head), pydantic.TypeAdapter(Scores)


def read_report(folder: str) -> SavedReport:
    """The report in the `--out` folder of an evaluation. Raises UsageError for anything else, and OSError."""
    path = Path(folder, SCORES)
    if not path.is_file():
        raise UsageError(
            f"Wanted the folder of an evaluation, but `{shown_name(folder)}` has no {SCORES}",
            hint="`llama-adapter eval DATA --out FOLDER` writes one",
        )
    with path.open("rb") as file:
        data = file.read(MAX_REPORT_BYTES + 1)
    if len(data) > MAX_REPORT_BYTES:
        raise UsageError(f"Wanted at most {MAX_REPORT_BYTES:,} bytes in `{shown_name(path)}`, which has more")
    try:
        head, scores = _HEAD.validate_json(data), _SCORES.validate_json(data)
    except (pydantic.ValidationError, UsageError) as error:
        first = str(error.errors()[0]["msg"]) if isinstance(error, pydantic.ValidationError) else error.message
        raise UsageError(
            f"Wanted a report ({SCORES_FORMAT}, version {SCORES_VERSION}) in `{shown_name(path)}`, got something else "
            f"({shown_excerpt(first)})",
            hint="`llama-adapter eval` writes one",
        ) from None
    return SavedReport(name=path.parent.resolve().name, scores=scores, head=head)


def build_scores(reports: tuple[SavedReport, ...]) -> None:
    """Lay out the tab. Call it inside a `gr.Tab`."""
    for number, report in enumerate(reports):
        html_view(report_html(report), elem_id=f"scores-report-{number}")


def report_html(report: SavedReport) -> str:
    """The report as HTML: figures as tables, and the worst answers with their pictures."""
    worst, pictures = report.scores.worst, report.head.pictures[: len(report.scores.worst)]
    return render(
        "scores",
        "report",
        name=report.name,
        texts=contents(report.scores, report.head.comparison),
        worst=list(zip(worst, (*pictures, *(None,) * (len(worst) - len(pictures))), strict=True)),
        max_rows=MAX_ROWS,
    )
