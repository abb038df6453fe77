"""The queue over replicas, with replicas that behave as a test defines; without Ray and without a model."""

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from llama_adapter.app.captioning.tasks.answers import Answer, Event, TextDelta
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.online import base
from llama_adapter.app.serving.online.request_handle import Ask
from llama_adapter.app.serving.online.types import BusyError, Observer, ServiceLimits, UnavailableError
from llama_adapter.app.serving.replicas import service as replicated
from llama_adapter.app.serving.replicas.service import MAX_TRIES, ReplicatedService
from llama_adapter.app.serving.replicas.types import ReplicaLostError, ReplicaReport
from llama_adapter.llm.errors import PromptError
from tests.app.serving.http_api.live import answer, failed, status
from tests.app.serving.online.waiting import WAIT_S, wait_for
from tests.app.toys import INFO

Groups = AsyncIterator[Sequence[Event]]


def report(name: str, state: str = "ready") -> ReplicaReport:
    return ReplicaReport(
        name=name, host="here", pid=1, spec=CaptionerSpec(batch_size=4), info=INFO, status=status(state)
    )


async def at_once(ask: Ask) -> Groups:
    yield [TextDelta(index=0, text="red")]
    yield [TextDelta(index=0, text=" star"), answer("red star", ms={"queue": 1.0, "total": 2.0})]


class StubReplicas:
    """Answers by calling `behave`; records the questions and their sessions."""

    def __init__(self, behave: Callable[[Ask], Groups] = at_once, *, names: str = "ab", most: int = 2) -> None:
        self.behave = behave
        self.max_ongoing_requests = most
        self.found: Sequence[ReplicaReport] = [report(name) for name in names]
        self.asked: list[tuple[Ask, str]] = []
        self.num_now = self.num_closed = 0
        self.families: Mapping[str, Any] = {}

    async def ask(self, ask: Ask, *, session: str) -> Groups:
        self.asked.append((ask, session))
        self.num_now += 1
        try:
            async for group in self.behave(ask):
                yield group
        finally:
            self.num_now -= 1
            self.num_closed += 1

    async def reports(self) -> Sequence[ReplicaReport]:
        return self.found

    async def metrics(self) -> Mapping[str, Any]:
        return self.families


@contextmanager
def service_of(
    replicas: StubReplicas, *, observer: Observer | None = None, **limits: Any
) -> Iterator[ReplicatedService]:
    with closing(ReplicatedService(replicas, limits=ServiceLimits(**limits), observer=observer)) as service:
        service.start()
        service.wait_until_ready(WAIT_S)
        yield service


class Gate:
    def __init__(self) -> None:
        self.is_open = threading.Event()

    async def __call__(self, ask: Ask) -> Groups:
        while not self.is_open.is_set():
            await asyncio.sleep(0.005)
        yield [answer()]


def ask(picture: bytes | None = b"picture", **fields: Any) -> Ask:
    return Ask(picture=picture, prompt=("What?", None), **fields)


def failures(*times: Exception | Sequence[Event]) -> Callable[[Ask], Groups]:
    """The first requests end as given, in this order; later requests are answered."""
    left = list(times)

    async def behave(ask: Ask) -> Groups:
        if not left:
            async for group in at_once(ask):
                yield group
            return
        match left.pop(0):
            case Exception() as error:
                raise error
            case events:
                yield events  # type: ignore[misc]
        raise ReplicaLostError("in the middle")

    return behave


def error_of(found: Answer) -> str:
    assert found.error is not None
    return found.error.code


def test_a_request_is_answered_with_its_own_number_and_the_time_that_it_waited_here() -> None:
    with service_of(StubReplicas()) as service:
        first, second = service.submit(ask()), service.submit(ask())
        events = [*first.events()], [*second.events()]

    for number, found in enumerate(events, start=1):
        assert [event.text for event in found] == ["red", " star", "red star"]
        assert {event.index for event in found} == {number}
    last = events[0][-1]
    assert isinstance(last, Answer)
    assert last.ms["queue"] > 1.0
    assert last.ms["total"] > 2.0


def test_a_picture_is_a_session_and_a_text_is_none() -> None:
    replicas = StubReplicas()
    with service_of(replicas) as service:
        for picture in (b"one", b"two", b"one", None):
            service.submit(ask(picture)).result()

    one, two = (hashlib.sha256(picture).hexdigest() for picture in (b"one", b"two"))
    assert [session for _, session in replicas.asked] == [one, two, one, ""]


GONE, RED, RESTARTING = ReplicaLostError("gone"), TextDelta(index=0, text="red"), failed("unavailable")


