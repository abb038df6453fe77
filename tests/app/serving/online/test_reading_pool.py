"""Slow pictures wait only for other slow pictures, clients take turns, and the pool can always be closed."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.reading.process import KeepWaiting
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.app.serving.online.reading_pool import READING_BUSY, ReadingDroppedError, ReadingPool, ReadingTask
from llama_adapter.app.serving.online.types import ServiceLimits
from tests.app.serving.online.waiting import WAIT_S, wait_for

LIMITS = ServiceLimits(slow_after_s=0.05, max_slow_pictures=1, max_slow_waiting=1)


class StubProcess:
    """The part of a reading process that `keep_waiting` uses."""

    def __init__(self) -> None:
        self.is_spent = False

    def slow_down(self) -> None:
        self.is_spent = True


class StubReader:
    """Reads a picture at once. If its bytes begin with `slow` or `held`, it waits until the picture is released.

    A `held` picture never counts as slow.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._let_go: set[str] = set()
        self._is_closed = False
        self.spent: list[str] = []  # pictures whose process was given a lower priority

    def read(
        self,
        source: bytes,
        *,
        name: str | None,
        wants_pixels: Callable[[str], bool],
        side: int | None,
        keep_waiting: KeepWaiting,
    ) -> PictureReading:
        assert name is not None
        process, started = StubProcess(), time.perf_counter()
        self.begun.append(name)
        while source.startswith((b"slow", b"held")) and name not in self._let_go:
            if self._is_closed:
                raise RuntimeError("closed")
            time.sleep(0.005)
            if source.startswith(b"slow"):
                keep_waiting(process, time.perf_counter() - started)  # type: ignore[arg-type]
            if process.is_spent and name not in self.spent:
                self.spent.append(name)
        return PictureReading(digest=name, pixels=None, error=None, elapsed_ms=0.0)

    def let_go(self, name: str) -> None:
        self._let_go.add(name)

    def start(self) -> None:
        pass

    def close(self) -> None:
        self._is_closed = True


class Pool:
    """A pool with one fast and one slow place, and its results."""

    def __init__(self) -> None:
        self.reader = StubReader()
        self.pool = ReadingPool(self.reader, limits=LIMITS, num_fast=1)
        self.delivered: dict[str, PictureReading | Exception] = {}

    def submit(self, name: str, *, is_wanted: Callable[[], bool] = lambda: True, client: str = "") -> ReadingTask:
        def deliver(reading: PictureReading | Exception) -> None:
            self.delivered[name] = reading

        task = ReadingTask(
            picture=name.encode(), name=name, client=client, is_wanted=is_wanted, deliver=deliver, side=None
        )
        self.pool.submit(task)
        return task

    def error_of(self, name: str) -> AnswerError | None:
        reading = self.delivered[name]
        assert isinstance(reading, PictureReading)
        return reading.error


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.pool.close(timeout_s=WAIT_S)


def test_a_slow_picture_leaves_its_place_to_others(pool: Pool) -> None:
    pool.submit("slow 1")
    wait_for(lambda: pool.reader.spent == ["slow 1"])
    pool.submit("good")
    wait_for(lambda: "good" in pool.delivered)

    assert "slow 1" not in pool.delivered
    assert pool.pool.counts() == (1, 1)
    pool.reader.let_go("slow 1")
    wait_for(lambda: "slow 1" in pool.delivered)
    assert pool.reader.begun == ["slow 1", "good"]


def test_full_slow_lane_postpones_slow_pictures(pool: Pool) -> None:
    pool.submit("slow 1")
    wait_for(lambda: pool.reader.spent == ["slow 1"])
    pool.submit("slow 2")
    wait_for(lambda: "slow 2" in pool.reader.begun)
    pool.submit("good")
    wait_for(lambda: "good" in pool.delivered)

    assert pool.reader.begun == ["slow 1", "slow 2", "good"]
    pool.reader.let_go("slow 1")
    wait_for(lambda: pool.reader.begun[3:] == ["slow 2"])
    pool.reader.let_go("slow 2")
    wait_for(lambda: "slow 2" in pool.delivered)
    assert pool.error_of("slow 2") is None


def test_slow_picture_keeps_its_place_while_nobody_waits(pool: Pool) -> None:
    for name in ("slow 1", "slow 2"):
        pool.submit(name)
    wait_for(lambda: pool.pool.counts()[1] == 2)  # the second slow one hangs

    pool.reader.let_go("slow 2")
    wait_for(lambda: "slow 2" in pool.delivered)
    assert pool.reader.begun == ["slow 1", "slow 2"]


def test_too_many_slow_pictures_are_refused(pool: Pool) -> None:
    for number in range(1, 4):
        pool.submit(f"slow {number}")
    pool.submit("good")
    wait_for(lambda: {"slow 3", "good"} <= pool.delivered.keys())

    error = pool.error_of("slow 3")
    assert error is not None
    assert error.code == READING_BUSY
    assert pool.error_of("good") is None


def test_cancelled_picture_frees_its_place(pool: Pool) -> None:
    wanted = {"slow 1"}
    pool.submit("slow 1", is_wanted=lambda: "slow 1" in wanted)
    wait_for(lambda: pool.reader.begun)
    wanted.clear()
    wait_for(lambda: pool.delivered)

    assert isinstance(pool.delivered["slow 1"], ReadingDroppedError)
    assert pool.pool.counts()[0] == 0


def test_a_picture_that_is_discarded_while_it_waits_is_not_read(pool: Pool) -> None:
    pool.submit("held")
    wait_for(lambda: pool.reader.begun)
    late = pool.submit("late", client="another")
    pool.pool.discard(late)
    pool.submit("good")
    pool.reader.let_go("held")
    wait_for(lambda: "good" in pool.delivered)

    assert "late" not in pool.reader.begun


def test_clients_take_turns(pool: Pool) -> None:
    pool.submit("held")
    wait_for(lambda: pool.reader.begun)
    for client, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1")):
        pool.submit(name, client=client)
    pool.reader.let_go("held")
    wait_for(lambda: len(pool.delivered) == 5)

    assert pool.reader.begun[1:] == ["a1", "b1", "a2", "a3"]


def test_close_ends_hung_readings_and_drops_waiting_ones(pool: Pool) -> None:
    for number in range(4):
        pool.submit(f"slow {number}")
    wait_for(lambda: pool.pool.counts()[0] == 2)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("read ")]
    pool.pool.close(timeout_s=WAIT_S)

    assert threads
    assert not any(thread.is_alive() for thread in pool.pool._threads)
    assert sorted(pool.delivered) == [f"slow {number}" for number in range(4)]
    pool.submit("late")
    assert all(isinstance(pool.delivered[name], Exception) for name in ("late", "slow 2", "slow 3"))


def test_cancelled_slow_picture_is_not_queued_again(pool: Pool) -> None:
    wanted = {"slow 2"}
    pool.submit("slow 1")
    wait_for(lambda: pool.reader.spent == ["slow 1"])
    pool.submit("slow 2", is_wanted=lambda: "slow 2" in wanted)
    wait_for(lambda: "slow 2" in pool.reader.begun)
    wanted.clear()
    pool.submit("good")
    wait_for(lambda: {"slow 2", "good"} <= pool.delivered.keys())

    assert isinstance(pool.delivered["slow 2"], ReadingDroppedError)
    assert pool.pool.num_slow_waiting == 0
