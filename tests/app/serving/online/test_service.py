"""The service answers like the captioner, gives clients turns, refuses excess requests, survives engine failures."""

import asyncio
import gc
import io
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import llama_adapter.app.serving.online.service
from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.captioner import Answer, Captioner, TextDelta
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.models.parallel.group import RankError
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.pictures.reading.prefetch import num_reading_threads
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.app.serving.online.admission_queue import Entry
from llama_adapter.app.serving.online.service import (
    Ask,
    BusyError,
    Observer,
    RequestHandle,
    Service,
    ServiceLimits,
    UnavailableError,
)
from llama_adapter.llm.engine.engine import Engine
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.errors import PromptError, PromptTooLongError
from llama_adapter.runtime.errors import UsageError
from llama_adapter.vision.pixels import PixelRule
from tests import bad_files
from tests.app.golden import GOLDEN
from tests.app.serving.online.waiting import WAIT_S, Gate, started, wait_for

pytestmark = pytest.mark.usefixtures("models_placed_once")

PICTURES = sorted(path for path in sample_pictures().iterdir() if path.suffix != ".jsonl")
BYTES = [path.read_bytes() for path in PICTURES]
CAPTION = "Generate caption of this image"


class Starter(ExitStack):
    def __call__(self, *, load: Callable[[], Captioner] | None = None, batch_size: int = 4, **options: Any) -> Service:
        service = Service(load or (lambda: Captioner.load(batch_size=batch_size)), **options)
        return self.enter_context(started(service))


class InlineReader(PictureReader):
    """Reads in the pool's threads.

    Most tests need no reading processes, whose start would take longer than the test.
    """

    def __init__(self, spec: ReadingSpec, *, pixels: PixelRule, **_: object) -> None:
        super().__init__(spec, pixels=pixels)

    def start(self) -> None:
        pass

    wait_until_ready = start

    def read(self, source: Any, *, keep_waiting: Any, **options: Any) -> PictureReading:
        return super().read(source, **options)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    monkeypatch.setattr(llama_adapter.app.serving.online.service, "IsolatedReader", InlineReader)
    with Starter() as starter:
        yield starter


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    with Starter() as starter:
        yield starter()


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return Captioner.load(batch_size=4)


def ask(number: int = 0, prompt: Any = CAPTION, **options: Any) -> Ask:
    return Ask(picture=BYTES[number], label=PICTURES[number].name, prompt=prompt, **options)


def code_of(answer: Answer) -> str | None:
    return None if answer.error is None else answer.error.code


def held(start: Starter, *, timeout_s: float | None = None, **options: Any) -> tuple[Service, Gate, RequestHandle]:
    """A service whose engine is held in the middle of the first request."""
    gate = Gate()
    gate.close()
    service = start(observer=gate, **options)
    handle = service.submit(ask(0, client="first", timeout_s=timeout_s))
    wait_for(lambda: gate.num_steps)
    return service, gate, handle


def test_answers_are_those_of_the_captioner(shared: Service, captioner: Captioner) -> None:
    expected = captioner.generate(PICTURES[:12])
    handles = [shared.submit(ask(number, client=str(number % 3))) for number in range(12)]
    answers = [handle.result() for handle in handles]

    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.digest for answer in answers] == [answer.digest for answer in expected]


def test_a_picture_is_encoded_once_for_all_questions_about_it(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "num_put_back", 7)
    service, gate, handle = held(start)
    together = [service.submit(ask(1)) for _ in range(3)]
    gate.open()
    first = handle.result()
    handle.cancel()  # no effect on what is answered
    second = service.submit(ask(0, "What color is the moon?")).result()

    assert (first.is_reused, second.is_reused) == (False, True)
    assert "clip" in first.ms
    assert "clip" not in second.ms
    assert second.text == "yellow"
    answers = [one.result() for one in together]
    assert [answer.is_reused for answer in answers].count(False) == 1
    assert {answer.text for answer in answers} == {"a large red star, a large purple star and a large white circle"}
    assert service.status().num_encoded == 2
    assert service.status().num_put_back == 7


