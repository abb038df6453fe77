"""Models that see pictures as tokens answer as transformers does: alone, in batches, and about several pictures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from tests.app import picture_models
from tests.app.picture_models import QUESTIONS, Reference, check_further_questions, check_ragged_batches, pictures, save

TOKENS = 12


@pytest.fixture(scope="module", params=picture_models.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def reference(folder: Path, kind: str) -> Reference:
    return Reference(folder, kind)


@pytest.fixture(scope="module")
def captioner(folder: Path) -> Iterator[Captioner]:
    with Captioner.load(folder, batch_size=4, device="cpu", dtype="float32") as captioner:
        yield captioner


@pytest.mark.proves("LLaVA, SmolVLM, Idefics3 (pictures as tokens)", "CPU")
def test_answers_in_ragged_batches_are_those_of_transformers(captioner: Captioner, reference: Reference) -> None:
    answers = check_ragged_batches(captioner, reference, max_new_tokens=TOKENS)
    assert len({answer.token_ids for answer in answers}) == len(answers)  # the pictures matter


def test_further_questions_about_a_picture_compute_their_own_tokens_only(
    captioner: Captioner, reference: Reference
) -> None:
    check_further_questions(captioner, reference, max_new_tokens=TOKENS)


def test_two_pictures_in_one_prompt(captioner: Captioner, reference: Reference) -> None:
    images = pictures(2, seed=1)
    answer = captioner.ask(images, QUESTIONS[0], max_new_tokens=TOKENS)

    assert list(answer.token_ids) == reference.answer(images, QUESTIONS[0], max_new_tokens=TOKENS)
    assert answer.token_ids != captioner.ask(images[::-1], QUESTIONS[0], max_new_tokens=TOKENS).token_ids
    assert answer.prompt_tokens == len(reference.ids(images, QUESTIONS[0])[0])


# Gemma 2 and SmolLM3 say that embedding and head are one, which the configuration of the whole model denies.
@pytest.mark.parametrize(
    ("kind", "decoder", "entries"),
    [
        ("smolvlm", "gemma2", {"head_dim": 16, "sliding_window": 9}),
        ("idefics3", "smollm3", {}),
        ("llava", "qwen3", {"head_dim": 10}),
        ("joycaption", "phi3", {"tie_word_embeddings": True}),
    ],
)
def test_other_language_models(kind: str, decoder: str, entries: Any, tmp_path: Path) -> None:
    folder = save(tmp_path, kind, decoder=decoder, **entries)
    reference, image = Reference(folder, kind), pictures(1)[0]
    with Captioner.load(folder, batch_size=2, device="cpu", dtype="float32") as captioner:
        answers = captioner.generate([image] * 2, QUESTIONS[:2], max_new_tokens=TOKENS)
    for answer, question in zip(answers, QUESTIONS, strict=False):
        assert list(answer.token_ids) == reference.answer([image], question, max_new_tokens=TOKENS)


def test_bundles_answer_as_their_folders_do(captioner: Captioner, folder: Path, tmp_path: Path) -> None:
    whole = convert(CaptionerSpec(llama_dir=folder), tmp_path / "whole", dtype=torch.float32)
    few_bits = quantise_bundle(QuantiseJob(model=whole, out=tmp_path / "int8", precision="int8"))
    images = pictures(2, seed=3)

    def texts(model: Path, **options: Any) -> list[str]:
        with Captioner.load(model, device="cpu", dtype="float32", **options) as own:
            return [answer.text for answer in own.generate(images, QUESTIONS[:2], max_new_tokens=8)]

    expected = captioner.generate(images, QUESTIONS[:2], max_new_tokens=8)
    assert texts(whole) == [answer.text for answer in expected]
    assert texts(few_bits) == texts(folder, precision="int8")
