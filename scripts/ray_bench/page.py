"""docs/ray.md of docs/ray.json. Measures nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

from scripts.page_parts import circumstances_line, company

Figures = Mapping[str, Any]

INTRODUCTION = """\
# Jobs on many machines

`--engine ray` beside one process, on one machine: what handing pictures out and answers back costs, and what a second
captioner brings where the first one leaves processors idle. On machines and devices of their own, captioners do not
share what they share here. This page is made of [ray.json](ray.json) by `python -m scripts.bench_ray`.

{num_pictures:,} pictures a job: copies of the samples, captioned by the embedded model. Ways take turns; rates are
medians of {rounds} rounds, with the least and the greatest behind them, counted from the record after the first
{lead:.0%} on. The whole job includes Python, loading the model, and starting and ending a cluster.
"""


def as_markdown(content: Figures) -> str:
    """The page."""
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Figures) -> Iterator[str]:
    yield INTRODUCTION.format(**content)
    about = content["circumstances"]
    yield from company(about)
    yield "| captioners | pictures/s | rounds | whole job |"
    yield "| --- | ---: | --- | ---: |"
    for row in content["rows"]:
        name = "one process, no Ray" if row["actors"] is None else f"Ray, {row['actors']}"
        spread = f"{min(row['rounds']):.1f} to {max(row['rounds']):.1f}"
        yield f"| {name} | {row['pictures_per_s']:.1f} | {spread} | {row['wall_s']:.1f} s |"
    yield ""
    different = sum(row["different"] + row["missing"] for row in content["rows"])
    yield f"Records that are not those of one process, in all jobs together: {different}."
    yield ""
    yield f"Circumstances: {circumstances_line(about)}"