def test_features_are_close_for_pictures_that_look_alike(shared: Service) -> None:
    with Image.open(PICTURES[8]) as image:
        image.convert("RGB").save(copy := io.BytesIO(), "JPEG", quality=60)
    asked = [ask(8), replace(ask(8), picture=copy.getvalue()), ask(20)]
    digests = [handle.result().digest for handle in map(shared.submit, asked)]
    circle, same, star = (np.asarray(shared.visual_features(digest)) for digest in digests)

    assert circle.ndim == 1
    assert 4 * np.linalg.norm(circle - same) < np.linalg.norm(circle - star)
    assert shared.visual_features("0" * 64) is None


def test_what_was_transparent_is_said_of_a_picture_in_the_cache_too(start: Starter) -> None:
    service = start()
    picture = (GOLDEN / "images/rgba_180x140.png").read_bytes()
    transparent = Ask(picture=picture, label="a.png", prompt=CAPTION)
    answers = [service.submit(transparent).result() for _ in range(2)]

    assert [answer.is_reused for answer in answers] == [False, True]
    assert [answer.details for answer in answers] == [{"transparent": True}] * 2


def test_without_memory_for_encoded_pictures_answers_are_the_same(start: Starter) -> None:
    service = start(limits=ServiceLimits(encoded_bytes=0))
    answers = [service.submit(ask(0)).result() for _ in range(2)]

    assert [answer.is_reused for answer in answers] == [False, False]
    assert answers[0].text == answers[1].text
    assert service.status().num_encoded == 0


def test_a_picture_forgotten_between_reading_and_admission_is_read_again(start: Starter) -> None:
    service, gate, _ = held(start)
    repeated = service.submit(ask(0))  # a known picture, so its pixels are not read
    wait_for(lambda: service._queue.has_ready)
    service._encoded.clear()
    gate.open()

    assert repeated.result().text == "a small yellow moon above a small green cross"


@pytest.mark.parametrize(("text_prefix", "digest"), [(None, "zeros"), ("none", "none")])
def test_without_a_picture_the_model_answers_as_a_captioner_does(
    shared: Service, captioner: Captioner, text_prefix: Any, digest: str
) -> None:
    asked = Ask(picture=None, prompt="Is there a red star?", text_prefix=text_prefix)
    first, second = (shared.submit(asked).result() for _ in range(2))

    (expected,) = captioner.generate_text("Is there a red star?", text_prefix=text_prefix)
    assert first.token_ids == second.token_ids == expected.token_ids
    assert (first.digest, first.unfamiliar, second.is_reused) == (digest, None, True)


def test_log_probabilities_come_with_the_texts_of_their_tokens(shared: Service, captioner: Captioner) -> None:
    answer = shared.submit(ask(0, num_logprobs=3)).result()
    scored = shared.submit(ask(0, task=OneOf((answer.text, "no")), num_logprobs=0)).result()

    assert "".join(token.text for token in answer.logprobs) == answer.text
    assert len(answer.logprobs) == len(answer.token_ids)
    for token in answer.logprobs:
        assert token.logprob <= 0
        assert len(token.top) == 3
        assert token.top[0] == (token.text, pytest.approx(token.logprob, abs=1e-5))
    assert all(token.top == () for token in shared.submit(ask(0, num_logprobs=0)).result().logprobs)
    assert scored.logprobs == shared.submit(ask(0)).result().logprobs == ()


def test_text_comes_in_pieces_to_threads_and_event_loops(shared: Service) -> None:
    async def read() -> list[str]:
        async def one(number: int) -> str:
            return "".join([event.text async for event in shared.submit(ask(number)) if isinstance(event, TextDelta)])

        return await asyncio.gather(*(one(number) for number in range(4)))

    events = [[*shared.submit(ask(number)).events()] for number in range(4)]
    assert all(len(each) > 4 and isinstance(each[-1], Answer) for each in events)
    texts = ["".join(event.text for event in each[:-1]) for each in events]
    assert texts == [each[-1].text for each in events] == asyncio.run(read())


def test_a_stop_text_ends_the_answer_before_it(shared: Service) -> None:
    answer = shared.submit(ask(0, stop=("moon", "cross"))).result()

    assert (answer.text, answer.finish) == ("a small yellow ", "stop")


