"""docs/reading.md of docs/reading.json. Measures nothing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.page_parts import circumstances_line, company

Figures = Mapping[str, Any]

INTRODUCTION = """\
# Reading pictures

How fast pictures are opened, hashed, decoded and resized to {size} x {size} pixels, without any model, by threads of
one process (`--reader thread`) and by processes that can be killed (`--reader process`). This page is made of
[reading.json](reading.json) by `python -m scripts.bench_reading`.

Drawings are the sample pictures; the JPEGs are noise with the spectrum of photographs and some grain, at quality 90.
All files are in the system's memory. Ways take turns; rates are medians of {rounds} rounds, with the least and the
greatest behind them, processor time is that of all processes together.
"""


def as_markdown(content: Figures) -> str:
    """The page."""
    return "\n".join(_lines(content)).rstrip("\n") + "\n"


def _lines(content: Figures) -> Iterator[str]:
    yield INTRODUCTION.format(**content)
    about = content["circumstances"]
    yield from company(about)
    yield "| pictures | bytes of a file | read in | at once | pictures/s | rounds | processor time a picture |"
    yield "| --- | ---: | --- | ---: | ---: | --- | ---: |"
    for row in content["rows"]:
        yield (
            f"| {row['pictures']} | {content['file_bytes'][row['pictures']]:,} | {row['reader']} | {row['at_once']} "
            f"| {row['pictures_per_s']:.1f} | {_spread(row['rounds'])} | {row['cpu_ms']:.2f} ms |"
        )
    yield ""
    yield from _gains(content["rows"])
    yield "What a process of its own costs a picture, one at a time:"
    yield ""
    yield "| pictures | wall time | rounds | processor time |"
    yield "| --- | ---: | --- | ---: |"
    for cost in content["overhead"]:
        low, high = min(cost["rounds"]), max(cost["rounds"])
        yield (f"| {cost['pictures']} | {cost['wall_ms']:.2f} ms | {low:.2f} to {high:.2f} | {cost['cpu_ms']:.2f} ms |")
    yield ""
    yield f"Circumstances: {circumstances_line(about)}"


def _gains(rows: Sequence[Figures]) -> Iterator[str]:
    """How much faster several at once are than one."""
    alone = {(row["pictures"], row["reader"]): row["pictures_per_s"] for row in rows if row["at_once"] == 1}
    gains = []
    for row in (row for row in rows if row["at_once"] == 2):
        key = row["pictures"], row["reader"]
        gains.append(f"{row['pictures_per_s'] / alone[key]:.2f} times ({', '.join(key)})")
    if gains:
        yield f"Two at once against one: {', '.join(gains)}."
        yield ""


def _spread(rates: Sequence[float]) -> str:
    return f"{min(rates):.1f} to {max(rates):.1f}"
