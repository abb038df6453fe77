"""Chunks are read on the machines of a cluster, and answered pictures are left out."""

import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llama_adapter.app.jobs.clusters.chunks import Chunk
from llama_adapter.app.jobs.clusters.reading import Readers, Reading, read_chunk
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.vision.pixels import PixelRule
from tests.app.golden import picture
from tests.app.jobs.clusters.made import QUESTIONS, SPEC, FakeRay, item, known_after, planner_of

READING = Reading(spec=SPEC.pictures, pixels=PixelRule(image_size=32), kind="thread", timeout_s=10.0, folder=".")
read = partial(read_chunk, reading=READING, known=None)


def test_a_chunk_is_read_and_what_is_wrong_with_a_picture_is_in_its_place(tmp_path: Path) -> None:
    shutil.copy(picture("noise_128x96.png"), tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    unnamed = PictureReading()
    items = [replace(item(index), picture=str(tmp_path / name)) for index, name in enumerate(("good.png", "bad.png"))]

    done = read(Chunk(items=(*items, replace(item(2), picture=unnamed))))

    assert done.problem is None
    good, bad, other = (one.picture for one in done.items)
    assert good.pixels.shape == (32, 32, 3)
    assert bad.error.code == "not_a_picture"
    assert other == unnamed
    assert [one.questions for one in done.items] == [one.questions for one in (*items, item(2))]


@pytest.mark.parametrize("scheme", ["", "slow://"], ids=["files", "addresses"])
def test_slow_pictures_come_all_and_in_their_order(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Their time does not matter: the driver asks for a chunk once, and matches pictures by position."""

    def wait(picture: object, **_: object) -> PictureReading:
        number = int(str(picture).rpartition("/")[2].removesuffix(".png"))
        time.sleep(0.06 - 0.01 * number if number < 5 else 0)
        return PictureReading(digest=str(number))

    monkeypatch.setattr("llama_adapter.app.jobs.clusters.reading.read_remote", lambda address: address)
    monkeypatch.setattr("llama_adapter.app.jobs.clusters.reading._reader", lambda reading: SimpleNamespace(read=wait))
    items = tuple(replace(item(number), picture=f"{scheme}{number}.png") for number in range(9))

    done = read(Chunk(items=items))

    assert done.problem is None
    assert [one.questions for one in done.items] == [one.questions for one in items]
    assert [one.picture.digest for one in done.items if isinstance(one.picture, PictureReading)] == [*"012345678"]


def test_pictures_that_are_answered_are_hashed_and_no_more(tmp_path: Path) -> None:
    shutil.copy(picture("noise_128x96.png"), tmp_path / "a.png")
    work, _ = planner_of().item(PictureInput(source=str(tmp_path / "a.png"), label="a.png"))
    chunk = Chunk(items=(work,))
    (looked,) = read(chunk).items
    known = known_after(tmp_path, digest=looked.picture.digest, num_questions=len(QUESTIONS))

    (left_out,) = read(chunk, known=known).items
    (sure,) = read(replace(chunk, is_sure=True), known=known).items

    assert left_out.picture.is_only_digest
    assert left_out.picture.digest == looked.picture.digest
    assert sure.picture.pixels is not None


@pytest.mark.parametrize("retry_errors", [False, True])
def test_missing_pictures_that_failed_are_left_out_unless_they_are_tried_again(
    tmp_path: Path, retry_errors: bool
) -> None:
    work, _ = planner_of().item(PictureInput(source=str(tmp_path / "a.png"), label="a.png"))
    chunk = Chunk(items=(work,))
    (failed,) = (item.picture for item in read(chunk).items)
    how: dict[str, Any] = {"num_questions": len(QUESTIONS), "retry_errors": retry_errors, "error": failed.error}
    known = known_after(tmp_path, digest=failed.digest, **how)

    (again,) = (item.picture for item in read(chunk, known=known).items)

    assert (again.is_only_digest, again.error) == ((False, failed.error) if retry_errors else (True, None))


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(monkeypatch)
    task = SimpleNamespace(remote=lambda *_, **__: (fake.call(), b"read"))
    monkeypatch.setattr("ray.remote", lambda function: SimpleNamespace(options=lambda **_: task))
    monkeypatch.setattr("ray.put", lambda value: value)
    return fake


def test_readers_tell_lost_processes_from_code_that_cannot_run(fake_ray: FakeRay) -> None:
    from ray import exceptions

    chunks = [Chunk(items=(item(number),)) for number in range(4)]
    readers = Readers(READING, known=None, at_once=4, most=4)
    for chunk in chunks:
        readers.add(chunk)
    broken = exceptions.RuntimeEnvSetupError("no module named llama_adapter")
    ends = (None, exceptions.WorkerCrashedError(), exceptions.OutOfMemoryError("9 GB"), broken)
    fake_ray.ended |= dict(enumerate(ends, start=1))

    taken = [readers.take(timeout_s=0.0) for _ in range(5)]

    assert taken == [(chunks[0], b"read"), (chunks[1], None), (chunks[2], None), (chunks[3], broken), None]


def test_readers_are_bounded_in_what_they_read_and_in_what_waits(fake_ray: FakeRay) -> None:
    chunk, readers = Chunk(items=(item(0),)), Readers(READING, known=None, at_once=2, most=3)

    def add_all() -> int:
        while readers.can_take:
            readers.add(chunk)
        return readers.num_pending

    assert add_all() == 2
    fake_ray.ended[1] = None
    assert add_all() == 3
    fake_ray.ended[2] = None
    assert add_all() == 3
    readers.take(timeout_s=0.0)
    assert add_all() == 3
