"""Reading ahead draws no more than it may, lets nothing wait for what takes long, and hides no error."""

import threading

import pytest

from app.reading.ahead import ReadAhead


def test_every_item_has_its_result_and_ready_ones_come_oldest_first() -> None:
    with ReadAhead(iter(range(7)), lambda number: number * 10, ahead=4, shareable=lambda _: False) as reader:
        assert [reader.take(3), reader.take(3), reader.take(3), reader.take(3)] == [[0, 10, 20], [30, 40, 50], [60], []]


def test_one_that_takes_long_holds_no_other_back() -> None:
    may_end = threading.Event()

    def read(number: int) -> int:
        assert number != 0 or may_end.wait(10)
        return number

    with ReadAhead(iter(range(7)), read, ahead=4, num_threads=2) as reader:
        assert sorted([*reader.take(3), *reader.take(3)]) == [1, 2, 3, 4, 5, 6]
        may_end.set()
        assert reader.take(3) == [0]


def test_no_more_items_are_drawn_than_are_to_be_read_ahead() -> None:
    drawn = []

    def source():
        for number in range(100):
            drawn.append((number, threading.current_thread()))
            yield number

    with ReadAhead(source(), lambda number: number, ahead=5) as reader:
        reader.take(2)
        assert len(drawn) == 7
        reader.take(8)
        assert len(drawn) == 15
    assert {thread for _, thread in drawn} == {threading.current_thread()}


def test_what_must_not_be_shared_is_read_in_the_callers_thread() -> None:
    threads: dict[int, threading.Thread] = {}

    def read(number: int) -> None:
        threads[number] = threading.current_thread()

    with ReadAhead(iter(range(6)), read, ahead=6, shareable=lambda number: number % 2 == 0) as reader:
        reader.take(6)
    assert all((threads[number] is threading.current_thread()) == (number % 2 == 1) for number in range(6))


@pytest.mark.parametrize("shareable", [True, False])
def test_an_error_comes_up_with_the_item_that_caused_it(shareable: bool) -> None:
    def read(number: int) -> int:
        if number == 2:
            raise ValueError("two")
        return number

    with ReadAhead(iter(range(4)), read, ahead=1, shareable=lambda _: shareable, num_threads=1) as reader:
        assert reader.take(2) == [0, 1]
        with pytest.raises(ValueError, match="two"):
            reader.take(1)
        assert reader.take(2) == [3]


def test_what_is_ready_comes_without_waiting_for_the_rest() -> None:
    may_end = threading.Event()

    def read(number: int) -> int:
        assert number != 2 or may_end.wait(10)
        return number

    # Only number 2 is read in a thread: the others are ready at once.
    with ReadAhead(iter(range(5)), read, ahead=5, shareable=lambda number: number == 2) as reader:
        assert reader.take(3, at_least=1) == [0, 1, 3]
        assert reader.take(4, at_least=0) == [4]
        assert reader.take(4, at_least=0) == []
        assert not reader.is_exhausted
        may_end.set()
        assert reader.take(2, at_least=1) == [2]
        assert reader.is_exhausted


def test_items_that_hold_many_bytes_are_not_drawn_far_ahead() -> None:
    drawn = []

    def source():
        for size in (40, 40, 40, 500, 1, 1):
            drawn.append(size)
            yield size

    with ReadAhead(source(), lambda size: size, ahead=100, num_bytes=lambda size: size, ahead_bytes=100) as reader:
        assert reader.take(0) == []
        assert drawn == [40, 40, 40]  # with the third they are too many
        assert reader.take(1) == [40]
        assert drawn == [40, 40, 40, 500]
        assert reader.take(10) == [40, 40, 500, 1, 1]  # as many as are wanted come all the same
        assert reader.is_exhausted


def test_as_many_threads_read_as_were_asked_for() -> None:
    barrier = threading.Barrier(3)

    with ReadAhead(iter(range(3)), lambda number: barrier.wait(10), ahead=3, num_threads=3) as reader:
        assert sorted(reader.take(3)) == [0, 1, 2]


def test_who_is_to_stop_waits_for_nothing_that_hangs() -> None:
    may_end, stopped = threading.Event(), threading.Event()

    def read(number: int) -> int:
        if number == 0:
            assert may_end.wait(60)
        stopped.set()
        return number

    with ReadAhead(iter(range(2)), read, ahead=2, num_threads=2, stop=stopped.is_set) as reader:
        assert reader.take(2) == [1]
        assert not reader.is_exhausted
        may_end.set()


def test_leaving_waits_for_nothing_that_hangs() -> None:
    may_end = threading.Event()
    has_begun = threading.Event()

    def read(number: int) -> bool:
        has_begun.set()
        return may_end.wait(60)

    with ReadAhead(iter(range(9)), read, ahead=9, num_threads=1) as reader:
        assert reader.take(1, at_least=0) == []
        assert has_begun.wait(10)

    assert not may_end.is_set()  # and yet it was left
    may_end.set()
    reader.close()


def test_closing_lets_go_of_what_was_not_taken() -> None:
    begun: list[int] = []
    gate = threading.Event()

    def read(number: int) -> None:
        begun.append(number)
        gate.wait(10)

    reader = ReadAhead(iter(range(100)), read, ahead=50)
    filler = threading.Thread(target=lambda: reader.take(0))
    filler.start()
    filler.join()
    gate.set()
    reader.close()
    reader.close()
    assert len(begun) <= 50
    assert not any(thread.name.startswith("read_") and thread.is_alive() for thread in threading.enumerate())


def test_at_the_end_what_hangs_keeps_the_rest_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.reading.ahead._PATIENCE_S", 0.0)
    may_end = threading.Event()

    def read(number: int) -> int:
        assert number != 0 or may_end.wait(10)
        return number

    with ReadAhead(iter(range(3)), read, ahead=3, num_threads=2) as reader:
        taken = reader.take(3)
        while len(taken) < 2:
            taken += reader.take(3)
        assert sorted(taken) == [1, 2]
        assert not reader.is_exhausted
        may_end.set()
        assert reader.take(3) == [0]
