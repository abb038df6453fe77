"""Throughput: figures are computed from counts, kept within limits, and shown as bars and as a table."""

import re
from dataclasses import replace

import pytest

from llama_adapter.app.captioning.stage_clock import STAGES
from llama_adapter.app.serving.web.run_history import RunFigures, stage_differences
from llama_adapter.app.serving.web.throughput import report, sentence_of
from tests.app.toys import INFO

RUN = RunFigures(
    started_at="2026-11-21T12:00:00+00:00",
    in_flight=16,
    num_pictures=50,
    num_failed=1,
    num_tokens=600,
    num_reused=0,
    wall_s=2.0,
    stages_s={**dict.fromkeys(STAGES, 0.0), "read": 0.25, "clip": 1.0, "forward": 0.5},
    was_shared=False,
    info=INFO,
    threads=2,
    batch_size=8,
)


def test_figures_follow_from_counts_and_times() -> None:
    assert (RUN.pictures_per_s, RUN.tokens_per_s, RUN.rows) == (25.0, 300.0, 8)
    assert RUN.stage_ms["clip"] == pytest.approx(20.0)
    assert RUN.bound_by == ("clip", pytest.approx(1.0 / 1.75))
    assert RUN.busy_share == pytest.approx(0.75)  # without reading, which runs in parallel with the engine


def test_a_run_without_pictures_has_no_figures_to_divide() -> None:
    nothing = replace(RUN, num_pictures=0, num_tokens=0, wall_s=0.0, stages_s={})

    assert (nothing.pictures_per_s, nothing.tokens_per_s, nothing.stage_ms, nothing.bound_by) == (0.0, 0.0, {}, None)
    assert report([nothing])


def test_a_restart_between_two_readings_gives_no_negative_times() -> None:
    assert stage_differences({"clip": 5.0, "read": 1.0}, {"clip": 2.0, "read": 1.5}) == {"clip": 0.0, "read": 0.5}


def test_the_newest_five_batches_with_an_answer_are_plotted() -> None:
    runs = [replace(RUN, started_at=f"2026-11-21T12:00:0{second}+00:00") for second in range(7)]
    bars = report([*runs, replace(RUN, started_at="2026-11-21T12:01:00+00:00", num_pictures=0)]).partition("<table>")[0]

    assert re.findall(r'la-plot-label">([\d:]+)<', bars) == [f"12:00:0{second}" for second in range(2, 7)]


def test_the_table_says_all_that_the_bars_do() -> None:
    html = report([RUN])
    bars, _, table = html.partition("<table>")

    assert 'aria-label="Stage times: 12:00:00: read 5.00 ms, clip 20.00 ms' in bars
    for value in ("25.0", "20.00", "10.00", "5.00", "300", "clip 57%"):
        assert f">{value}<" in table


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "1 failed."),
        ({"was_shared": True}, "requests of other clients"),
        ({"num_reused": 7}, "Already encoded: 7 pictures."),
        ({"wall_s": 10.0}, "The engine was busy 15% of the time"),
    ],
)
def test_the_bottleneck_of_a_run_is_a_sentence(change: dict[str, object], words: str) -> None:
    sentence = sentence_of(replace(RUN, **change))  # type: ignore[arg-type]

    assert sentence.startswith("Bottleneck: clip (encoding pictures), 57%")
    assert words in sentence
