"""Broken, hostile and unusual pictures have one result each, and do not affect good pictures."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.pixels import PixelRule
from tests.odd_pictures import OddPicture, write_odd_pictures

pytestmark = pytest.mark.slow

SIZE = 224
PIXELS = PixelRule(image_size=SIZE)
SOUND = [str(path) for path in sorted(sample_pictures().glob("*.[pj][np]g"))]


@pytest.fixture(scope="module")
def odd_pictures(tmp_path_factory: pytest.TempPathFactory) -> list[OddPicture]:
    return write_odd_pictures(tmp_path_factory.mktemp("pictures") / "odd")


@pytest.fixture(scope="module")
def readings(odd_pictures: list[OddPicture]) -> Iterator[list[tuple[str, PictureReading]]]:
    """The readings of all odd pictures, with a good one before each, in two threads."""
    mixed = [path for number, odd in enumerate(odd_pictures) for path in (SOUND[number % len(SOUND)], odd.path)]
    with (
        IsolatedReader(ReadingSpec(), pixels=PIXELS, timeout_s=30, num_processes=2) as reader,
        ThreadPoolExecutor(2) as threads,
    ):
        yield list(zip(mixed, threads.map(reader.read, mixed), strict=True))


def test_each_odd_picture_has_its_one_result(
    odd_pictures: list[OddPicture], readings: list[tuple[str, PictureReading]]
) -> None:
    results = readings[1::2]

    assert [path for path, _ in results] == [picture.path for picture in odd_pictures]
    surprises = {
        picture.path: reading.error or "it was read"
        for picture, (_, reading) in zip(odd_pictures, results, strict=True)
        if picture.expected != "either" and (picture.expected == "error") != (reading.error is not None)
    }
    assert surprises == {}
    for path, reading in results:
        assert (reading.pixels is None) == (reading.error is not None), path
        if reading.pixels is not None:
            assert (reading.pixels.shape, reading.pixels.dtype) == ((SIZE, SIZE, 3), np.uint8), path


def test_no_odd_picture_ends_or_hangs_its_reader(readings: list[tuple[str, PictureReading]]) -> None:
    codes = Counter(reading.error.code for _, reading in readings if reading.error is not None)

    assert not codes.keys() & {"crashed", "timeout"}, codes
    assert len(codes) >= 7


def test_messages_about_odd_pictures_can_be_shown(readings: list[tuple[str, PictureReading]]) -> None:
    for path, reading in readings:
        if reading.error is not None:
            assert reading.error.message.isprintable(), path
            assert len(reading.error.message) < 2000, path
            assert f"`{shown_name(path)}`" in reading.error.message


def test_sound_pictures_between_odd_ones_are_read_as_if_alone(readings: list[tuple[str, PictureReading]]) -> None:
    here = PictureReader(ReadingSpec(), pixels=PIXELS)
    alone = {path: here.read(path) for path in SOUND}

    for path, reading in readings[0::2]:
        assert reading.digest == alone[path].digest
        assert np.array_equal(reading.pixels, alone[path].pixels), path  # type: ignore[arg-type]