def test_a_bad_picture_gets_its_reason_under_its_own_name_and_the_others_their_answers(shared: Service) -> None:
    bad = shared.submit(Ask(picture=BYTES[0][:200], prompt=CAPTION, label="holiday.png"))
    good = shared.submit(ask(1))

    answer = bad.result()
    assert code_of(answer) == "truncated"
    assert "holiday.png" in answer.error.message
    assert good.result().error is None


def test_reader_failure_is_answered_and_shows_as_stalled(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    service = start()
    with monkeypatch.context() as patch:
        patch.setattr(InlineReader, "read", failing)
        answer = service.submit(ask(0)).result()

    assert code_of(answer) == "reading_failed"
    assert service.status().is_stalled  # /health and /ready show what has stalled
    assert service.submit(ask(0)).result().error is None
    assert not service.status().is_stalled


@pytest.mark.parametrize("limits", [ServiceLimits(max_pixels=1000), ServiceLimits(max_picture_bytes=100)])
def test_pictures_above_the_limits_are_refused(start: Starter, limits: ServiceLimits) -> None:
    assert code_of(start(limits=limits).submit(ask(0)).result()) == "too_large"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ask(0, "x" * 30_000), PromptError),
        (ask(0, "word " * 3000), PromptTooLongError),
        (ask(0, least_room=500), PromptTooLongError),
        (ask(0, task=OneOf(("yes", "n" * 30_000))), PromptError),
        (ask(0, [10**9]), PromptError),
        (ask(0, ("x", "y" * 30_000)), PromptError),
    ],
)
def test_invalid_requests_are_refused_at_submit(shared: Service, request_: Ask, error: type[Exception]) -> None:
    with pytest.raises(error):
        shared.submit(request_)
    assert shared.status().num_waiting == 0


def test_full_queue_refuses_with_retry_after(start: Starter) -> None:
    limits = ServiceLimits(max_waiting=3, max_waiting_per_client=2)
    service, gate, first = held(start, limits=limits)
    waiting = [service.submit(ask(number, client="a")) for number in (1, 2)]

    with pytest.raises(BusyError, match=r"limit per client") as share:
        service.submit(ask(3, client="a"))
    waiting.append(service.submit(ask(3, client="b")))
    with pytest.raises(BusyError, match="full"):
        service.submit(ask(4, client="c"))
    assert share.value.retry_after_s is not None
    assert share.value.retry_after_s >= 1.0
    gate.open()
    assert all(handle.result().error is None for handle in [first, *waiting])
    assert service.submit(ask(4, client="a")).result().error is None


def test_background_requests_leave_a_row_to_others_and_wait_without_a_deadline(start: Starter) -> None:
    class Counting(Gate):
        most = 0

        def stage(self, stage: str, seconds: float) -> None:
            self.most = max(self.most, len(service._running))
            super().stage(stage, seconds)

    counting = Counting()
    counting.close()
    service = start(batch_size=3, observer=counting)
    handles = [service.submit(ask(number, is_background=True)) for number in range(8)]

    assert service._entries[handles[-1].id].deadline == math.inf
    counting.open()
    assert [handle.result().error for handle in handles] == [None] * 8
    assert counting.most == 2


def test_a_running_request_that_is_cancelled_keeps_its_text_and_frees_its_slot(start: Starter) -> None:
    service, gate, handle = held(start, batch_size=1)
    other, waiting = service.submit(ask(1)), service.submit(ask(2))
    waiting.cancel()
    assert code_of(waiting.result()) == "cancelled"  # at once, although the engine is held
    assert service.status().num_waiting == 1
    first = next(handle.events())
    handle.cancel()
    handle.cancel()
    gate.open()

    answer = handle.result()
    assert isinstance(first, TextDelta)
    assert code_of(answer) == "cancelled"
    assert answer.text.startswith(first.text)
    assert len(answer.text) < len("a small yellow moon above a small green cross")
    assert other.result().error is None


def test_late_requests_end_with_an_error_while_the_engine_hangs_and_after_a_step(start: Starter) -> None:
    service, gate, running = held(start, timeout_s=1.0, batch_size=1)
    waiting = service.submit(ask(1, timeout_s=0.05))
    assert code_of(waiting.result()) == "deadline"

    wait_for(lambda: time.perf_counter() > service._running[running.id].deadline)
    gate.open()
    assert code_of(running.result()) == "deadline"


