"""The goals of a round on a GPU: what counts as reached, and that the round measures it."""

from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_round
from scripts.bench import parse_settings
from scripts.bench_peers import CHOICES, load
from scripts.pages.render import PAGES, read
from scripts.peers.goals import GOALS, Goal, reached
from scripts.peers.gpus import GPUS
from scripts.peers.results import Results, Row
from scripts.peers.rounds import Plan
from scripts.peers.table import Rung

RUNS = {"2026-11-27T10": {"commit": "abc"}, "2026-11-28T10": {}}


def row(engine: str, rate: float, batch: int = 1, **changes: Any) -> Row:
    values = {"part": "decode", "size": "7B", "threads": 1, "run": "2026-11-27T10", **changes}
    return Row(engine=engine, rates=(rate,), batch=batch, **values)


def told(goal: Goal, *rows: Row) -> list[str]:
    name, batches, *values = reached(goal, Results(runs=RUNS, rows=rows, processor="h100")).values()
    assert (name, batches) == (goal.name, " / ".join(map(str, goal.batches)))
    return values


RATIO = Goal("int4", 2, "x", "decode", "7B", (1, 5), ("ours-int4", "ours-int4-proposed"), ("one", "two"))
THEIRS = (row("one", 9.0), row("two", 10.0), row("one", 30.0, 5))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ["2.00x", "- / -", "open", "-", "-"]),
        ([row("ours-int4", 25.0)], ["2.00x", "2.50x / -", "open", "ours-int4", "2026-11-27, abc"]),
        ([row("ours-int4", 19.97)], ["2.00x", "1.99x / -", "**missed**", "ours-int4", "2026-11-27, abc"]),
        ([row("ours-int4", 15.0)], ["2.00x", "1.50x / -", "**missed**", "ours-int4", "2026-11-27, abc"]),
        (
            [row("ours-int4", 25.0), row("ours-int4", 60.0, 5, run="2026-11-28T10")],
            ["2.00x", "2.50x / 2.00x", "met", "ours-int4", "2026-11-27, abc; 2026-11-28, unknown"],
        ),
        (  # one missed batch size is enough
            [row("ours-int4", 25.0), row("ours-int4", 59.0, 5)],
            ["2.00x", "2.50x / 1.97x", "**missed**", "ours-int4", "2026-11-27, abc"],
        ),
        (  # the best is the one whose worst figure is best, among those with most figures
            [
                *(row("ours-int4", rate, batch) for rate, batch in ((40.0, 1), (50.0, 5))),
                *(row("ours-int4-proposed", rate, batch) for rate, batch in ((21.0, 1), (63.0, 5))),
            ],
            ["2.00x", "2.10x / 2.10x", "met", "ours-int4-proposed", "2026-11-27, abc"],
        ),
        (
            [row("ours-int4", 15.0), row("ours-int4", 45.0, 5), row("ours-int4-proposed", 90.0)],
            ["2.00x", "1.50x / 1.50x", "**missed**", "ours-int4", "2026-11-27, abc"],
        ),
    ],
)
def test_a_ratio_is_that_to_the_best_of_others_at_each_batch_size(rows: list[Row], expected: list[str]) -> None:
    assert told(RATIO, *rows, *THEIRS) == expected


def test_the_newest_figure_counts_with_any_number_of_threads() -> None:
    goal = Goal("captions", 250, "pictures/s", "job", "7B+ViT-L/14", (2000,), ("ours",))
    older, newer = (
        row("ours", rate, 2000, part="job", size="7B+ViT-L/14", threads=threads, run=run)
        for rate, threads, run in zip((300.0, 200.4), (1, 8), RUNS, strict=True)
    )

    expected = ["250 pictures/s", "200", "**missed**", "ours", "2026-11-28, unknown"]
    assert told(goal, older, newer) == told(goal, newer, older) == expected


def test_a_ratio_may_be_to_another_batch_size() -> None:
    goal = Goal("over the loop", 10, "x", "job", "7B", (2000,), ("ours",), ("reference",), 64)
    rows = row("ours", 300.0, 2000, part="job"), row("reference", 30.0, 64, part="job")

    assert told(goal, *rows)[:3] == ["10.00x", "10.00x", "met"]


def test_shares_are_of_the_ceilings_of_the_run() -> None:
    ceilings = (row("read", 3e12, part="ceiling"), row("matmul-bfloat16", 8e14, part="ceiling"))
    steps = Goal("steps", 0.5, "of bandwidth", "decode", "7B", (1,), ("ours-bfloat16",))
    products = Goal("products", 0.5, "of matmul", "prefill", "7B", (64,), ("ours-bfloat16",))
    rows = row("ours-bfloat16", 150.0), row("ours-bfloat16", 40000.0, 64, part="prefill")

    # A step reads 13.2 GB. A token of a prompt needs 12.6 GFLOP: most of the last layer is for the last token alone.
    assert told(steps, *rows, *ceilings)[:3] == ["50% of bandwidth", "66%", "met"]
    assert told(products, *rows, *ceilings)[:3] == ["50% of matmul", "63%", "met"]
    assert told(steps, *rows)[1:3] == ["-", "open"]


def test_the_round_measures_all_figures_of_every_goal(tmp_path: Path) -> None:
    measured = set[tuple[str, str, Rung]]()
    for step in gpu_round.steps("h100", toy=False, out=tmp_path):
        if step.command[1] == "scripts.bench_peers":
            flags = step.command[2:]
            plan, *_ = parse_settings("", flags, page="peers", full=Plan(), quick=Plan(), choices=CHOICES)
            measured |= {(task.engine.name, task.size, rung) for task in plan.tasks() for rung in task.rungs}

    for goal in GOALS:
        wanted = {(engine, goal.size, (goal.part, batch)) for engine in goal.engines for batch in goal.batches}
        wanted |= {
            (engine, goal.size, (goal.part, goal.over_batch or batch)) for engine in goal.over for batch in goal.batches
        }
        assert wanted - measured == set(), goal.name


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if f"gpu-round-{gpu}" in PAGES])
def test_goals_on_a_page_are_those_of_its_figures(gpu: str) -> None:
    name = f"gpu-round-{gpu}"
    figures = load(gpu_round.DOCS, Results(processor=gpu))

    assert read(name)["goals"] == [reached(goal, figures) for goal in GOALS]
