"""A captioner has at most one batch of pictures in flight, and encodes many pictures at once."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from llama_adapter.app.captioning.caption_loop import CaptionLoop
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.encoded_pictures import EncodedPicture
from llama_adapter.app.captioning.stage_clock import StageClock
from llama_adapter.app.captioning.tasks.answers import Answer, Event
from llama_adapter.app.captioning.tasks.prompts import Prompt
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.golden import model_options

CONTEXT = 40
LENGTHS = (1, 7, 3, 9, 2, 5)  # maximum answer lengths in tokens: the part of the context that their prompts leave


@pytest.fixture(scope="module", params=[1, 4, 5])
def captioner(request: pytest.FixtureRequest) -> Captioner:
    return Captioner.load(**model_options(), batch_size=request.param, context=CONTEXT)


@pytest.fixture(autouse=True)
def always_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read pictures in the caller's thread, so that none is missing when it is needed."""
    monkeypatch.setattr("llama_adapter.app.captioning.work_items.is_shareable", lambda item: False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """The work in progress during a run."""

    under_way: list[int] = field(default_factory=list)  # pictures in flight at each encoder call, with its own
    encoded: list[int] = field(default_factory=list)  # pictures given to the encoder at each call
    requests_at_call: list[int] = field(default_factory=list)  # unanswered requests at each encoder call
    requests_at_step: list[int] = field(default_factory=list)  # unanswered ones, at each step, while pictures are left
    answers: list[Answer] = field(default_factory=list)


def watch(captioner: Captioner, sheets: Sequence[Sequence[Prompt]], monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Ask about one picture for each sheet of prompts."""
    watched, answered = Watched(), Counter[str]()
    encode, step = CaptionLoop.encode, CaptionLoop.step

    def noting_encode(loop: CaptionLoop, pixels: Sequence[np.ndarray]) -> tuple[list[EncodedPicture], float]:
        num_done = sum(answered[str(number)] == len(sheet) for number, sheet in enumerate(sheets))
        watched.encoded.append(len(pixels))
        watched.under_way.append(sum(watched.encoded) - num_done)
        watched.requests_at_call.append(len(loop.in_flight))
        return encode(loop, pixels)

    def noting_step(loop: CaptionLoop) -> list[Event]:
        if sum(watched.encoded) < len(sheets):
            watched.requests_at_step.append(len(loop.in_flight))
        return step(loop)

    monkeypatch.setattr(CaptionLoop, "encode", noting_encode)
    monkeypatch.setattr(CaptionLoop, "step", noting_step)
    for event in captioner.run(_items(captioner, sheets), sampling=SamplingParams(max_new_tokens=CONTEXT)):
        if isinstance(event, Answer):
            watched.answers.append(event)
            answered[event.picture] += 1
    return watched


def _items(captioner: Captioner, sheets: Sequence[Sequence[Prompt]]) -> Iterator[WorkItem]:
    indices = itertools.count()
    for number, sheet in enumerate(sheets):
        pixels = np.full((captioner.image_size, captioner.image_size, 3), number, np.uint8)
        yield WorkItem(
            picture=PictureReading(digest=f"{number:064x}", pixels=pixels, error=None, elapsed_ms=0.0),
            label=str(number),
            questions=tuple(WorkQuestion(index=next(indices), prompt=prompt) for prompt in sheet),
        )


def ending_after(num_tokens: int) -> Prompt:
    return [5] * (CONTEXT - num_tokens)


def test_never_more_than_a_batch_is_under_way_and_half_of_one_is_encoded_at_once(
    captioner: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheets = [[ending_after(length)] for length in LENGTHS * 2]
    watched = watch(captioner, sheets, monkeypatch)

    assert sorted(answer.index for answer in watched.answers) == list(range(len(sheets)))
    assert len({len(answer.token_ids) for answer in watched.answers}) > 3
    assert max(watched.under_way) == captioner.batch_size
    assert all(2 * number >= captioner.batch_size for number in watched.encoded[:-1])
    assert watched.encoded[0] == captioner.batch_size


def test_many_questions_about_each_picture_keep_every_row_in_use(
    captioner: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = [ending_after(length) for length in LENGTHS]
    sheets = [sheet] * (2 * captioner.batch_size + 1)
    watched = watch(captioner, sheets, monkeypatch)

    assert len(watched.answers) == len(sheets) * len(sheet)
    assert max(watched.under_way) <= captioner.batch_size
    assert min(watched.requests_at_step) >= captioner.batch_size
    assert max(watched.requests_at_call) <= captioner.batch_size  # no picture is encoded earlier, only to wait


def test_a_large_batch_begins_with_part_of_its_rows_and_is_filled_before_half_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llama_adapter.app.captioning.caption_loop.LARGE_BATCH", 2)
    captioner = Captioner.load(**model_options(), batch_size=8, context=CONTEXT)
    sheets = [[ending_after(length)] for length in LENGTHS * 4]
    watched = watch(captioner, sheets, monkeypatch)

    assert len(watched.answers) == len(sheets)
    assert set(watched.encoded[1:-1]) <= {2, 3}  # two rows are free, or more if several end at once
    assert min(watched.requests_at_step) > 8 - 4  # so half of the rows are never free while pictures are left


def test_pictures_are_gathered_while_rows_run(monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = Captioner.load(**model_options(), batch_size=32, context=CONTEXT)
    with captioner.open_loop(StageClock()) as loop:
        assert (loop.least_ready(32), loop.least_ready(3)) == (32, 3)
        monkeypatch.setattr(loop, "in_flight", {0: None})
        assert (loop.least_ready(31), loop.least_ready(1)) == (2, 1)
        loop.in_flight = {}
