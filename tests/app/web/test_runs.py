"""Stop, and closing the page, cancel what that page waits for, and nothing of others."""

from llama_adapter.app.online.request_handle import RequestHandle
from llama_adapter.app.web.runs import Runs


class Cancelled:
    """Tickets that note their cancelling."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def handle(self, number: int) -> RequestHandle:
        return RequestHandle(number, cancel=lambda handle: self.ids.append(handle.id))


def test_stopping_cancels_what_is_under_way_in_that_tab_alone() -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as chat, runs.open("page", "yes-no") as yes_no, runs.open("other", "chat") as other:
        for number, run in enumerate((chat, yes_no, other)):
            run.add(cancelled.handle(number))

        runs.stop("page", "chat")

        assert cancelled.ids == [0]
        assert chat.is_stopped
        assert not yes_no.is_stopped


def test_closing_a_page_cancels_all_its_tabs() -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as chat, runs.open("page", "yes-no") as yes_no, runs.open("other", "chat") as other:
        for number, run in enumerate((chat, yes_no, other)):
            run.add(cancelled.handle(number))

        runs.stop("page")

        assert cancelled.ids == [0, 1]


def test_a_ticket_that_comes_after_the_stop_is_cancelled_at_once() -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as run:
        runs.stop("page", "chat")
        run.add(cancelled.handle(7))

        assert cancelled.ids == [7]


def test_an_answered_ticket_is_not_cancelled() -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as run:
        handle = cancelled.handle(1)
        run.add(handle)
        run.discard(handle)

    assert cancelled.ids == []


def test_a_new_run_stops_the_one_before_it_and_outlives_its_end() -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as first:
        first.add(cancelled.handle(1))
        with runs.open("page", "chat") as second:
            assert cancelled.ids == [1]
            assert first.is_stopped
            assert not second.is_stopped


def test_nothing_is_remembered_of_runs_that_ended() -> None:
    runs, cancelled = Runs(), Cancelled()
    with runs.open("page", "chat") as run:
        run.add(cancelled.handle(3))
        assert len(runs) == 1

    assert len(runs) == 0
    assert cancelled.ids == [3], "what is left at the end is not waited for by anybody"


def test_stopping_a_page_that_waits_for_nothing_is_harmless() -> None:
    Runs().stop("nobody")