@pytest.mark.parametrize(
    ("endings", "with_pieces", "is_lost", "code", "sessions"),
    [
        ([GONE], True, True, None, [True, True]),  # the ring without the lost replica has the next one
        ([GONE], False, True, None, [True, True]),
        ([GONE] * 100, True, True, "replica_lost", [True] * MAX_TRIES),
        ([[RED]], True, True, "replica_lost", [True]),
        ([[RESTARTING]], True, False, None, [True, False]),  # its engine or a rank is lost: any replica may answer
        ([[RED, RESTARTING]], True, False, "unavailable", [True]),
        ([TimeoutError()], True, False, "internal_error", [True]),  # not this service's own deadline
    ],
)
def test_a_request_whose_replica_is_lost_is_tried_elsewhere_unless_its_text_has_begun(
    endings: list[Any], with_pieces: bool, is_lost: bool, code: str | None, sessions: list[bool]
) -> None:
    replicas = StubReplicas(failures(*endings))
    with service_of(replicas) as service:
        found = [*service.submit(ask(with_pieces=with_pieces)).events()]
        assert ("ReplicaLostError" in str(service.status().last_error)) is is_lost

    last = found[-1]
    assert isinstance(last, Answer)
    assert (last.error and last.error.code) == code
    texts = {None: ["red", " star"], "unavailable": ["red"], "replica_lost": ["red"] * (GONE not in endings)}
    assert [event.text for event in found[:-1]] == texts.get(code, [])
    assert [bool(session) for _, session in replicas.asked] == sessions
    assert len({session for _, session in replicas.asked} - {""}) == 1


def test_requests_wait_here_until_a_replica_has_room_and_clients_take_turns() -> None:
    gate = Gate()
    replicas = StubReplicas(gate, names="a", most=2)
    with service_of(replicas) as service:
        handles = [service.submit(ask(client=client)) for client in "aaaaab"]
        wait_for(lambda: replicas.num_now == 2)
        assert (service.status().num_running, service.status().num_waiting) == (2, 4)
        gate.is_open.set()
        assert all(handle.result().error is None for handle in handles)
        assert service.wait_until_idle(WAIT_S)

    clients = [one.client for one, _ in replicas.asked]
    assert sorted(clients) == [*"aaaaab"]
    assert "b" in clients[:4], "the other client does not wait behind all of the first one's"


def test_a_full_queue_and_long_texts_are_refused() -> None:
    replicas = StubReplicas(Gate(), names="a", most=1)
    with service_of(replicas, max_waiting_per_client=2, max_prompt_chars=10) as service:
        service.submit(ask())
        wait_for(lambda: service.status().num_running == 1)
        service.submit(ask())
        service.submit(ask())
        with pytest.raises(BusyError, match="of this client"):
            service.submit(ask())
        with pytest.raises(PromptError, match="10 is the limit"):
            service.submit(Ask(picture=None, prompt=("too long a text", None)))


def test_cancelling_ends_a_request_here_and_in_its_replica() -> None:
    replicas = StubReplicas(Gate(), names="a", most=1)
    with service_of(replicas) as service:
        running = service.submit(ask())
        wait_for(lambda: replicas.num_now == 1)
        waiting = service.submit(ask())
        waiting.cancel()
        assert error_of(waiting.result()) == "cancelled"
        running.cancel()
        assert error_of(running.result()) == "cancelled"
        wait_for(lambda: replicas.num_closed == 1)
        assert len(replicas.asked) == 1
        running.cancel()  # no effect


def test_a_request_that_is_cancelled_before_its_task_begins_is_answered_and_leaves_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with service_of(StubReplicas(names="a", most=1), timeout_s=WAIT_S) as service:
        take_ready = service._queue.take_ready

        def take_and_cancel(count: int, *, most_background: int) -> list[Any]:
            taken = take_ready(count, most_background=most_background)
            for entry in taken:
                entry.handle.cancel()
            return taken

        with monkeypatch.context() as patched:
            patched.setattr(service._queue, "take_ready", take_and_cancel)
            assert error_of(service.submit(ask()).result()) == "cancelled"
        assert service.submit(ask()).result().error is None


def test_text_that_comes_after_the_end_of_a_request_is_no_first_token() -> None:
    seen: list[str] = []

    class Noting(Observer):
        def first_token(self, seconds: float) -> None:
            seen.append("first token")

        def finished(self, answer: Answer, seconds: float) -> None:
            seen.append("finished")

    async def behave(ask: Ask) -> Groups:
        service._end_all()  # as another thread may do at any time
        async for group in at_once(ask):
            yield group

    replicas = StubReplicas(behave)
    with service_of(replicas, observer=Noting()) as service:
        assert error_of(service.submit(ask()).result()) == "cancelled"
        wait_for(lambda: replicas.num_closed == 1)
    assert seen == ["finished"]


def test_a_late_request_has_an_error_while_it_waits_and_the_replica_knows_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "LATE_S", WAIT_S)
    gate = Gate()
    replicas = StubReplicas(gate, names="a", most=1)
    with service_of(replicas, timeout_s=30.0) as service:
        running = service.submit(ask(timeout_s=20.0))
        wait_for(lambda: replicas.num_now == 1)
        late = service.submit(ask(timeout_s=0.05)).result()
        assert error_of(late) == "deadline"
        assert late.ms["total"] < 1e3 * WAIT_S / 3, "only a request that a replica has gets more time"
        gate.is_open.set()
        assert running.result().error is None

    left_s = replicas.asked[0][0].timeout_s
    assert left_s is not None
    assert 0 < left_s <= 20.0


