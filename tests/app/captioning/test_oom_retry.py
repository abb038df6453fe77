"""After out-of-memory errors, smaller batches give the same answers."""

import dataclasses
import itertools
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import llama_adapter.app.captioning.assemble
from llama_adapter.app.captioning.assemble import Parts, assemble_parts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.answers import Answer, TextDelta
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.task import FREE_TEXT
from llama_adapter.app.models.oom_retry import attempt
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.serving.online.service import Ask, Service
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.runtime.errors import DeviceError
from tests.app.golden import model_options
from tests.app.narrow import SHORTAGES, Device, narrow
from tests.llm.toys import QueuedBackend
from tests.odd_pictures.samples import saved
from tests.parity.test_decoder import logits_limit

pytestmark = pytest.mark.slow

BATCH_SIZE = 8


def small_picture(seed: int) -> bytes:
    levels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return saved(Image.fromarray(levels), "PNG")


PICTURES = [small_picture(seed) for seed in range(19)]


def open_parts() -> Parts:
    return assemble_parts(CaptionerSpec(**model_options(), batch_size=BATCH_SIZE))


@pytest.fixture(autouse=True)
def read_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in one thread. A conversation draws its seed when it begins, and so seeds are drawn in picture order."""
    monkeypatch.setattr("llama_adapter.app.pictures.reading.prefetch.MAX_THREADS", 1)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return open_parts()


@pytest.fixture(scope="module")
def expected(parts: Parts) -> dict[int, tuple[str, tuple[int, ...], str]]:
    """What is said about the pictures, in nine tokens, if memory is not short."""
    return said(read(Captioner(parts).stream(PICTURES, max_new_tokens=9)))


@pytest.fixture(scope="module")
def queued_parts() -> Parts:
    """Parts on a device whose token ids are read one step late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_adapter.app.captioning.assemble, "open_backend", lambda name: QueuedBackend())
        return open_parts()


def quiet(captioner: Captioner) -> list[str]:
    """Collect the captioner's notes about retries, in place of printing them."""
    notes: list[str] = []
    captioner.oom_retry.tell = notes.append
    return notes


def narrowed(parts: Parts, device: Device) -> tuple[Captioner, list[str]]:
    """A captioner on this device, and its notes about retries."""
    captioner = narrow(parts, device)
    return captioner, quiet(captioner)


def read(events: Any) -> dict[int, Answer]:
    """Answers by index. Also checks that the streamed pieces of each answer add up to its text."""
    pieces: dict[int, str] = defaultdict(str)
    answers: dict[int, Answer] = {}
    for event in events:
        if isinstance(event, TextDelta):
            pieces[event.index] += event.text
        else:
            assert event.index not in answers, "two answers to one question"
            answers[event.index] = event
            assert event.finish == "choice" or event.text == pieces[event.index]
    return answers


def said(answers: dict[int, Answer]) -> dict[int, tuple[str, tuple[int, ...], str]]:
    return {index: (answer.text, answer.token_ids, answer.finish) for index, answer in answers.items()}


@pytest.mark.parametrize(
    ("shortage", "program"), [("torch", "prefill"), *((shortage, "decode") for shortage in SHORTAGES)]
)
@pytest.mark.proves("fewer rows when memory is short", "CPU")
def test_after_an_out_of_memory_step_fewer_rows_give_the_same_answers(
    parts: Parts, expected: dict[int, Any], shortage: str, program: str
) -> None:
    assert len({text for text, _, _ in expected.values()}) > 1
    device = Device(rows=3, programs=[program], shortage=SHORTAGES[shortage])
    captioner, notes = narrowed(parts, device)

    assert said(read(captioner.stream(PICTURES, max_new_tokens=9))) == expected
    assert notes == ["out of memory with 8 rows: going on with 4", "out of memory with 4 rows: going on with 2"]
    # The next run starts with the smaller batch.
    assert said(read(captioner.stream(PICTURES, max_new_tokens=9))) == expected
    assert device.num_shortages == len(notes) == 2


