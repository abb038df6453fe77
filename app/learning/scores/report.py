"""Reports of scores: JSON, Markdown, and an HTML page with the pictures of the worst answers. Writes no files."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image

from llama_adapter.app.learning.scores.compare import Comparison
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.scoring import Mistake, Scores
from llama_adapter.app.learning.scores.tables import Table, comparison_tables, score_tables
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.views import data_address, view_pixels
from llama_adapter.runtime.text import markdown_text, shown_text
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import DEFAULT_MAX_BYTES, PictureSource, load_picture

SCORES: Final = "scores.json"  # file name of the JSON report
SCORES_FORMAT: Final = "llama-adapter-scores"
SCORES_VERSION: Final = 1
THUMBNAIL_SIDE: Final = 160  # pixels
_MAX_REFERENCES: Final = 5  # right answers that are shown per example

# Gives a small RGB picture of an outcome, with sides up to THUMBNAIL_SIDE; None if it cannot be shown.
Thumbnail = Callable[[Outcome], Image.Image | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The texts of a report for people."""

    title: str
    sentences: tuple[str, ...]
    tables: tuple[Table, ...]
    worst_title: str


def contents(scores: Scores, comparison: Comparison | None = None) -> Contents:
    """The texts of a report, without the worst answers."""
    return Contents(
        title=f"Scores of {scores.model}" if scores.model else "Scores",
        sentences=(_sentence(scores), *scores.notes),
        tables=(*score_tables(scores), *(comparison_tables(comparison) if comparison else ())),
        worst_title="Worst captions" if scores.task == "captions" else "Worst errors",
    )


def as_json(scores: Scores, comparison: Comparison | None = None, *, thumbnail: Thumbnail | None = None) -> str:
    """Every metric with its interval and count, and the worst answers, as JSON in ASCII. Undefined metrics are null.

    With `thumbnail`, `pictures` has the pictures of the worst answers as data URIs; null if an answer has none.
    """
    written: dict[str, Any] = {"format": SCORES_FORMAT, "version": SCORES_VERSION, **asdict(scores)}
    if comparison is not None:
        written["comparison"] = asdict(comparison)
    if thumbnail is not None:
        written["pictures"] = [_address(thumbnail(one.outcome)) for one in scores.worst]
    return json.dumps(written, indent=1, allow_nan=False) + "\n"


def as_markdown(scores: Scores, comparison: Comparison | None = None) -> str:
    """The metrics as Markdown tables, and the worst answers as a list."""
    texts = contents(scores, comparison)
    pieces = [
        f"# {markdown_text(texts.title)}",
        *map(markdown_text, texts.sentences),
        *map(_markdown_table, texts.tables),
    ]
    if scores.worst:
        pieces.append("## " + texts.worst_title)
        pieces.append("\n".join(f"- {_markdown_mistake(one)}" for one in scores.worst))
    return "\n\n".join(pieces) + "\n"


def as_html(scores: Scores, comparison: Comparison | None = None, *, thumbnail: Thumbnail | None = None) -> str:
    """A self-contained HTML page without scripts: metrics, and the worst answers with their pictures.

    `thumbnail` gives the picture of an outcome. By default, the outcome's `picture` is opened as a file.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    thumbnail = thumbnail or file_thumbnail
    worst = [(one, _address(thumbnail(one.outcome)), one.outcome.references[:_MAX_REFERENCES]) for one in scores.worst]
    return environment.get_template("report.html").render(
        texts=contents(scores, comparison),
        worst=worst,
        side=THUMBNAIL_SIDE,
    )


def file_thumbnail(outcome: Outcome) -> Image.Image | None:
    """A thumbnail of the file that an outcome's `picture` names; None without a picture or if it cannot be read."""
    return thumbnail_of(outcome.picture) if outcome.picture else None


def thumbnail_of(source: PictureSource | FileSlice) -> Image.Image | None:
    """A small RGB picture made from a picture file; None if it cannot be shown."""
    try:
        source = source.read(max_bytes=DEFAULT_MAX_BYTES) if isinstance(source, FileSlice) else source
        return small_picture(load_picture(source, least_side=THUMBNAIL_SIDE).image)
    except PictureError:
        return None


def small_picture(image: Image.Image) -> Image.Image | None:
    """An RGB picture with sides up to THUMBNAIL_SIDE; None for a mode that Pillow does not convert."""
    try:
        return Image.fromarray(view_pixels(image, side=THUMBNAIL_SIDE))
    except (OSError, ValueError):
        return None


def _sentence(scores: Scores) -> str:
    what = {"choices": "answers out of given choices", "open": "open answers", "captions": "captions"}[scores.task]
    pictures = "1 picture" if scores.num_pictures == 1 else f"{scores.num_pictures:,} pictures"
    return f"{scores.num_examples:,} {what}, {pictures}."


def _address(image: Image.Image | None) -> str | None:
    return None if image is None else data_address(image)


def _markdown_table(table: Table) -> str:
    lines = [
        f"## {markdown_text(table.title)}",
        "",
        _markdown_row(table.header),
        _markdown_row(("---", *("---:" for _ in table.header[1:])), is_text=False),
        *map(_markdown_row, table.rows),
    ]
    return "\n".join(lines + (["", markdown_text(table.note)] if table.note else []))


def _markdown_row(cells: tuple[str, ...], *, is_text: bool = True) -> str:
    texts = (markdown_text(cell) if is_text and cell != "-" else cell for cell in cells)  # "-" begins no list here
    return f"| {' | '.join(texts)} |"


def _markdown_mistake(one: Mistake) -> str:
    outcome = one.outcome
    about = " ".join(markdown_text(text) for text in (outcome.picture, outcome.question) if text)
    sure = "" if one.confidence is None else f", probability {one.confidence:.2f}"
    right = "; ".join(map(markdown_text, outcome.references[:_MAX_REFERENCES]))
    answered = f"“{markdown_text(outcome.answer)}” (score {one.score:.2f}{sure}); right: {right}"
    return f"{about}: {answered}" if about else answered


def _visible(value: Any) -> Any:
    """Text with escaped control characters. Markup stays as it is."""
    return shown_text(value) if type(value) is str else value
