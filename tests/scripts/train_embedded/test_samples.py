"""The shipped sample pictures: the cases that they cover, and that questions.jsonl describes the pictures."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from scripts.train_embedded.questions import CAPTION_QUESTIONS, COUNT_QUESTIONS, NUMBERS, RELATIONS, at
from scripts.train_embedded.samples import WHOLE, Sample, draw_samples, samples
from scripts.train_embedded.world import COLOR_NAMES, NEVER_DRAWN, PICTURE_SIZE, POSITIONS, SHAPES, SIZES

ASSETS = Path(__file__).parents[3] / "assets"
PICTURES, BROKEN = ASSETS / "pictures", ASSETS / "broken"


def _lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def drawn() -> list[Sample]:
    return list(samples())


def test_samples_have_a_caption_and_the_size_of_clip() -> None:
    captions = {line["picture"] for line in _lines(PICTURES) if line["task"] == "caption"}
    files = {path.name for path in PICTURES.iterdir() if path.suffix in (".png", ".jpg")}
    assert captions == files
    for name in files:
        with Image.open(PICTURES / name) as image:
            assert image.size == (PICTURE_SIZE, PICTURE_SIZE)
            assert image.mode == "RGB"


def test_samples_cover_all_attributes_numbers_relations_and_faults(drawn: Sequence[Sample]) -> None:
    scenes = [sample.scene for sample in drawn]
    things = [thing for scene in scenes for thing in scene]
    assert {(thing.shape, thing.size) for thing in things} == set(product(SHAPES, SIZES))
    assert {(thing.color, thing.size) for thing in things} == set(product(COLOR_NAMES, SIZES))
    assert {at(thing) for thing in things} == {f"at the {position}" for position in POSITIONS}
    assert {(thing.shape, thing.color) for thing in things} >= NEVER_DRAWN
    assert {len(scene) for scene in scenes} == {1, 2, 3}
    for attribute in ("shape", "color"):
        alike = [Counter(getattr(thing, attribute) for thing in scene) for scene in scenes]
        assert {number for counts in alike for number in counts.values()} == {1, 2, 3}
    # Every way in which a caption of two objects can be right or wrong.
    pairs = [scene for scene in scenes if len(scene) == 2]
    ways = {(first.column == second.column, np.sign(first.row - second.row)) for first, second in pairs}
    assert ways == {(True, -1), (False, -1), (False, 0), (False, 1)}
    # One shape in both sizes.
    contrasts = [
        (first.shape, first.color == second.color)
        for scene in scenes
        for first, second in combinations(scene, 2)
        if first.shape == second.shape and first.size != second.size
    ]
    assert len({shape for shape, _ in contrasts}) >= 4
    assert {has_one_color for _, has_one_color in contrasts} == {True, False}
    # Blurred, noisy and compressed pictures.
    assert any(sample.faults.blur == 1.0 for sample in drawn)
    assert sum(sample.faults.noise == 1.0 for sample in drawn) >= 5
    assert sum(sample.name.endswith(".jpg") for sample in drawn) >= 5


def test_questions_cover_all_answers() -> None:
    asked, answers = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for line in _lines(PICTURES):
        asked[line["task"]].add(line["question"])
        answers[line["task"]].add(line["answer"])
    assert len({(line["picture"], line["question"]) for line in _lines(PICTURES)}) == len(_lines(PICTURES))
    assert asked["caption"] == set(CAPTION_QUESTIONS)
    assert asked["count"] == set(COUNT_QUESTIONS)
    assert answers == {
        "caption": answers["caption"],
        "rel_what": answers["rel_what"],
        "count": set(NUMBERS[1:]),
        **{key: set(NUMBERS) for key in ("count_shape", "count_color")},
        "color": set(COLOR_NAMES),
        "shape": set(SHAPES),
        "size": set(SIZES),
        "where": {f"at the {position}" for position in POSITIONS},
        **{key: {"yes", "no"} for key in ("exist", "rel_yn")},
    }


def test_relations_are_asked_about_with_both_answers() -> None:
    found = {
        (line["task"], relation, line["answer"] if line["task"] == "rel_yn" else "")
        for line in _lines(PICTURES)
        for relation in RELATIONS
        if line["task"].startswith("rel_") and relation in line["question"]
    }
    assert found == {*product(["rel_yn"], RELATIONS, ("yes", "no")), *product(["rel_what"], RELATIONS, [""])}


def test_drawing_again_gives_the_shipped_samples(drawn: Sequence[Sample]) -> None:
    asked = [(sample.name, each.task, each.text, each.answer) for sample in drawn for each in sample.questions]
    assert asked == [tuple(line.values()) for line in _lines(PICTURES)]
    for sample in drawn:
        with Image.open(PICTURES / sample.name) as image:
            difference = np.abs(sample.pixels.astype(int) - np.asarray(image)).mean()
        assert difference < (6 if sample.name.endswith(".jpg") else 0.1), sample.name  # JPEG removes some of the noise


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