def failing_steps(monkeypatch: pytest.MonkeyPatch, *, times: int, error: Exception | None = None) -> None:
    """Make the next `times` steps of any engine fail."""
    left = [times]
    step = CaptionLoop.step

    def failing(loop: CaptionLoop) -> Any:
        if left[0]:
            left[0] -= 1
            raise error or RuntimeError("the device is gone")
        return step(loop)

    monkeypatch.setattr(CaptionLoop, "step", failing)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("engine_failed", RuntimeError("the device is gone")),
        ("unavailable", RankError("the device is gone")),
        ("out_of_memory", MemoryError("the device is gone")),
    ],
)
def test_failed_engine_is_replaced_and_only_running_requests_fail(
    code: str,
    error: Exception,
    start: Starter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    close = Captioner.close

    def failing(captioner: Captioner) -> None:
        close(captioner)
        raise RuntimeError("the process of the encoder is gone")

    monkeypatch.setattr(Captioner, "close", failing)
    service = start(batch_size=1)
    failing_steps(monkeypatch, times=1, error=error)
    handles = [service.submit(ask(number)) for number in range(4)]
    answers = [handle.result() for handle in handles]

    assert [answer.error.code for answer in answers if answer.error is not None] == [code]
    status = service.status()
    assert (status.state, status.restarts) == ("ready", 1)
    assert status.last_error is not None
    assert type(error).__name__ in status.last_error
    assert "the device is gone" not in status.last_error  # the details are only in the log
    assert "the device is gone" in caplog.text
    assert "closing the model failed" in caplog.text


def test_loading_the_engine_is_retried_until_it_works_and_requests_are_refused_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama_adapter.app.serving.online.service, "_FIRST_BACKOFF_S", 0.0)
    states: list[str] = []  # the state at each load
    refusals: list[UnavailableError] = []

    def load() -> Captioner:
        states.append(service.status().state)
        if 1 < len(states) < 1100:  # until the doubled back-off would exceed a float
            try:
                service.submit(ask(1))
            except UnavailableError as error:
                refusals.append(error)
            raise RuntimeError("the device is away")
        return Captioner.load(batch_size=1)

    with closing(Service(load)) as service:
        service.start()
        service.wait_until_ready(WAIT_S)
        failing_steps(monkeypatch, times=1)
        assert service.submit(ask(0)).result().error is not None
        wait_for(lambda: service.status().state == "ready")

        assert states == ["loading"] + ["restarting"] * 1099
        assert {(refusal.message, refusal.retry_after_s) for refusal in refusals} == {
            ("The engine failed and is restarting", 2.0)
        }
        assert service.submit(ask(0)).result().error is None


def test_observer_errors_do_not_affect_answers(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Observer):
        def _raise(self, *_: object) -> None:
            raise RuntimeError("nothing can be counted")

        first_token = stage = finished = _raise

    service = start(observer=Broken(), batch_size=1)
    assert service.submit(ask(0)).result().error is None
    late, cancelled = service.submit(ask(1, timeout_s=1e-6)), service.submit(ask(2))
    cancelled.cancel()
    assert [answer.index for answer in (late.result(), cancelled.result())] == [late.id, cancelled.id]
    assert service.status().restarts == 0

    failing_steps(monkeypatch, times=1)
    assert service.submit(ask(0)).result().error is not None
    wait_for(lambda: service.status().state == "ready")
    assert service.submit(ask(0)).result().error is None
    assert all(thread.is_alive() for thread in service._threads)


def test_load_error_reaches_wait_until_ready() -> None:
    with closing(Service(lambda: Captioner.load(model="no such bundle"))) as service:
        service.start()
        with pytest.raises(Exception, match="no such bundle"):
            service.wait_until_ready(WAIT_S)
        assert service.status().state == "failed"
        with pytest.raises(UnavailableError):
            service.submit(ask(0))


def test_draining_finishes_accepted_requests_and_refuses_new_ones(start: Starter) -> None:
    service, gate, first = held(start, batch_size=1)
    waiting = [service.submit(ask(number)) for number in (1, 2)]
    service.drain()

    assert service.status().state == "draining"
    assert not service.wait_until_idle(0)
    with pytest.raises(UnavailableError, match="shutting down"):
        service.submit(ask(3))
    gate.open()
    assert all(handle.result().error is None for handle in [first, *waiting])
    assert service.wait_until_idle(WAIT_S)


