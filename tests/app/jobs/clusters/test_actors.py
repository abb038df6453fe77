"""The captioners of a job: what becomes of the chunks of one whose process ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from llama_adapter.app.jobs.clusters.actors import IN_HAND, Crew, LostChunk
from llama_adapter.app.jobs.clusters.chunks import AnsweredChunk, Chunk
from llama_adapter.app.jobs.clusters.places import Place
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.pictures.inputs import InputSpec
from tests.app.jobs.clusters.made import FIRST, QUESTIONS, SPEC, item

ray = pytest.importorskip("ray")
PLACE = Place(machine="here", device="cpu", num_cpus=1.0, devices={}, threads=1)


class FakeRay:
    """Actors whose calls end when and as a test says. A reference is a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls, self.ended = 0, dict[int, Any]()
        call = SimpleNamespace(remote=self._call)
        call.options = lambda **options: call
        self.actor = SimpleNamespace(load=call, answer=call)
        monkeypatch.setattr(Crew, "_started", lambda crew, place: self.actor)
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)

    def _call(self, *arguments: object) -> int:
        self.num_calls += 1
        return self.num_calls

    def _wait(self, references: list[int], *, num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        return [one for one in references if one in self.ended], [one for one in references if one not in self.ended]

    def _get(self, reference: int) -> Any:
        if isinstance(self.ended[reference], Exception):
            raise self.ended[reference]
        return self.ended[reference]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.fixture
def crew(fake_ray: FakeRay) -> Crew:
    """One captioner, which is ready."""
    crew = Crew(Job(spec=SPEC, inputs=InputSpec(), questions=QUESTIONS), [PLACE], ".", say=lambda text: None)
    crew.start()
    fake_ray.ended[1] = FIRST
    assert list(crew.wait(0.0)) == [FIRST]
    return crew


def test_of_the_chunks_of_an_ended_captioner_the_first_may_be_the_cause_and_the_others_waited(
    fake_ray: FakeRay, crew: Crew
) -> None:
    chunks = [Chunk(items=(item(number),)) for number in range(IN_HAND)]
    reads: list[Any] = [b""] * IN_HAND
    for chunk, read in zip(chunks, reads, strict=True):
        crew.give(chunk, read)
    assert (crew.num_in_hand, crew.can_take) == (2, False)
    ended = ray.exceptions.RayActorError()
    fake_ray.ended |= {2: ended, 3: ended}  # both calls of the actor fail, and the second one tells nothing new

    came = list(crew.wait(0.0))

    assert came == [LostChunk(chunks[0], may_be_cause=True), LostChunk(chunks[1], may_be_cause=False)]
    assert (crew.num_in_hand, crew.num_ready, fake_ray.num_calls) == (0, 0, 4)  # it loads again, once
    fake_ray.ended[4] = FIRST
    assert list(crew.wait(0.0)) == [FIRST]
    assert (crew.num_ready, crew.can_take) == (1, True)


def test_a_chunk_whose_pixels_are_lost_leaves_its_captioner_ready(fake_ray: FakeRay, crew: Crew) -> None:
    chunks = [Chunk(items=(item(number),)) for number in range(2)]
    answered = AnsweredChunk(digests=("",), answers=())
    reads: list[Any] = [b"", b""]
    for chunk, read in zip(chunks, reads, strict=True):
        crew.give(chunk, read)
    fake_ray.ended |= {2: ray.exceptions.RayError("lost"), 3: answered}

    assert list(crew.wait(0.0)) == [LostChunk(chunks[0], may_be_cause=True), (chunks[1], answered)]
    assert (crew.num_ready, crew.num_in_hand, fake_ray.num_calls) == (1, 0, 3)
