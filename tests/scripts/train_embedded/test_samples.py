"""The rules of drawing, and the shipped sample pictures, which are those that are drawn, with their questions."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from scripts.train_embedded.pictures import with_unnamed_kinds
from scripts.train_embedded.samples import WHOLE, Sample, draw_samples, samples
from scripts.train_embedded.world import CELL_CENTERS, COLORS, JITTER, MIN_GAP, PICTURE_SIZE, RADII, sample_scene


@pytest.mark.parametrize("num_objects", [1, 2, 3, 6])
def test_objects_lie_inside_the_picture_in_their_cells_and_apart(num_objects: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(40):
        scene = sample_scene(rng, num_objects=num_objects)
        assert len({thing.cell for thing in scene}) == num_objects
        for thing in scene:
            low, high = RADII[thing.size]
            assert low <= thing.radius <= high
            for place, cell in ((thing.x, thing.column), (thing.y, thing.row)):
                assert thing.radius <= place <= PICTURE_SIZE - thing.radius
                # A large object that is pushed away from the edge leaves its cell's centre by a little more.
                assert abs(place - CELL_CENTERS[cell]) <= JITTER + 10
            for other in scene:
                if other is not thing:
                    distance = np.hypot(thing.x - other.x, thing.y - other.y)
                    assert distance >= thing.radius + other.radius + MIN_GAP


def test_unnamed_colours_are_far_from_every_named_one() -> None:
    rng = np.random.default_rng(6)
    for _ in range(40):
        scene = sample_scene(rng, num_objects=3)
        for thing, color in zip(*with_unnamed_kinds(scene, rng), strict=True):
            distance = min(np.abs(np.subtract(color, named)).sum() for named in COLORS.values())
            assert distance > 100 if thing.color == "other" else distance == 0


ASSETS = Path(__file__).parents[3] / "assets"
PICTURES, BROKEN = ASSETS / "pictures", ASSETS / "broken"


def _lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    return list(samples())


def test_drawing_again_gives_the_shipped_samples(drawn: Sequence[Sample]) -> None:
    asked = [(sample.name, each.task, each.text, each.answer) for sample in drawn for each in sample.questions]
    assert asked == [tuple(line.values()) for line in _lines(PICTURES)]
    assert {sample.name for sample in drawn} == {path.name for path in PICTURES.iterdir()} - {"questions.jsonl"}
    for sample in drawn:
        with Image.open(PICTURES / sample.name) as image:
            difference = np.abs(sample.pixels.astype(int) - np.asarray(image))
        if sample.name.endswith(".jpg"):  # JPEG removes some of the noise
            assert difference.mean() < 6, sample.name
        else:  # other processors may round a level differently
            assert difference.max() <= 2, sample.name


def test_writing_samples_and_broken_files(
    drawn: Sequence[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [sample for sample in drawn if sample.name in (WHOLE, "12-red-star.jpg")]
    monkeypatch.setattr("scripts.train_embedded.samples.samples", lambda: some)

    draw_samples(tmp_path / "pictures")

    names = [sample.name for sample in some]
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {*names, "questions.jsonl"}
    assert _lines(tmp_path / "pictures") == [line for line in _lines(PICTURES) if line["picture"] in names]
    assert {path.name for path in (tmp_path / "broken").iterdir()} == {path.name for path in BROKEN.iterdir()}
    whole = (tmp_path / "pictures" / WHOLE).read_bytes()
    assert (tmp_path / "broken" / "truncated.png").read_bytes() == whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("name", "code"), [("truncated.png", "truncated"), ("text.jpg", "not_a_picture"), ("empty.png", "empty")]
)
def test_broken_files_have_different_errors(name: str, code: str) -> None:
    with pytest.raises(PictureError) as caught:
        load_picture(BROKEN / name)
    assert caught.value.code == code
