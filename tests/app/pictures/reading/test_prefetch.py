"""Prefetching stays within its limits, does not wait for slow readings, and raises every error."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from llama_adapter.app.pictures.reading.prefetch import Prefetcher, num_reading_threads


def held(*numbers: int) -> tuple[Callable[[int], int], threading.Event]:
    """A reading that waits at these numbers until the event is set."""
    may_end = threading.Event()

    def read(number: int) -> int:
        assert number not in numbers or may_end.wait(10)
        return number

    return read, may_end


def drain(reader: Prefetcher[int, Any], taken: list[Any]) -> None:
    while not reader.is_exhausted:
        taken += reader.take(2)


def test_every_item_has_its_result_and_ready_ones_come_oldest_first() -> None:
    with Prefetcher(iter(range(7)), lambda number: number * 10, ahead=4, shareable=lambda _: False) as reader:
        assert [reader.take(3), reader.take(3), reader.take(3), reader.take(3)] == [[0, 10, 20], [30, 40, 50], [60], []]


def test_no_more_items_are_drawn_than_are_to_be_read_ahead() -> None:
    drawn = []

    def source():
        for number in range(100):
            drawn.append((number, threading.current_thread()))
            yield number

    with Prefetcher(source(), lambda number: number, ahead=5) as reader:
        reader.take(2)
        assert len(drawn) == 7
        reader.take(8)
        assert len(drawn) == 15
    assert {thread for _, thread in drawn} == {threading.current_thread()}


@pytest.mark.parametrize("may_wait", [False, True])
def test_items_that_are_not_shareable_are_read_in_the_callers_thread(may_wait: bool) -> None:
    def read(number: int) -> tuple[int, threading.Thread]:
        return number, threading.current_thread()

    taken: list[tuple[int, threading.Thread]] = []
    even: Callable[[int], bool] = lambda number: number % 2 == 0  # noqa: E731 - an argument
    with Prefetcher(iter(range(6)), read, ahead=6, shareable=even, may_wait=may_wait) as reader:
        drain(reader, taken)
    assert sorted(number for number, _ in taken) == list(range(6))
    assert all((thread is threading.current_thread()) == (number % 2 == 1) for number, thread in taken)


@pytest.mark.parametrize("shareable", [True, False])
def test_an_error_comes_up_with_the_item_that_caused_it(shareable: bool) -> None:
    def read(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    with Prefetcher(iter(range(4)), read, ahead=1, shareable=lambda _: shareable, num_threads=1) as reader:
        assert reader.take(2) == [0, 1]
        with pytest.raises(ValueError, match="two"):
            reader.take(1)
        assert reader.take(2) == [3]


def test_what_is_ready_comes_without_waiting_for_the_rest() -> None:
    read, may_end = held(2)
    # Only number 2 is read in a thread; the others are ready at once.
    with Prefetcher(iter(range(5)), read, ahead=5, shareable=lambda number: number == 2) as reader:
        assert reader.take(3, at_least=1) == [0, 1, 3]
        assert reader.take(4, at_least=0) == [4]
        assert reader.take(4, at_least=0) == []
        assert not reader.is_exhausted
        may_end.set()
        assert reader.take(2, at_least=1) == [2]
        assert reader.is_exhausted


def test_whether_enough_is_ready_is_known_without_waiting() -> None:
    read, may_end = held(2, 3)
    with Prefetcher(iter(range(4)), read, ahead=4, num_threads=4) as reader:
        assert reader.has_ready(1)  # nothing is drawn yet, so nothing can be waited for
        assert reader.take(1) == [0]
        reader.take(1)
        assert (reader.has_ready(0), reader.has_ready(1), reader.has_ready(3)) == (True, False, False)
        may_end.set()
        assert sorted(reader.take(2)) == [2, 3]


def test_more_threads_read_while_another_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.app.pictures.reading.prefetch.usable_cpus", lambda: 12)

    assert (num_reading_threads(), num_reading_threads("cpu"), num_reading_threads("npu:0")) == (4, 4, 12)


def test_items_that_hold_many_bytes_are_not_drawn_far_ahead() -> None:
    drawn = []

    def source():
        for size in (40, 40, 40, 500, 1, 1):
            drawn.append(size)
            yield size

    with Prefetcher(source(), lambda size: size, ahead=100, num_bytes=lambda size: size, ahead_bytes=100) as reader:
        assert reader.take(0) == []
        assert drawn == [40, 40, 40]  # the third one exceeds the limit
        assert reader.take(1) == [40]
        assert drawn == [40, 40, 40, 500]
        assert reader.take(10) == [40, 40, 500, 1, 1]  # the requested number is read even beyond the limit
        assert reader.is_exhausted


def test_a_stopped_reader_does_not_wait_for_readings_that_hang() -> None:
    (wait, may_end), stopped = held(0), threading.Event()

    def read(number: int) -> int:
        wait(number)
        stopped.set()
        return number

    with Prefetcher(iter(range(2)), read, ahead=2, num_threads=2, stop=stopped.is_set) as reader:
        assert reader.take(2) == [1]
        assert not reader.is_exhausted
        may_end.set()


def test_leaving_does_not_wait_for_readings_that_hang() -> None:
    may_end = threading.Event()
    has_begun = threading.Event()

    def read(number: int) -> bool:
        has_begun.set()
        return may_end.wait(60)

    with Prefetcher(iter(range(9)), read, ahead=9, num_threads=1) as reader:
        assert reader.take(1, at_least=0) == []
        assert has_begun.wait(10)

    assert not may_end.is_set()  # leaving did not wait for the reading
    may_end.set()
    reader.close()


def test_closing_drops_what_was_not_taken() -> None:
    begun: list[int] = []
    gate = threading.Event()

    def read(number: int) -> None:
        begun.append(number)
        gate.wait(10)

    reader = Prefetcher(iter(range(100)), read, ahead=50)
    filler = threading.Thread(target=lambda: reader.take(0))
    filler.start()
    filler.join()
    gate.set()
    reader.close()
    reader.close()
    assert len(begun) <= 50
    assert not any(thread.name.startswith("read_") and thread.is_alive() for thread in threading.enumerate())


def test_at_the_end_a_reading_that_hangs_delays_the_rest_for_a_second_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.app.pictures.reading.prefetch._PATIENCE_S", 0.0)
    read, may_end = held(0)
    with Prefetcher(iter(range(3)), read, ahead=3, num_threads=2) as reader:
        taken = reader.take(3)
        while len(taken) < 2:
            taken += reader.take(3)
        assert sorted(taken) == [1, 2]
        assert not reader.is_exhausted
        may_end.set()
        assert reader.take(3) == [0]


class SlowSource:
    """Yields the numbers that are put into it, raises the exceptions, and ends with None."""

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.is_closed = threading.Event()
        self._given: SimpleQueue[int | BaseException | None] = SimpleQueue()

    def give(self, *items: int | BaseException | None) -> None:
        for item in items:
            self._given.put(item)

    def __call__(self) -> Iterator[int]:
        try:
            while (item := self._given.get()) is not None:
                self.threads.add(threading.current_thread())
                if isinstance(item, BaseException):
                    raise item
                self.drawn.append(item)
                yield item
        finally:
            self.is_closed.set()


@pytest.fixture
def slow() -> Iterator[SlowSource]:
    source = SlowSource()
    yield source
    source.give(None)


def test_what_was_drawn_comes_while_the_source_is_waited_for(slow: SlowSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.app.pictures.reading.prefetch._PATIENCE_S", 60.0)
    too_late = threading.Timer(10.0, slow.give, args=(98, 99, None))  # these come only if a take waits for more
    too_late.start()
    with Prefetcher(slow(), lambda number: number * 10, ahead=4, may_wait=True) as reader:
        assert reader.take(3, at_least=0) == []
        slow.give(1)
        assert reader.take(3) == [10]
        assert reader.take(3, at_least=0) == []
        assert not reader.is_exhausted
        too_late.cancel()
        slow.give(2, 3, None)
        taken: list[int] = []
        drain(reader, taken)
        assert taken == [20, 30]
    assert slow.is_closed.wait(10)
    assert threading.current_thread() not in slow.threads


def test_a_source_that_is_drawn_apart_keeps_its_order_and_bounds(slow: SlowSource) -> None:
    slow.give(40, 40, 40, 500, 1, 1, None)
    bounds: Any = {"ahead": 100, "num_bytes": lambda size: size, "ahead_bytes": 100}
    with Prefetcher(slow(), lambda size: size, num_threads=1, may_wait=True, **bounds) as reader:
        taken = reader.take(1)
        while not reader.is_exhausted:
            drawn = list(slow.drawn)
            assert sum(drawn) - sum(taken) < 100 + drawn[-1]  # the last one may exceed the limit
            taken += reader.take(1)
    assert taken == slow.drawn == [40, 40, 40, 500, 1, 1]


def test_no_more_are_drawn_apart_than_are_to_be_read_ahead(slow: SlowSource) -> None:
    slow.give(*range(100))
    reader = Prefetcher(slow(), lambda number: number, ahead=5, may_wait=True)
    taken = [*reader.take(2), *reader.take(1)]
    reader.close()
    assert len(slow.drawn) <= len(taken) + 5
    assert slow.is_closed.is_set()
    assert not any(thread.is_alive() for thread in slow.threads)


@pytest.mark.parametrize(("may_wait", "error"), [(True, OSError), (False, OSError), (True, SystemExit)])
def test_an_error_of_the_source_comes_up_once_all_before_it_is_taken(
    slow: SlowSource, may_wait: bool, error: type[BaseException]
) -> None:
    slow.give(1, 2, error("gone"))
    with Prefetcher(slow(), lambda number: number, ahead=5, num_threads=1, may_wait=may_wait) as reader:
        taken: list[int] = []
        with pytest.raises(error, match="gone"):
            drain(reader, taken)
        assert taken == [1, 2]
        assert reader.is_exhausted
        assert reader.take(1) == []


def test_an_error_of_the_source_waits_while_nothing_is_required(slow: SlowSource) -> None:
    slow.give(OSError("gone"))
    with Prefetcher(slow(), lambda number: number, ahead=1) as reader:
        assert reader.take(1, at_least=0) == []
        assert not reader.is_exhausted
        with pytest.raises(OSError, match="gone"):
            reader.take(1)


def test_a_stopped_reader_leaves_a_source_that_hangs(slow: SlowSource) -> None:
    stopped = threading.Event()
    threading.Timer(0.05, stopped.set).start()
    with Prefetcher(slow(), lambda number: number, ahead=2, may_wait=True, stop=stopped.is_set) as reader:
        assert reader.take(2) == []
    assert not slow.is_closed.is_set()
    slow.give(1)  # this comes too late; it is dropped, and the source is closed
    assert slow.is_closed.wait(10)
