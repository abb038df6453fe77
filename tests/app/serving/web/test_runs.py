"""Stop, or closing a page, cancels only this page's requests. The figures of pages are kept apart."""

import pytest

from llama_adapter.app.serving.online.request_handle import RequestHandle
from llama_adapter.app.serving.web.runs import MAX_HISTORIES, Runs


class Cancelled:
    """Creates handles, and records which of them are cancelled."""

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
