"""The shipped bundle answers questions about shipped pictures, and about fresh ones, as stated in its model card."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.llm.tokenizer import Tokenizer
from scripts.train_embedded.decoder_stages import open_gates, take_decoder
from scripts.train_embedded.export import export
from scripts.train_embedded.other_worlds import draw_others
from scripts.train_embedded.score import Exam, answer_all, draw_exam, grade, in_other_words, wrong

ASSETS = Path(__file__).parents[3] / "assets"


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return Captioner.load(str(ASSETS / "embedded"))


def test_all_sample_pictures_are_captioned_rightly(captioner: Captioner) -> None:
    lines = [json.loads(line) for line in (ASSETS / "pictures" / "questions.jsonl").read_text().splitlines()]
    captions = [line for line in lines if line["task"] == "caption"]
    answers = captioner.generate(
        [ASSETS / "pictures" / line["picture"] for line in captions], [line["question"] for line in captions]
    )
    missed = [line["picture"] for line, answer in zip(captions, answers, strict=True) if answer.text != line["answer"]]
    assert not missed


def test_sample_pictures_are_familiar_and_pictures_of_other_worlds_are_not(captioner: Captioner) -> None:
    own = sorted(path for path in (ASSETS / "pictures").iterdir() if path.suffix in (".png", ".jpg"))
    others = [Image.fromarray(pixels) for kind in ("noise", "text") for pixels in draw_others(kind, count=4, seed=(5,))]
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
