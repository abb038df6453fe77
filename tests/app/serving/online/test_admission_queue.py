"""The order of waiting requests, and the limits on them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.serving.online.admission_queue import AdmissionQueue, Entry
from llama_adapter.app.serving.online.fair_queue import FairQueue
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.online.types import BusyError, ServiceLimits


def add(queue: AdmissionQueue, number: int, **options: Any) -> None:
    ask = Ask(picture=b"12345", prompt="What?", **options)
    queue.check(ask)
    handle = RequestHandle(number, cancel=lambda handle: None)
    entry = Entry(ask=ask, handle=handle, prompt=None, limit_s=1.0)  # type: ignore[arg-type]
    queue.add(entry)
    queue.make_ready(entry)


def test_clients_take_turns() -> None:
    queue = AdmissionQueue(ServiceLimits())
    for number, client in enumerate("aaab"):
        add(queue, number, client=client)

    assert [entry.ask.client for entry in queue.take_ready(100, most_background=0)] == [*"abaa"]


def test_background_requests_go_last_but_do_not_wait_for_ever() -> None:
    queue = AdmissionQueue(ServiceLimits())
    for number in range(20):
        add(queue, number, is_background=number < 4, client=str(number))

    order = [entry.ask.is_background for entry in queue.take_ready(100, most_background=3)]

    assert order == [*([False] * 7 + [True]) * 2, False, False, True]
    assert queue.take_ready(100, most_background=0) == []
    assert len(queue.take_ready(100, most_background=1)) == 1
    assert not queue.has_ready


@pytest.mark.parametrize("limits", [ServiceLimits(max_waiting=2), ServiceLimits(max_waiting_bytes=10)])
def test_background_requests_leave_the_queue_to_others(limits: ServiceLimits) -> None:
    queue = AdmissionQueue(limits)
    for number in range(3):
        add(queue, number, is_background=True, client="batch")
    for number in range(2):
        add(queue, number, client="other")
    with pytest.raises(BusyError, match="full"):
        add(queue, 3, client="another")

    assert len(queue.take_ready(100, most_background=100)) == 5
    add(queue, 3, client="another")  # there is room again


def test_background_requests_count_towards_the_limit_of_their_client_and_are_not_refused() -> None:
    queue = AdmissionQueue(ServiceLimits(max_waiting_per_client=2))
    add(queue, 0, client="a", is_background=True)
    add(queue, 1, client="a")
    with pytest.raises(BusyError, match="2 requests of this client"):
        add(queue, 2, client="a")
    add(queue, 3, client="a", is_background=True)
    add(queue, 4, client="b")

    assert len(queue.take_ready(100, most_background=100)) == 4
    add(queue, 5, client="a")


def test_an_idle_time_does_not_lengthen_the_wait_of_refused_requests() -> None:
    queue = AdmissionQueue(ServiceLimits(max_waiting=2))
    for started, finished in ((0.0, 2.0), (2.0, 4.0), (3600.0, 3602.0)):
        queue.note_start(started)
        queue.note_finish(finished)
    for _ in range(2):
        add(queue, 0)
    with pytest.raises(BusyError) as refused:
        add(queue, 0)
    assert refused.value.retry_after_s == 2.0  # for one of two


def filled(items: list[str]) -> FairQueue[str]:
    """A queue of items; an item is named by its owner's letter and a number."""
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.put(item, owner=item[0])
    return queue


def test_owners_take_turns_and_a_late_one_is_next() -> None:
    queue = filled(["a1", "a2", "a3", "b1", "c1", "c2"])
    assert [queue.take() for _ in range(7)] == ["a1", "b1", "c1", "a2", "c2", "a3", None]

    queue = filled([f"a{number}" for number in range(100)])
    queue.take()
    queue.put("b1", owner="b")
    assert [queue.take(), queue.take()] == ["a1", "b1"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "take", "remove"])), max_size=60))
def test_each_owner_has_a_fifo_queue(steps: list[tuple[str, str]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    expected: dict[str, list[tuple[str, int]]] = {"a": [], "b": [], "c": []}
    for number, (owner, step) in enumerate(steps):
        if step == "put":
            queue.put((owner, number), owner=owner)
            expected[owner].append((owner, number))
        elif step == "remove" and expected[owner]:
            item = expected[owner].pop()
            for _ in range(2):  # the second time, the item is not in the queue
                queue.remove(item, owner=owner)
        elif step == "take":
            taken = queue.take()
            assert (taken is None) == (not any(expected.values()))
            if taken is not None:
                assert taken == expected[taken[0]].pop(0)
        assert len(queue) == sum(map(len, expected.values()))
