"""docs/ray.md of docs/ray.json. Measures nothing."""

from collections.abc import Iterator, Mapping
from typing import Any

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
BUSY = 0.5  # programs a core before the measurement, from which on the page says so


def as_markdown(content: Figures) -> str:
    """The page."""
    return "\n".join(_lines(content)) + "\n"


def _lines(content: Figures) -> Iterator[str]:
    yield INTRODUCTION.format(**content)
    about = content["circumstances"]
    (load, *_), cores = about["load_before"] or [0.0], about["num_cpus"]
    if load > BUSY * cores:
        yield (
            f"**The machine was not alone**: {load:.1f} programs wanted its {cores} cores when this began. Rates and "
            "times are worth little then; measure again on a quiet one."
        )
        yield ""
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
    yield f"Circumstances: {_circumstances(about)}"


def _circumstances(about: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    load = about["load_before"]
    return (
        f"{about['cpu']}, {about['num_cpus']} cores, OMP_NUM_THREADS={about['omp_num_threads']}, "
        f"load before {load[0] if load else 'unknown'}; {versions}; commit {about['commit']}; {about['time']}."
    )