class Moody(Device):
    """Runs out of memory at random, as if other programs used some. It always has memory for a single row."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def take(self, program: str, count: int, most: int | None) -> None:
        super().take(program, count, 1 if self._random.random() < 0.15 else None)


@pytest.mark.parametrize("seed", range(4))
def test_memory_may_be_short_at_any_step_of_any_program(
    queued_parts: Parts, parts: Parts, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    asked: dict[str, Any] = {
        "max_new_tokens": draw.randint(1, 14),
        "temperature": draw.choice([0.0, 1.3]),
        "choices": draw.choice([None, None, ["yes", "no", "not sure"]]),
    }

    def answers(captioner: Captioner) -> dict[int, tuple[str, tuple[int, ...], str]]:
        seeds = itertools.count(seed)  # no seed is given, so each conversation draws one
        monkeypatch.setattr("llama_adapter.app.captioning.active_request.secrets.randbits", lambda bits: next(seeds))
        return said(read(captioner.stream(PICTURES[:11], "Describe the image.", **asked)))

    expected = answers(Captioner(parts))
    captioner = narrow(draw.choice([queued_parts, parts]), Moody(seed), is_late=draw.random() < 0.5)
    quiet(captioner)

    assert answers(captioner) == expected


def test_a_warm_up_without_memory_is_skipped(parts: Parts) -> None:
    expected = said(read(Captioner(parts).stream(PICTURES[:5], max_new_tokens=5)))
    captioner, notes = narrowed(parts, Device(rows=4))

    assert captioner.warm_up().programs == 0
    assert said(read(captioner.stream(PICTURES[:5], max_new_tokens=5))) == expected
    assert notes == ["out of memory with 8 rows: going on with 4"]


def test_choices_are_scored_in_smaller_batches(parts: Parts) -> None:
    choices = ["yes", "no", "not sure"]
    expected = Captioner(parts).generate(PICTURES, "Is it red?", choices=choices)
    captioner, notes = narrowed(parts, Device(rows=1, programs=["score"]))
    answers = captioner.generate(PICTURES, "Is it red?", choices=choices)

    for answer, other in zip(answers, expected, strict=True):
        assert answer.text == other.text
        assert answer.choice == pytest.approx(other.choice, abs=2 * 4 * logits_limit("bias_b1"))
    assert notes[-1] == "out of memory with 2 rows: going on with 1"


def test_requests_in_flight_go_on_behind_their_known_tokens(parts: Parts) -> None:
    undisturbed, device = Device(), Device()
    read(narrow(parts, undisturbed).stream(PICTURES[:8], max_new_tokens=12))
    captioner, _ = narrowed(parts, device)
    stream = captioner.stream(PICTURES[:8], max_new_tokens=12)
    next(event for event in stream if isinstance(event, TextDelta))
    device.rows = 4
    list(stream)

    def num_tokens(calls: list[tuple[str, int]]) -> int:
        return sum(rows for program, rows in calls if program in ("prefill", "decode"))

    # Each row in flight is prefilled once more. This prefill chooses a token, as a step would have done.
    assert num_tokens(device.calls) == num_tokens(undisturbed.calls)
    assert [call for call in device.calls if call[0] == "encode"] == [("encode", 8)]


@pytest.mark.parametrize(
    ("device", "note"),
    [
        (Device(rows=0, programs=["decode"]), "out of memory with 2 rows: going on with 1"),
        (Device(pictures=0), "out of memory with 2 pictures in the encoder: going on with 1"),
    ],
)
def test_with_one_row_or_picture_the_out_of_memory_error_is_raised(parts: Parts, device: Device, note: str) -> None:
    captioner, notes = narrowed(parts, device)
    with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
        captioner.generate(PICTURES[:4])
    assert notes[-1] == note


def test_what_cannot_be_compiled_for_lack_of_memory_is_tried_with_fewer_rows(parts: Parts) -> None:
    def refused() -> Exception:
        error = DeviceError("cpu cannot compile a decode step of 8 rows")
        error.__cause__ = RuntimeError("operation failed due to a previous error during capture")
        error.__cause__.__context__ = torch.OutOfMemoryError("CUDA out of memory")
        return error

    captioner, notes = narrowed(parts, Device(rows=4, programs=["decode"], shortage=refused))
    assert all(answer.error is None for answer in captioner.generate(PICTURES, max_new_tokens=3))
    assert notes == ["out of memory with 8 rows: going on with 4"]


def test_errors_of_other_kinds_are_not_tried_again(parts: Parts) -> None:
    device = Device(rows=2, shortage=lambda: RuntimeError("Expected all tensors to be on the same device"))
    captioner = narrow(parts, device)
    with pytest.raises(RuntimeError, match="same device"):
        captioner.generate(PICTURES)
    assert device.num_shortages == 1


def test_an_encoder_that_lacks_memory_gets_fewer_pictures_at_once(parts: Parts, expected: dict[int, Any]) -> None:
    device = Device(pictures=3)
    captioner, notes = narrowed(parts, device)
    answers = read(captioner.stream(PICTURES, max_new_tokens=9))

    assert said(answers) == expected
    assert notes == [
        "out of memory with 8 pictures in the encoder: going on with 4",
        "out of memory with 4 pictures in the encoder: going on with 2",
    ]
    assert device.num_shortages == 2
    assert max(count for program, count in device.calls if program == "encode") == 2
    assert all(answer.ms["clip"] > 0 for answer in answers.values())


def test_caches_are_emptied_at_each_reduction(parts: Parts) -> None:
    emptied: list[int] = []

    class Backend(type(parts.backend)):  # type: ignore[misc]
        def empty_caches(self) -> None:
            emptied.append(len(notes))

    captioner, notes = narrowed(dataclasses.replace(parts, backend=Backend()), Device(rows=2))
    captioner.generate(PICTURES[:3])
    assert (emptied, notes) == ([0], ["out of memory with 3 rows: going on with 1"])


def test_no_more_pictures_are_taken_than_are_answered_at_once(parts: Parts) -> None:
    device = Device(rows=4)
    captioner, _ = narrowed(parts, device)
    captioner.generate(PICTURES, max_new_tokens=3)

    encoded = [count for program, count in device.calls if program == "encode"]
    assert (encoded[0], max(encoded[1:])) == (BATCH_SIZE, 4)


class Waiting(Device):
    """A device whose first program begins when all pictures are read, so that the following ones have many rows."""

    def __init__(self, **memory: Any) -> None:
        super().__init__(**memory)
        self.all_are_read = threading.Event()

    def take(self, program: str, count: int, most: int | None) -> None:
        if program in self.programs:
            assert self.all_are_read.wait(60.0)
        super().take(program, count, most)


def test_a_service_answers_with_fewer_rows_and_does_not_restart(parts: Parts) -> None:
    sampled = SamplingParams(max_new_tokens=10, temperature=1.2, seed=5)
    plain = Captioner(parts)
    asks = [
        Ask(
            picture=picture,
            prompt="Describe the image.",
            sampling=sampled if number % 2 else SamplingParams(max_new_tokens=10),
            task=OneOf(("yes", "no")) if number % 5 == 4 else FREE_TEXT,
        )
        for number, picture in enumerate(PICTURES)
    ]
    notes: list[str] = []
    device = Waiting(rows=3, pictures=2)

    def load() -> Captioner:
        captioner = narrow(parts, device)
        captioner.oom_retry.tell = notes.append
        return captioner

    service = Service(load)
    service.start()
    try:
        service.wait_until_ready(30.0)
        handles = [service.submit(ask) for ask in asks]
        idle = 0
        while idle < 30:  # between two pictures, a busy machine has none that is being read either
            idle = 0 if service.status().num_reading else idle + 1
            time.sleep(0.01)
        device.all_are_read.set()
        answers = [read(handle.events())[handle.id] for handle in handles]
        assert service.status().restarts == 0
        assert service.batch_size == BATCH_SIZE
    finally:
        service.close()

    for ask, answer in zip(asks, answers, strict=True):
        options: Any = {"temperature": ask.sampling.temperature, "seed": ask.sampling.seed, "max_new_tokens": 10}
        (expected,) = plain.generate([ask.picture], ask.prompt, choices=ask.task.continuations or None, **options)
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
    assert any("rows" in note for note in notes)


def test_the_tensors_of_a_failed_step_are_released() -> None:
    held: list[weakref.ref[Any]] = []

    def fail(shortage: Callable[[], Exception]) -> None:
        large = np.zeros(4)
        held.append(weakref.ref(large))
        try:
            raise ValueError("in a graph's compiler")
        except ValueError:
            error = shortage()
            error.own_cycle = error  # type: ignore[attr-defined]
            raise error from None

    for shortage in SHORTAGES.values():
        assert attempt(lambda: fail(shortage), is_least=False) is None  # noqa: B023
    assert [reference() for reference in held] == [None] * len(SHORTAGES)
