"""The shipped bundle answers rightly, as its card says; how it is scored; the detector of unfamiliar pictures."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors import safe_open

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded.decoder_stages import open_gates, take_decoder
from scripts.train_embedded.export import export
from scripts.train_embedded.familiar import FIT, FRESH, THRESHOLD, Floats, draw_own, fit
from scripts.train_embedded.grammar import OUTSIDE_ANSWER
from scripts.train_embedded.questions import TASKS, Question
from scripts.train_embedded.render import Pixels
from scripts.train_embedded.score import (
    OTHER_WORDS,
    Exam,
    answer_all,
    draw_exam,
    grade,
    in_other_words,
    main,
    prior,
    refused,
    wrong,
)
from scripts.train_embedded.world import PICTURE_SIZE

ASSETS = Path(__file__).parents[3] / "assets"


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return Captioner.load(str(ASSETS / "embedded"))


def test_sample_pictures_are_familiar_and_pictures_of_other_worlds_are_not(captioner: Captioner) -> None:
    own = sorted(path for path in (ASSETS / "pictures").iterdir() if path.suffix in (".png", ".jpg"))
    text = Image.new("RGB", (PICTURE_SIZE, PICTURE_SIZE), "white")
    ImageDraw.Draw(text).text((8, 8), "an adapter reads\nand writes words\n" * 4, fill="black", font_size=20)
    others = [*map(Image.fromarray, noise(4)), text]
    answers = captioner.generate([*own, *others], max_new_tokens=1)
    assert [answer.unfamiliar for answer in answers] == [False] * len(own) + [True] * len(others)


def test_questions_in_held_out_words_are_mostly_answered_rightly(captioner: Captioner) -> None:
    answers = answer_all(captioner, in_other_words(draw_exam(num_pictures=8, seed=78), seed=78))
    assert len(wrong(answers)) < 0.25 * len(answers)


def test_export_keeps_the_picture_half_of_the_bundle(tmp_path: Path) -> None:
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    shutil.copytree(ASSETS / "embedded", bundle)
    run.mkdir()
    shutil.copy(bundle / "tokenizer.model", run)
    decoder = take_decoder(bundle, Tokenizer.load(run / "tokenizer.model"))
    open_gates(decoder)
    torch.save({"modules": {"decoder": decoder.state_dict()}}, run / "wording.pt")

    export(folder=run, bundle=bundle)

    before, after = (json.loads((place / "manifest.json").read_text()) for place in (ASSETS / "embedded", bundle))
    for file in ("vision.safetensors", "familiar.safetensors", "known_answer.json", "known_answer.png"):
        assert after["files"][file] == before["files"][file]


@pytest.mark.slow
def test_fresh_pictures_are_answered_about_rightly_and_shuffled_ones_are_not(captioner: Captioner) -> None:
    exam = draw_exam(num_pictures=20, seed=77)
    assert min(grade(answer_all(captioner, exam)).values()) >= 90
    captions = Exam(pictures=exam.pictures, questions=[pair for pair in exam.questions if pair[1].task == "caption"])
    assert grade(answer_all(captioner, captions, shift=1))["caption"] <= 20


def test_biases_of_keys_and_values_are_zero_in_the_bundle() -> None:
    with safe_open(ASSETS / "embedded" / "llm.safetensors", "pt") as file:
        for layer in range(4):
            bias = file.get_tensor(f"layers.{layer}.attention.qkv.bias")
            assert bias[:192].any()
            assert not bias[192:].any()


def test_scores_are_percent_of_exactly_right_answers_and_of_the_most_frequent_one() -> None:
    question = Question(task="exist", text="?", answer="yes")
    assert grade([(question, answer) for answer in ("yes", " yes\n", "Yes", "yes.")]) == {"exist": 50.0}
    many = [(question, "yes")] * 93 + [(question, "no")] * 67
    assert grade(many) == {"exist": 58.12}  # 58.125 exactly, so to the even digit
    answers = ("red", "red", "blue", "green")
    questions = [Question(task="color", text="?", answer=answer) for answer in answers]
    assert prior(questions) == {"color": 50.0}


def test_a_model_is_scored_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--pictures", "2"])

    scored = json.loads(capsys.readouterr().out)
    assert sum(scored["asked"].values()) > 10
    assert (scored["pictures"], scored["num_wrong"]) == (2, 0)
    # The page's scores are those of the model in the repository.
    assert scored["model"][:12] in (ASSETS.parent / "docs" / "embedded-model.md").read_text(encoding="utf-8")


def test_an_exam_asks_every_task_and_is_drawn_alike_from_one_seed() -> None:
    first, again, other = (draw_exam(num_pictures=12, seed=seed) for seed in (1, 1, 2))
    assert {question.task for _, question in first.questions} == set(TASKS)
    assert first.questions == again.questions
    assert first.questions != other.questions
    assert np.array_equal(np.asarray(first.pictures[3]), np.asarray(again.pictures[3]))


def test_other_words_keep_pictures_and_answers() -> None:
    exam = draw_exam(num_pictures=5, seed=1)
    for _, sentences, mistyped in OTHER_WORDS:
        other = in_other_words(exam, seed=1, sentences=sentences, mistyped=mistyped)
        assert other.pictures == exam.pictures
        assert [(index, each.task, each.answer) for index, each in other.questions] == [
            *((index, each.task, each.answer) for index, each in exam.questions),
            *((index, "outside", OUTSIDE_ANSWER) for index in range(5)),
        ]
        assert not {each.text for _, each in other.questions} & {each.text for _, each in exam.questions}


def test_refusals_are_counted_among_questions_with_an_answer() -> None:
    given = {"color": ("red", OUTSIDE_ANSWER, "blue", "red"), "outside": (OUTSIDE_ANSWER,)}
    answers = [(Question(task=task, text="?", answer="red"), each) for task, many in given.items() for each in many]
    assert refused(answers) == 25.0


def noise(count: int) -> Sequence[Pixels]:
    return np.random.default_rng(1).integers(0, 256, (count, PICTURE_SIZE, PICTURE_SIZE, 3), dtype=np.uint8)


def quarters(pictures: Sequence[Pixels]) -> Floats:
    """Stands for an encoder: four visual queries with the differences between neighbouring pixels in each quarter."""
    half = PICTURE_SIZE // 2
    stacked = np.stack(pictures).astype(np.float32).reshape(-1, 2, half, 2, half, 3)
    differences = np.abs(np.diff(stacked, axis=2)).mean(axis=(2, 4)).reshape(-1, 4, 3)
    return np.asarray(differences, dtype=np.float32)


def test_own_pictures_of_each_use_are_different_ones() -> None:
    drawn = [draw_own(use=use, count=1)[0] for use in (FIT, THRESHOLD, FRESH)]
    drawn.append(draw_own(use=FRESH, count=1, never_drawn="with")[0])
    assert len({picture.tobytes() for picture in drawn}) == 4


def test_fitted_detector_separates_noise_from_the_world() -> None:
    ood_detector = fit([quarters, quarters], num_pictures=24)
    own_B, noise_B = (
        ood_detector.distances(quarters(pictures)) for pictures in (draw_own(use=FRESH, count=10), noise(10))
    )

    assert (own_B > ood_detector.threshold).mean() <= 0.2
    assert (noise_B > ood_detector.threshold).all()
    with pytest.raises(ValueError, match="four pictures or more"):
        fit([quarters], num_pictures=3)