def test_a_late_request_is_given_to_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated, "WATCH_S", 10 * WAIT_S)  # no check of deadlines comes before there is room
    gate = Gate()
    replicas = StubReplicas(gate, names="a", most=1)
    with service_of(replicas) as service:
        running, waiting = service.submit(ask()), service.submit(ask(timeout_s=20.0))
        wait_for(lambda: replicas.num_now == 1)
        service._entries[waiting.id].deadline = time.perf_counter()
        gate.is_open.set()
        assert running.result().error is None
        assert waiting.result().error == base.late(20.0)
        assert len(replicas.asked) == 1


def test_a_request_that_is_late_when_its_replica_is_lost_is_given_to_no_other() -> None:
    async def lost_in_time(asked: Ask) -> Groups:
        (entry,) = service._entries.values()
        entry.deadline = time.perf_counter()
        raise GONE
        yield  # makes this a generator

    replicas = StubReplicas(lost_in_time)
    with service_of(replicas) as service:
        assert service.submit(ask(timeout_s=20.0)).result().error == base.late(20.0)
    assert len(replicas.asked) == 1


def test_a_late_request_may_end_in_its_replica_for_some_time_and_is_then_ended_there_and_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "LATE_S", 10 * WAIT_S)
    gate = Gate()
    replicas = StubReplicas(gate)
    with service_of(replicas) as service:
        running = service.submit(ask())
        wait_for(lambda: replicas.num_now == 1)
        service._entries[running.id].deadline = time.perf_counter()
        service._fail_late()
        gate.is_open.set()
        assert running.result().error is None

        gate.is_open.clear()
        monkeypatch.setattr(base, "LATE_S", 0.0)
        stuck = service.submit(ask(timeout_s=20.0))
        wait_for(lambda: replicas.num_now == 1)
        service._entries[stuck.id].deadline = time.perf_counter()
        assert stuck.result().error == base.late(20.0)
        wait_for(lambda: replicas.num_closed == 2)


def test_an_error_of_a_replica_at_the_deadline_names_the_time_that_the_client_allows() -> None:
    with service_of(StubReplicas(failures([failed("deadline", "red")]))) as service:
        found = service.submit(ask(timeout_s=20.0)).result()
    assert (found.text, found.error) == ("red", base.late(20.0))


def test_without_a_replica_that_is_ready_requests_are_refused_until_one_is() -> None:
    replicas = StubReplicas()
    with service_of(replicas) as service:
        replicas.found = [report("a", "restarting")]
        wait_for(lambda: service.status().state == "restarting")
        with pytest.raises(UnavailableError, match="restarting"):
            service.submit(ask())
        assert service.status().restarts == 1, "replica b has ended"
        replicas.found = [report("a")]
        wait_for(lambda: service.status().state == "ready")
        assert service.submit(ask()).result().error is None


def test_what_is_accepted_is_answered_while_draining_and_the_rest_is_cancelled_at_the_end() -> None:
    gate = Gate()
    replicas = StubReplicas(gate, names="a", most=1)
    with service_of(replicas) as service:
        running, waiting = service.submit(ask()), service.submit(ask())
        service.drain()
        with pytest.raises(UnavailableError, match="shutting down"):
            service.submit(ask())
        assert not service.wait_until_idle(0)
        gate.is_open.set()
        assert running.result().error is waiting.result().error is None
        assert service.wait_until_idle(WAIT_S)

    stuck = StubReplicas(Gate())
    with service_of(stuck) as service:
        left = service.submit(ask())
        wait_for(lambda: stuck.num_now == 1)
    assert error_of(left.result()) == "cancelled"
    assert stuck.num_now == 0


def test_metrics_of_replicas_have_their_names_beside_those_of_the_service() -> None:
    seen = Metrics()
    seen.finished(answer("red star"), 0.5)
    replicas = StubReplicas()
    replicas.families = {"a": seen.families(), "b": Metrics().families()}
    metrics = Metrics()
    with service_of(replicas, observer=metrics) as service:
        metrics.watch(service)
        metrics.watch_replicas(service.replica_metrics)
        service.submit(ask()).result()
        text = metrics.render().decode()

    assert 'llama_adapter_replica_pictures_total{outcome="encoded",replica="a"} 1.0' in text
    assert 'llama_adapter_pictures_total{outcome="encoded"} 1.0' in text
    assert 'llama_adapter_replica_request_seconds_count{replica="b"} 0.0' in text
    assert "llama_adapter_ready 1.0" in text
    assert text.count("# TYPE llama_adapter_replica_pictures_total counter") == 1
