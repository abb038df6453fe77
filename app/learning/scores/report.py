"""Reports of scores: JSON, Markdown, and an HTML page with the pictures of the worst answers. Writes no files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image

from llama_adapter.app.learning.scores.choices import Confusion
from llama_adapter.app.learning.scores.compare import Comparison
from llama_adapter.app.learning.scores.intervals import Draws, Figure
from llama_adapter.app.learning.scores.scoring import SHARES, Scores
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.views import data_address, view_pixels
from llama_adapter.runtime.text import counted, markdown_text, shown_excerpt, shown_name, shown_text
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.files import DEFAULT_MAX_BYTES
from llama_adapter.vision.image import load_picture

# Metrics that are shown as plain numbers, because they are not shares of examples. All others are shown in per cent.
_PLAIN: Final = frozenset(("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr-D", "ROC-AUC", "ECE", "MME score"))
_DECISIVE: Final = ("accuracy", "normalised", "CIDEr-D")  # metrics that decide between two models: one for each task
_OF_CLASSES: Final = "Intervals: Wilson's; if a picture has several examples, at least as wide as the bootstrap's."
_OF_LIMITS: Final = "Right answers of 0 and 100 % have Wilson's interval for the number of pictures."
_LEVEL: Final = 0.05  # a p-value below it is a difference
_LEAST_PICTURES: Final = 6  # if all of fewer pictures favour one model, a sign test has p > `_LEVEL`
_MAX_MATRIX: Final = 30  # most classes of a shown matrix, and most confusions in a list


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text; the first column has the names of the rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def score_tables(scores: Scores) -> list[Table]:
    """All metrics of one model as tables."""
    tables = [
        Table(
            title="Figures",
            header=("figure", "value", "95 % interval", "n"),
            rows=tuple((name, *_cells(name, one), _counted(one.count)) for name, one in scores.figures.items()),
            note=_drawn(scores.draws, scores.num_pictures) + (f" {_OF_LIMITS}" if _has_limits(scores) else ""),
        )
    ]
    if scores.parts:
        note = " ".join(f"MME {name}: {value:.1f}." for name, value in scores.totals.items())
        tables.append(_grid("Parts", "part", scores.parts, note=note))
    if scores.classes:
        has_intervals = any(one.low is not None for own in scores.classes.values() for one in own.values())
        tables.append(_grid("Classes", "class", scores.classes, note=_OF_CLASSES if has_intervals else ""))
    if scores.confusion is not None:
        tables.append(_confusion_table(scores.confusion))
    return tables


def comparison_tables(comparison: Comparison) -> list[Table]:
    """The comparison of two models as tables."""
    one, other = comparison.names
    rows = []
    for name, difference in comparison.differences.items():
        before, after = comparison.values[name]
        rows.append((name, _value(name, before), _value(name, after), *_cells(name, difference, sign="+")))
    drawn = _drawn(comparison.draws, comparison.num_pictures)
    tables = [
        Table(
            title=f"{other} minus {one}",
            header=("figure", one, other, "difference", "95 % interval"),
            rows=tuple(rows),
            note=f"{drawn} n is {_counted(comparison.num_examples)}. {comparison.note}".rstrip(),
        )
    ]
    found = comparison.mcnemar
    if found is not None:
        tables.append(
            Table(
                title="McNemar's exact test",
                header=("", f"{other} right", f"{other} wrong"),
                rows=(
                    (f"{one} right", _counted(found.num_both_right), _counted(found.num_one_right)),
                    (f"{one} wrong", _counted(found.num_other_right), _counted(found.num_both_wrong)),
                ),
                note=f"Two-sided p = {found.p_value:.3g}. It takes examples as independent; the intervals do not.",
            )
        )
    return tables


def verdict(comparison: Comparison) -> str:
    """Which model is better, in two sentences with the difference, its interval and the p-value.

    With one example per picture, McNemar's p below 0.05 decides. Otherwise the interval decides, which does not take
    the examples of a picture as independent; with fewer than `_LEAST_PICTURES`, nothing does.
    """
    name = next(one for one in _DECISIVE if one in comparison.differences)
    difference, found = comparison.differences[name], comparison.mcnemar
    (one, other), (before, after) = comparison.names, comparison.values[name]
    low, high = difference.low, difference.high
    are_enough = comparison.num_pictures >= _LEAST_PICTURES
    is_apart = are_enough and low is not None and high is not None and not low <= 0 <= high
    if found is not None and comparison.num_pictures == comparison.num_examples:
        is_apart = found.p_value < _LEVEL
    better, worse = (other, one) if (difference.value or 0) > 0 else (one, other)
    said = f"{better} is better than {worse}" if is_apart else f"It is open whether {one} or {other} is better"
    value, interval = _cells(name, difference, sign="+")
    evidence = [] if interval == "-" else [f"95 % interval {interval}"]
    evidence += [] if found is None else [f"McNemar's p = {found.p_value:.3g}"]
    shown = f" ({'; '.join(evidence)})" if evidence else ""
    return (
        f"{said}. The {name} of {other} is {_value(name, after)}, that of {one} {_value(name, before)}: "
        f"a difference of {value}{shown}."
    )


def _confusion_table(found: Confusion) -> Table:
    """The confusion matrix; if it has many classes, the most frequent confusions instead."""
    if len(found.rows) <= _MAX_MATRIX:
        return Table(
            title="Confusion matrix",
            header=("right answer", *found.columns),
            rows=tuple((name, *map(_counted, counts)) for name, counts in zip(found.rows, found.counts, strict=True)),
            note="Rows are right answers, columns are given ones.",
        )
    confused = [
        (-count, row, column)
        for row, counts in zip(found.rows, found.counts, strict=True)
        for column, count in zip(found.columns, counts, strict=True)
        if count and row != column
    ]
    return Table(
        title="Most frequent confusions",
        header=("right answer", "given answer", "n"),
        rows=tuple((row, column, _counted(-count)) for count, row, column in sorted(confused)[:_MAX_MATRIX]),
        note=f"The whole matrix of {len(found.rows)} classes is in the JSON report.",
    )


def _grid(title: str, what: str, rows: Mapping[str, Mapping[str, Figure]], *, note: str = "") -> Table:
    names = list(dict.fromkeys(name for own in rows.values() for name in own))
    return Table(
        title=title,
        header=(what, *names, "n"),
        rows=tuple(
            (
                row,
                *(_with_interval(name, own.get(name)) for name in names),
                _counted(max(one.count for one in own.values())),
            )
            for row, own in rows.items()
        ),
        note=note,
    )


def _cells(name: str, figure: Figure, *, sign: str = "") -> tuple[str, str]:
    if figure.low is None or figure.high is None:
        return _value(name, figure.value, sign=sign), "-"
    ends = (_value(name, end, sign=sign) for end in (figure.low, figure.high))
    return _value(name, figure.value, sign=sign), " to ".join(ends)


def _with_interval(name: str, figure: Figure | None) -> str:
    if figure is None:
        return "-"
    value, interval = _cells(name, figure)
    return value if interval == "-" else f"{value} ({interval})"


def _value(name: str, value: float | None, *, sign: str = "") -> str:
    if value is None:
        return "-"
    if name == "MME score":
        return f"{value:{sign}.1f}"
    return f"{value:{sign}.3f}" if name in _PLAIN else f"{value:{sign}.1%}"


def _counted(number: int) -> str:
    return f"{number:,}"


def _drawn(draws: Draws, num_pictures: int) -> str:
    if not draws.count or num_pictures < 2:
        return "No intervals: they need draws, and at least two pictures."
    return f"Intervals: {draws.count:,} bootstrap draws of the {num_pictures:,} pictures, seed {draws.seed}."


def _has_limits(scores: Scores) -> bool:
    """Whether shares of right answers have Wilson's interval, because all draws give 0 or 1."""
    tables = (scores.figures, *scores.parts.values())
    found = [own[name] for own in tables for name in SHARES if name in own]
    return any(one.value in (0.0, 1.0) and one.low is not None for one in found)


