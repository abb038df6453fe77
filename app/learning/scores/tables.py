"""Scores as tables of text, for the Markdown and the HTML report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from llama_adapter.app.learning.scores.choices import Confusion
from llama_adapter.app.learning.scores.compare import Comparison
from llama_adapter.app.learning.scores.intervals import Draws, Figure
from llama_adapter.app.learning.scores.scoring import Scores

# Metrics that are shown as plain numbers, because they are not shares of examples. All others are shown in per cent.
_PLAIN: Final = frozenset(("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "ROUGE-L", "CIDEr-D", "ROC-AUC", "ECE", "MME score"))
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
            note=_drawn(scores.draws, scores.num_pictures),
        )
    ]
    if scores.parts:
        tables.append(_grid("Parts", "part", scores.parts, note=_totals(scores.totals)))
    if scores.classes:
        tables.append(_grid("Classes", "class", scores.classes))
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
    tables = [
        Table(
            title=f"{other} minus {one}",
            header=("figure", one, other, "difference", "95 % interval"),
            rows=tuple(rows),
            note=" ".join(
                filter(
                    None,
                    (
                        _drawn(comparison.draws, comparison.num_pictures),
                        f"n is {_counted(comparison.num_examples)}.",
                        comparison.note,
                    ),
                )
            ),
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
            (row, *(_with_interval(name, own.get(name)) for name in names), _counted(_most(own.values())))
            for row, own in rows.items()
        ),
        note=note,
    )


def _most(found: Iterable[Figure]) -> int:
    return max((one.count for one in found), default=0)


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


def _totals(totals: Mapping[str, float]) -> str:
    return " ".join(f"MME {name}: {value:.1f}." for name, value in totals.items())
