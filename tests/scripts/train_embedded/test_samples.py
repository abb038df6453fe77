"""The shipped sample pictures: what they cover, and that questions.jsonl says what is to be seen."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from scripts.train_embedded.questions import CAPTION_QUESTIONS, COUNT_QUESTIONS, NUMBERS, RELATIONS, TASKS, at, caption
from scripts.train_embedded.samples import WHOLE, Sample, draw_samples, samples
from scripts.train_embedded.world import (
    COLOR_NAMES,
    NEVER_DRAWN,
    PICTURE_SIZE,
    POSITIONS,
    SHAPES,
    SIZES,
    Scene,
    scene_from_words,
)

ASSETS = Path(__file__).parents[3] / "assets"
PICTURES, BROKEN = ASSETS / "pictures", ASSETS / "broken"


def _lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    return list(samples())


@pytest.fixture(scope="module")
def scenes(drawn: Sequence[Sample]) -> list[Scene]:
    return [sample.scene for sample in drawn]


def test_every_sample_picture_has_a_caption_and_clips_size() -> None:
    captions = {line["picture"] for line in _lines(PICTURES) if line["task"] == "caption"}
    files = {path.name for path in PICTURES.iterdir() if path.suffix in (".png", ".jpg")}
    assert captions == files
    for name in files:
        with Image.open(PICTURES / name) as image:
            assert image.size == (PICTURE_SIZE, PICTURE_SIZE)
            assert image.mode == "RGB"


def test_shapes_colours_sizes_places_and_numbers_are_all_covered(scenes: Sequence[Scene]) -> None:
    things = [thing for scene in scenes for thing in scene]
    assert {(thing.shape, thing.size) for thing in things} == set(product(SHAPES, SIZES))
    assert {(thing.color, thing.size) for thing in things} == set(product(COLOR_NAMES, SIZES))
    assert {at(thing) for thing in things} == {f"at the {position}" for position in POSITIONS}
    assert {(thing.shape, thing.color) for thing in things} >= NEVER_DRAWN
    assert {len(scene) for scene in scenes} == {1, 2, 3}
    for attribute in ("shape", "color"):
        alike = [Counter(getattr(thing, attribute) for thing in scene) for scene in scenes]
        assert {number for counts in alike for number in counts.values()} == {1, 2, 3}


def test_pairs_stand_in_one_column_in_one_row_and_across_in_both_directions(scenes: Sequence[Scene]) -> None:
    """Every way in which the caption of two objects can be right or wrong."""
    pairs = [scene for scene in scenes if len(scene) == 2]
    ways = {(first.column == second.column, np.sign(first.row - second.row)) for first, second in pairs}
    assert ways == {(True, -1), (False, -1), (False, 0), (False, 1)}


def test_the_same_shape_is_small_and_large_in_one_picture(scenes: Sequence[Scene]) -> None:
    contrasts = [
        (first.shape, first.color == second.color)
        for scene in scenes
        for first, second in combinations(scene, 2)
        if first.shape == second.shape and first.size != second.size
    ]
    assert len({shape for shape, _ in contrasts}) >= 4
    assert {has_one_color for _, has_one_color in contrasts} == {True, False}


def test_backgrounds_are_flat_graded_and_cloudy(drawn: Sequence[Sample]) -> None:
    kinds = Counter(_background(sample) for sample in drawn if sample.name.endswith(".png"))
    assert min(kinds[kind] for kind in ("flat", "gradient", "clouds")) >= 3


def _background(sample: Sample) -> str:
    """Told from the pixels of the shipped picture that no object covers: how far they are from one plane."""
    y, x = np.mgrid[:PICTURE_SIZE:4, :PICTURE_SIZE:4] / PICTURE_SIZE
    is_free = np.ones(x.shape, dtype=bool)
    for thing in sample.scene:
        is_free &= np.hypot(x - thing.x / PICTURE_SIZE, y - thing.y / PICTURE_SIZE) > thing.radius / 160
    places = np.stack([x[is_free], y[is_free], np.ones(is_free.sum())], axis=1)
    pixels = _shipped(sample)[::4, ::4][is_free].astype(float)
    if not np.ptp(pixels, axis=0).any():
        return "flat"
    plane = places @ np.linalg.lstsq(places, pixels, rcond=None)[0]
    return "gradient" if (pixels - plane).std() < 0.6 else "clouds"


def test_some_pictures_are_blurred_noisy_and_compressed(drawn: Sequence[Sample]) -> None:
    assert any(sample.faults.blur == 1.0 for sample in drawn)
    assert sum(sample.faults.noise == 1.0 for sample in drawn) >= 5
    assert sum(sample.name.endswith(".jpg") for sample in drawn) >= 5


def test_every_kind_of_question_is_asked_with_every_kind_of_answer() -> None:
    asked, answers = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for line in _lines(PICTURES):
        asked[line["task"]].add(line["question"])
        answers[line["task"]].add(line["answer"])
    assert set(asked) == set(TASKS)
    assert asked["caption"] == set(CAPTION_QUESTIONS)
    assert asked["count"] == set(COUNT_QUESTIONS)
    assert answers["count"] == set(NUMBERS[1:])
    assert answers["count_shape"] == answers["count_color"] == set(NUMBERS)
    assert answers["color"] == set(COLOR_NAMES)
    assert answers["shape"] == set(SHAPES)
    assert answers["size"] == set(SIZES)
    assert answers["where"] == {f"at the {position}" for position in POSITIONS}
    assert answers["exist"] == {"yes", "no"}


def test_every_relation_is_asked_about_and_holds_or_not() -> None:
    by_task = {task: set(_relations(task)) for task in ("rel_yn", "rel_what")}
    assert by_task["rel_yn"] == set(product(RELATIONS, ("yes", "no")))
    assert {relation for relation, _ in by_task["rel_what"]} == set(RELATIONS)


def _relations(task: str) -> Iterator[tuple[str, str]]:
    for line in _lines(PICTURES):
        if line["task"] == task:
            [relation] = re.findall("|".join(RELATIONS), line["question"])
            yield relation, line["answer"]


def test_no_question_is_asked_twice_about_a_picture() -> None:
    asked = Counter((line["picture"], line["question"]) for line in _lines(PICTURES))
    assert max(asked.values()) == 1


def test_what_is_drawn_again_are_the_shipped_pictures_and_questions(drawn: Sequence[Sample]) -> None:
    asked = [(sample.name, each.task, each.text, each.answer) for sample in drawn for each in sample.questions]
    assert asked == [tuple(line.values()) for line in _lines(PICTURES)]
    for sample in drawn:
        difference = np.abs(sample.pixels.astype(int) - _shipped(sample)).mean()
        assert difference < (6 if sample.name.endswith(".jpg") else 0.1), sample.name  # JPEG loses some of the noise


def test_pictures_questions_and_broken_files_are_written(
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


def _shipped(sample: Sample) -> NDArray[np.uint8]:
    with Image.open(PICTURES / sample.name) as image:
        return np.asarray(image)


@pytest.mark.parametrize(
    ("name", "code"), [("truncated.png", "truncated"), ("text.jpg", "not_a_picture"), ("empty.png", "empty")]
)
def test_every_broken_file_has_an_error_of_its_own(name: str, code: str) -> None:
    with pytest.raises(PictureError) as caught:
        load_picture(BROKEN / name)
    assert caught.value.code == code


def test_captions_are_those_of_the_scenes(drawn: Sequence[Sample]) -> None:
    captions = {line["picture"]: line["answer"] for line in _lines(PICTURES) if line["task"] == "caption"}
    assert captions == {sample.name: caption(sample.scene) for sample in drawn}
    assert caption(scene_from_words([("small", "red", "star", "left")])) == captions["12-red-star.jpg"]