SCORES: Final = "scores.json"  # file name of the JSON report
SCORES_FORMAT: Final = "llama-adapter-scores"
SCORES_VERSION: Final = 1
THUMBNAIL_SIDE: Final = 160  # pixels
_TEMPLATES: Final = Path(__file__).with_name("templates")
_MAX_REFERENCES: Final = 5  # right answers that are shown per example


def contents(scores: Scores, comparison: Comparison | None = None) -> dict[str, Any]:
    """The texts of a report for its template, without the worst answers."""
    return {
        "title": f"Scores of {scores.model}" if scores.model else "Scores",
        "sentences": (_sentence(scores), *scores.notes),
        "tables": (*score_tables(scores), *(comparison_tables(comparison) if comparison else ())),
        "worst_title": "Worst captions" if scores.task == "captions" else "Worst errors",
        "verdict": verdict(comparison) if comparison else "",
    }


def as_json(
    scores: Scores, comparison: Comparison | None = None, *, pictures: Sequence[str | None] | None = None
) -> str:
    """Every metric with its interval and count, and the worst answers, as JSON in ASCII. Undefined metrics are null.

    `pictures` are the data URIs of the worst answers' pictures; None, or null in JSON, if an answer has none.
    """
    written: dict[str, Any] = {"format": SCORES_FORMAT, "version": SCORES_VERSION, **asdict(scores)}
    if comparison is not None:
        written["comparison"] = asdict(comparison)
    if pictures is not None:
        written["pictures"] = pictures
    return json.dumps(written, indent=1, allow_nan=False) + "\n"


