"""The captioners of a job: what becomes of the chunks of one whose process ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from llama_adapter.app.jobs.clusters.actors import IN_HAND, Crew, LostChunk
from llama_adapter.app.jobs.clusters.chunks import AnsweredChunk, Chunk
from llama_adapter.app.jobs.clusters.places import Place
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.pictures.inputs import InputSpec
from tests.app.jobs.clusters.made import FIRST, QUESTIONS, SPEC, FakeRay, item

ray = pytest.importorskip("ray")
PLACE = Place(machine="here", device="cpu", num_cpus=1.0, devices={}, threads=1)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.fixture
def crew(fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Crew:
    """One captioner, which is ready."""
    call = SimpleNamespace(remote=fake_ray.call, options=lambda **_: call)
    monkeypatch.setattr(Crew, "_started", lambda crew, place: SimpleNamespace(load=call, answer=call))
    crew = Crew(Job(spec=SPEC, inputs=InputSpec(), questions=QUESTIONS), [PLACE], ".", say=lambda text: None)
    crew.start()
    fake_ray.ended[1] = FIRST
    assert list(crew.wait(0.0)) == [FIRST]
    return crew


@pytest.fixture
def chunks(crew: Crew) -> list[Chunk]:
    """Those that the captioner has in hand: as many as it takes."""
    chunks = [Chunk(items=(item(number),)) for number in range(IN_HAND)]
    pixels: Any = b""
    for chunk in chunks:
        crew.give(chunk, pixels)
    assert (crew.num_in_hand, crew.can_take) == (2, False)
    return chunks


def test_of_the_chunks_of_an_ended_captioner_the_first_may_be_the_cause_and_the_others_waited(
    fake_ray: FakeRay, crew: Crew, chunks: list[Chunk]
) -> None:
    ended = ray.exceptions.RayActorError()
    fake_ray.ended |= {2: ended, 3: ended}  # both calls of the actor fail, and the second one tells nothing new

    came = list(crew.wait(0.0))

    assert came == [LostChunk(chunks[0], may_be_cause=True), LostChunk(chunks[1], may_be_cause=False)]
    assert (crew.num_in_hand, crew.num_ready, fake_ray.num_calls) == (0, 0, 4)  # it loads again, once
    fake_ray.ended[4] = FIRST
    assert list(crew.wait(0.0)) == [FIRST]
    assert (crew.num_ready, crew.can_take) == (1, True)


def test_a_chunk_whose_pixels_are_lost_leaves_its_captioner_ready(
    fake_ray: FakeRay, crew: Crew, chunks: list[Chunk]
) -> None:
    answered = AnsweredChunk(digests=("",), answers=())
    fake_ray.ended |= {2: ray.exceptions.RayError("lost"), 3: answered}

    assert list(crew.wait(0.0)) == [LostChunk(chunks[0], may_be_cause=True), (chunks[1], answered)]
    assert (crew.num_ready, crew.num_in_hand, fake_ray.num_calls) == (1, 0, 3)
