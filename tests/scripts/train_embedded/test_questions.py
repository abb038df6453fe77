"""The rules of drawing, the shipped samples, and questions in known and other words, with their only right answers."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from syrupy.assertion import SnapshotAssertion

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from scripts.train_embedded.grammar import GRAMMAR, OUTSIDE, OUTSIDE_ANSWER, RELATIONS
from scripts.train_embedded.held_out import (
    SECOND_LIST,
    SENTENCES,
    Sentences,
    held_out,
    held_out_outside,
    is_of_training,
)
from scripts.train_embedded.pictures import with_unnamed_kinds
from scripts.train_embedded.questions import CLASSES, NOT_ASKED, TASKS, Question, ask, caption
from scripts.train_embedded.samples import WHOLE, Sample, draw_samples, samples
from scripts.train_embedded.wordings import expand, fills_for, outside, reword
from scripts.train_embedded.world import (
    CELL_CENTERS,
    COLOR_NAMES,
    COLORS,
    JITTER,
    MIN_GAP,
    PICTURE_SIZE,
    RADII,
    SHAPES,
    SIZES,
    Scene,
    sample_scene,
    scene_from_words,
)


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


STAR = ("small", "red", "star", "top left")
RING = ("large", "blue", "ring", "bottom left")
CROSS = ("large", "orange", "cross", "right")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([STAR], "a small red star at the top left"),
        ([CROSS, STAR], "a small red star to the left of a large orange cross"),
        ([RING, STAR], "a small red star above a large blue ring"),
        ([CROSS, RING, STAR], "a small red star, a large blue ring and a large orange cross"),
    ],
)
def test_captions_read_as_the_world_promises(words: list[tuple[str, ...]], wanted: str) -> None:
    assert caption(scene_from_words(words)) == wanted


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("exist", {"Is there a red star?": "yes", "Is there a blue star?": "no", "Is there a red ring?": "no"}),
        ("rel_yn", {"Is the star above the ring?": "yes", "Is the cross to the left of the ring?": "no"}),
        ("count_color", {"How many blue objects are there?": "two", "How many green objects are there?": "zero"}),
    ],
)
def test_questions_have_their_one_right_answer(task: str, answers: dict[str, str]) -> None:
    scene, rng = scene_from_words([STAR, RING, ("large", "blue", "cross", "right")]), np.random.default_rng(0)
    asked = [each for _ in range(200) if (each := ask(scene, task, rng)) is not None]
    assert {(each.text, each.answer) for each in asked if each.text in answers} == {*answers.items()}


STAR_PARTS = {"shape": SHAPES.index("star"), "color": COLOR_NAMES.index("red"), "size": SIZES.index("small")}
STAR_LABELS = {**STAR_PARTS, "row": 0, "column": 0}


def test_words_say_what_they_refer_to() -> None:
    scene, rng = scene_from_words([STAR, RING, ("large", "blue", "cross", "right")]), np.random.default_rng(0)
    asked = [ask(scene, task, rng) for task in TASKS for _ in range(200)]
    labels = {
        each.text: {
            each.text[:end].split()[-1]: {kind: at for kind, at in zip(CLASSES, found, strict=True) if at != NOT_ASKED}
            for end, found in each.words
        }
        for each in asked
        if each is not None
    }

    assert labels["What color is the star?"] == labels["What is to the right of the star?"] == {"star": STAR_LABELS}
    assert labels["What shape is the red object?"] == {"red": STAR_LABELS}
    assert labels["How many crosses are there?"] == {"crosses": {"count": 1}}
    assert labels["How many blue objects are there?"] == {"blue": {"count": 2}}
    assert labels["Is there a red star?"] == {"star": {"exist": 1}}
    assert labels["Is there a blue star?"] == {"star": {"exist": 0}}
    both = labels["Is the star above the ring?"]
    assert (both["star"], both["ring"]["shape"]) == (STAR_LABELS, SHAPES.index("ring"))
    assert labels["Generate caption of this image"] == labels["How many objects are there?"] == {}


SCENE = scene_from_words([("small", "red", "star", "top left"), ("large", "blue", "ring", "bottom right")])


def _asked(task: str, scene: Scene = SCENE) -> Question:
    question = ask(scene, task, np.random.default_rng(3))
    assert question is not None
    return question


def test_a_seed_gives_the_same_questions_as_ever(snapshot: SnapshotAssertion) -> None:
    """A change of rules, words or draws changes what a training from a seed learns."""
    assert {task: _digest(task) for task in (*TASKS, "outside")} == snapshot


def _digest(task: str) -> str:
    rng, digest = np.random.default_rng(10), hashlib.sha256()
    for number in range(60):
        scene = sample_scene(rng, placed=False)
        if task == "outside":
            said = [*(outside(rng) for _ in range(8))]
            said += [held_out_outside(number, rng, mistyped=mistyped) for mistyped in (False, True)]
        else:
            question = ask(scene, task, rng)
            if question is None:
                continue
            said = [question, *(reword(question, scene, rng) for _ in range(8))]
            said += [held_out(question, number, rng, mistyped=mistyped) for mistyped in (False, True)]
            said.append(held_out(question, number, rng, sentences=SECOND_LIST))
        for each in said:
            digest.update(repr((each.text, each.answer, each.about, each.words)).encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("task", TASKS)
def test_every_template_can_be_filled_in(task: str) -> None:
    rng = np.random.default_rng(1)
    question = _asked(task)
    for templates in GRAMMAR[task].values():
        for template in templates:
            fills, answer = fills_for(question, SCENE, rng, whole="$Kshape" in template)
            said = expand(template, fills, rng)
            assert said
            assert answer
            assert not any(set(word.text) & set("$%()|*{}") for word in said), template


def test_every_outside_question_has_the_one_answer() -> None:
    rng = np.random.default_rng(2)
    for _ in range(len(OUTSIDE) * 5):
        question = outside(rng)
        assert (question.task, question.answer, question.words) == ("outside", OUTSIDE_ANSWER, ())
        assert not set(question.text) & set("$%|")


def test_words_are_labelled_as_in_the_known_words() -> None:
    """The last word that names the object has the labels that it has in the known sentence."""
    rng = np.random.default_rng(4)
    for task in ("color", "shape", "size", "where", "count_color", "rel_what"):
        question = _asked(task)
        ((_, labels),) = question.words
        for _ in range(60):
            found = reword(question, SCENE, rng).words
            assert found
            assert {each for _, each in found} == {labels}
            assert len(labels) == len(CLASSES)


@pytest.mark.parametrize("sentences", [SENTENCES, SECOND_LIST], ids=["first", "second"])
def test_held_out_sentences_name_what_the_question_is_about(sentences: Sentences) -> None:
    rng = np.random.default_rng(7)
    for task in TASKS:
        question = _asked(task)
        for number in range(len(sentences[task])):
            asked = held_out(question, number, rng, sentences=sentences)
            assert (asked.task, asked.answer) == (task, question.answer)
            assert "{" not in asked.text
            assert all(name in asked.text.lower() for name in question.about if name not in RELATIONS)
    assert held_out_outside(0, rng).answer == OUTSIDE_ANSWER


@pytest.mark.slow
def test_no_held_out_sentence_is_one_of_the_training() -> None:
    rng = np.random.default_rng(8)
    for task in (*TASKS, "outside"):
        for number in range(len(SENTENCES[task])):
            asked = held_out_outside(number, rng) if task == "outside" else held_out(_asked(task), number, rng)
            assert not is_of_training(asked), asked.text


def test_sentences_of_the_training_are_recognised() -> None:
    rng = np.random.default_rng(9)
    said = [expand(template, {}, rng) for template in GRAMMAR["count"]["ask"]]
    texts = [" ".join(word.text for word in each).replace(" '", "'") for each in said]
    assert all(is_of_training(Question(task="count", text=f"{text}?", answer="")) for text in texts)
    assert not is_of_training(Question(task="count", text="What is the price of counting?", answer=""))
