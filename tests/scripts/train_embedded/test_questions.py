"""Questions in the known words and in others: the only right answer, what words refer to, and held-out sentences."""

import hashlib

import numpy as np
import pytest
from syrupy.assertion import SnapshotAssertion

from scripts.train_embedded.grammar import GRAMMAR, OUTSIDE, OUTSIDE_ANSWER, RELATIONS
from scripts.train_embedded.held_out import (
    SECOND_LIST,
    SENTENCES,
    Sentences,
    held_out,
    held_out_outside,
    is_of_training,
)
from scripts.train_embedded.questions import CLASSES, NOT_ASKED, TASKS, Question, ask, caption
from scripts.train_embedded.wordings import expand, fills_for, outside, reword
from scripts.train_embedded.world import COLOR_NAMES, SHAPES, SIZES, Scene, sample_scene, scene_from_words

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