def as_markdown(scores: Scores, comparison: Comparison | None = None) -> str:
    """The metrics as Markdown tables, and the worst answers as a list."""
    worst = [(one, one.outcome.references[:_MAX_REFERENCES]) for one in scores.worst]
    return rendered(_TEMPLATES / "report.md", texts=contents(scores, comparison), worst=worst) + "\n"


def as_html(
    scores: Scores, comparison: Comparison | None = None, *, pictures: Sequence[str | None] | None = None
) -> str:
    """A self-contained HTML page without scripts: metrics, and the worst answers with `pictures`, see `as_json`."""
    shown = zip(scores.worst, pictures or [None] * len(scores.worst), strict=True)
    worst = [(one, address, one.outcome.references[:_MAX_REFERENCES]) for one, address in shown]
    texts = contents(scores, comparison)
    return rendered(_TEMPLATES / "report.html", texts=texts, worst=worst, side=THUMBNAIL_SIDE)


def rendered(template: Path, **values: Any) -> str:
    """The text of a Jinja template, without a line feed at its end.

    In HTML, all values are escaped. In Markdown, the filter `md` escapes; `name` and `excerpt` shorten values before.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    is_html = template.suffix == ".html"
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=is_html,
        undefined=StrictUndefined,
        finalize=_visible if is_html else None,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"md": markdown_text, "name": shown_name, "excerpt": shown_excerpt}
    return environment.get_template(template.name).render(**values).rstrip("\n")


def thumbnail_of(source: object) -> str | None:
    """The data URI of a picture file in small, RGB with sides up to THUMBNAIL_SIDE; None if it cannot be shown."""
    try:
        source = source.read(max_bytes=DEFAULT_MAX_BYTES) if isinstance(source, FileSlice) else source
        if not isinstance(source, str | bytes):
            return None
        image = load_picture(source, least_side=THUMBNAIL_SIDE).image
        return data_address(Image.fromarray(view_pixels(image, side=THUMBNAIL_SIDE)))
    except (PictureError, OSError, ValueError):  # Pillow does not convert all modes
        return None


def _sentence(scores: Scores) -> str:
    what = {"choices": "answers out of given choices", "open": "open answers", "captions": "captions"}[scores.task]
    return f"{scores.num_examples:,} {what}, {counted(scores.num_pictures, 'picture')}."


def _visible(value: Any) -> Any:
    """Text with escaped control characters. Markup stays as it is."""
    return shown_text(value) if type(value) is str else value