@pytest.mark.parametrize("hangs", [False, True])
def test_close_answers_all_requests(start: Starter, hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if hangs:
        monkeypatch.setattr(llama_adapter.app.serving.online.service, "_CLOSE_S", 0.05)
    service, gate, first = held(start, batch_size=1)
    waiting = [service.submit(ask(number)) for number in (1, 2)]
    closing = threading.Thread(target=service.close)
    closing.start()
    if not hangs:
        gate.open()
    closing.join(WAIT_S)

    assert not closing.is_alive()
    codes = [answer.error and answer.error.code for answer in (handle.result() for handle in [first, *waiting])]
    assert codes[0 if hangs else 1 :] == ["cancelled"] * (3 if hangs else 2)
    with pytest.raises(UnavailableError):
        service.submit(ask(0))
    service.close()
    gate.open()


def test_stage_times_and_the_observer_follow_every_request(start: Starter) -> None:
    class Told(Observer):
        first_tokens, codes = 0, list[str | None]()

        def first_token(self, seconds: float) -> None:
            self.first_tokens += 1

        def finished(self, answer: Answer, seconds: float) -> None:
            self.codes.append(code_of(answer))

    told = Told()
    service = start(observer=told)
    assert set(service.stage_seconds().values()) == {0.0}
    for asked in (ask(0), Ask(picture=b"no", prompt=CAPTION)):
        service.submit(asked).result()
    wait_for(lambda: len(told.codes) == 2 and service.stage_seconds()["decode"] > 0)

    assert all(service.stage_seconds()[stage] > 0 for stage in ("read", "clip", "pre", "forward", "post", "decode"))
    assert sorted(map(str, told.codes)) == ["None", "not_a_picture"]
    assert told.first_tokens == 1


def test_hung_step_shows_as_stalled(start: Starter) -> None:
    service, gate, _ = held(start, limits=ServiceLimits(stall_s=0.01))
    wait_for(lambda: service.status().is_stalled)
    gate.open()
    wait_for(lambda: not service.status().is_stalled)


@pytest.mark.parametrize("name", ["max_waiting", "timeout_s", "max_pixels"])
def test_zero_limits_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ServiceLimits(**{name: 0})


def test_answered_requests_leave_memory_without_the_garbage_collector(start: Starter) -> None:
    def num_entries() -> int:
        return sum(type(one) is Entry for one in gc.get_objects())

    service = start(limits=ServiceLimits(encoded_bytes=0))
    gc.collect()
    gc.disable()
    try:
        before = num_entries()
        for _ in range(20):
            assert service.submit(ask(0)).result().error is None
        assert num_entries() - before <= num_reading_threads() + 3  # idle threads may refer to their last one
    finally:
        gc.enable()


@pytest.mark.slow
def test_hundreds_of_requests_with_random_cancels_all_end(start: Starter) -> None:
    service = start(limits=ServiceLimits(max_waiting=1000, max_waiting_per_client=1000))
    handles = [service.submit(ask(number % len(BYTES), client=str(number % 7))) for number in range(200)]
    for handle in handles[::3]:
        handle.cancel()
    answers = [handle.result() for handle in handles]

    assert all(answer.error is None for number, answer in enumerate(answers) if number % 3)
    assert service.wait_until_idle(WAIT_S)
    status = service.status()
    assert (status.num_running, status.num_waiting) == (0, 0)


# Slow pictures


SLOW_LIMITS = ServiceLimits(slow_after_s=0.3, max_slow_pictures=1, max_slow_waiting=1, picture_timeout_s=600.0)


def ask_slow(number: int, **options: Any) -> Ask:
    picture = bad_files.changed(bad_files.progressive_jpeg(side=1024, num_scans=200_000), number)
    return Ask(picture=picture, label="slow.jpg", prompt=CAPTION, **options)


@pytest.fixture(scope="module")
def slow() -> Iterator[Service]:
    """A service whose pictures are read by processes, one slow one at a time.

    Only processor time makes a picture slow: on a loaded machine, a good one may take as long as one that hangs.
    """
    with Starter() as starter, pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama_adapter.app.serving.online.reading_pool._HANGS_AFTER", math.inf)
        yield starter(limits=SLOW_LIMITS)


@pytest.mark.slow
def test_slow_pictures_do_not_block_others_and_cancelling_their_requests_ends_the_reading(slow: Service) -> None:
    known = slow.submit(ask(0)).result()
    num_places = num_reading_threads() + SLOW_LIMITS.max_slow_pictures + SLOW_LIMITS.max_slow_waiting
    handles = [slow.submit(ask_slow(number, client="slow")) for number in range(num_places + 1)]
    wait_for(lambda: slow.status().num_slow_reading > 0)

    assert slow.submit(ask(0)).result().is_reused
    answers = [slow.submit(ask(number)).result() for number in range(1, 6)]

    assert known.error is None
    assert [answer.error for answer in answers] == [None] * 5
    assert slow.status().num_slow_reading > 0
    for handle in handles:
        handle.cancel()
    wait_for(lambda: slow.status().num_reading == 0)


def test_a_view_is_cancelled_with_its_future(slow: Service) -> None:
    view = slow.view(ask_slow(0).picture, name="slow.jpg", side=100, client="page")
    wait_for(lambda: slow.status().num_slow_reading == 1)
    assert view.cancel()

    wait_for(lambda: slow.status().num_reading == 0)
    seen = slow.view(BYTES[0], name="good.png", side=100, client="page").result(WAIT_S)
    assert seen.pixels is not None
    assert (seen.pixels.shape, seen.width, seen.height) == ((100, 100, 3), 224, 224)


def test_read_timeout_is_an_error_answer() -> None:
    with Starter() as starter:
        answer = starter(limits=replace(SLOW_LIMITS, picture_timeout_s=0.5)).submit(ask_slow(0)).result()

    assert code_of(answer) == "timeout"
    assert "slow.jpg" in answer.error.message
    assert "disk" not in answer.error.message


@pytest.mark.slow
def test_a_picture_that_takes_more_memory_than_it_may_is_refused_and_the_next_one_is_read() -> None:
    picture = bad_files.segmented_jpeg(num_bytes=8 * 2**20)
    with Starter() as starter:
        service = starter(limits=ServiceLimits(reading_memory_bytes=64 * 2**20))
        answer = service.submit(Ask(picture=picture, label="large.jpg", prompt=CAPTION)).result()
        assert service.submit(ask(0)).result().error is None

    assert code_of(answer) == "too_large"


def test_views_beyond_their_bytes_are_refused_and_close_waits_for_no_reading() -> None:
    picture = ask_slow(0).picture
    views: list[Future[PictureReading]] = []

    def ask_for_views() -> None:
        for _ in range(10):
            views.append(service.view(picture, name="slow.jpg", side=9, client="page"))

    with Starter() as starter:
        # No picture becomes slow, so that none leaves its place before the views are asked for.
        service = starter(limits=replace(SLOW_LIMITS, slow_after_s=600.0, max_waiting_bytes=8 * len(picture)))
        handles = [service.submit(ask_slow(number)) for number in range(2)]
        with pytest.raises(BusyError):
            ask_for_views()

    assert len(views) >= 2
    assert all(view.exception(WAIT_S) is not None for view in views)
    assert [code_of(handle.result()) for handle in handles] == ["cancelled"] * 2
    assert service._pool is not None
    assert not any(thread.is_alive() for thread in service._pool._threads)


def test_llama_alone_answers_texts_and_refuses_pictures(start: Starter) -> None:
    llama = {"llama_dir": str(GOLDEN / "LLaMA"), "llama_type": "TINY"}
    service = start(load=lambda: Captioner.load(**llama))  # type: ignore[arg-type]

    answer = service.submit(Ask(picture=None, prompt="Hello", sampling=SamplingParams(max_new_tokens=4))).result()

    with Captioner.load(**llama) as captioner:  # type: ignore[arg-type]
        assert answer.token_ids == captioner.generate_text("Hello", max_new_tokens=4)[0].token_ids
    with pytest.raises(UsageError):
        service.submit(ask(0))
    with pytest.raises(ValueError, match="text_prefix"):
        service.submit(Ask(picture=None, prompt="Hello", text_prefix="zeros"))
