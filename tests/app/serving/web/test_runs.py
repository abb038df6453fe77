"""Runs: each page stops and lists its own; figures are computed from counts, and shown as bars and as a table."""

import re
from dataclasses import replace

import pytest

from llama_adapter.app.captioning.stage_clock import STAGES
from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.web.run_history import RunFigures, stage_differences
from llama_adapter.app.serving.web.runs import MAX_HISTORIES, Runs
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


# Pages


class Cancelled:
    def __init__(self) -> None:
        self.ids: list[int] = []

    def handle(self, number: int) -> RequestHandle:
        return RequestHandle(number, cancel=lambda handle: self.ids.append(handle.id))


@pytest.mark.parametrize(("tab", "expected"), [("chat", [0]), (None, [0, 1]), ("throughput", [])])
def test_stopping_cancels_the_runs_of_that_page_and_tab_alone(tab: str | None, expected: list[int]) -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as chat, runs.open("page", "batch") as batch, runs.open("other", "chat") as other:
        for number, run in enumerate((chat, batch, other)):
            run.add(cancelled.handle(number))
        runs.stop("page", tab)

        assert cancelled.ids == expected
        assert [run.is_stopped for run in (chat, batch, other)] == [number in expected for number in range(3)]


def test_a_run_cancels_what_is_left_at_its_end_and_what_comes_later_but_no_answered_request() -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as run:
        answered = cancelled.handle(1)
        run.add(answered)
        run.discard(answered)
        run.add(cancelled.handle(3))
        assert (cancelled.ids, len(runs._runs)) == ([], 1)

    assert (cancelled.ids, len(runs._runs)) == ([3], 0)
    run.add(cancelled.handle(7))
    assert cancelled.ids == [3, 7]


def test_a_new_run_stops_the_one_before_it_and_outlives_its_end() -> None:
    runs, cancelled = Runs(), Cancelled()
    first = runs.open("page", "chat")
    run = first.__enter__()
    run.add(cancelled.handle(1))
    with runs.open("page", "chat") as second:
        first.__exit__(None, None, None)
        assert set(cancelled.ids) == {1}
        assert (run.is_stopped, second.is_stopped, len(runs._runs)) == (True, False, 1)


def test_each_page_has_a_history_of_its_own_until_it_is_closed() -> None:
    runs = Runs()
    history = runs.history("page")

    assert runs.history("page") is history
    assert runs.history("other") is not history
    runs.leave("page")
    assert runs.history("page") is not history
    for number in range(MAX_HISTORIES):
        runs.history(str(number))
    assert len(runs._histories) == MAX_HISTORIES
