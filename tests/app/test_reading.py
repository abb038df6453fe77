"""Reading ahead keeps the order, draws no more than it may, and hides no error."""

import threading

import pytest

from app.reading import ReadAhead


def test_results_come_in_the_order_of_the_items() -> None:
    first_may_end = threading.Event()

    def read(number: int) -> int:
        if number == 0:
            assert first_may_end.wait(10)
        elif number == 3:
            first_may_end.set()  # later ones are read while the first one still is
        return number * 10

    with ReadAhead(iter(range(7)), read, ahead=4) as reader:
        assert [reader.take(3), reader.take(3), reader.take(3), reader.take(3)] == [[0, 10, 20], [30, 40, 50], [60], []]


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

    with ReadAhead(iter(range(4)), read, ahead=4, shareable=lambda _: shareable) as reader:
        assert reader.take(2) == [0, 1]
        with pytest.raises(ValueError, match="two"):
            reader.take(1)
        assert reader.take(2) == [3]


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
