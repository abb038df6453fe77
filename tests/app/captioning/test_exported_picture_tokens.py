"""Exported models that see pictures as tokens answer as transformers does, also without torch.

Decoders in OM files run on stand-ins for ATC and ais_bench.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter import Captioner, GraphError
from llama_adapter.app.captioning import assemble_exported
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.exported import read_exported_model
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.exported.card import read_card
from tests.app.captioning.test_exported import run_without_torch
from tests.app.exported import compile_decoder, exported_embedded
from tests.app.picture_models import QUESTIONS, Reference, check_further_questions, check_ragged_batches, pictures, save
from tests.fakes.exported import without_card
from tests.parity.exported import choice_limit
from tests.runtime.graphs import conftest

TOKENS = 64

install = conftest.install  # a fixture


@pytest.fixture(scope="module", params=["smolvlm", pytest.param("llava", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def reference(folder: Path, kind: str) -> Reference:
    return Reference(folder, kind)


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    """The whole model as ONNX. Its export compares decoder and encoder with torch's."""
    out = folder / "onnx"
    run_export_decoder(DecoderJob(spec=CaptionerSpec(llama_dir=folder), out=str(out)))
    return out


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Path:
    """The decoder as an OM."""
    compile_decoder(folder / "om", llama_dir=folder)
    return folder / "om"


@pytest.fixture(params=["onnx", pytest.param("om", marks=pytest.mark.slow)])
def captioner(request: pytest.FixtureRequest, exported: Path, install: Callable[..., None]) -> Iterator[Captioner]:
    decoder, encoder = exported, None
    if request.param == "om":
        install("")
        decoder, encoder = request.getfixturevalue("compiled"), exported / "encoder.onnx"
    with Captioner.load(decoder=decoder, encoder=encoder, batch_size=4) as captioner:
        yield captioner


@pytest.mark.proves("LLaVA, SmolVLM, Idefics3 (pictures as tokens)", "ONNX", "OM")
def test_answers_are_those_of_transformers(captioner: Captioner, reference: Reference) -> None:
    check_ragged_batches(captioner, reference, max_new_tokens=TOKENS)
    both = captioner.ask(pictures(2), QUESTIONS[0], max_new_tokens=TOKENS)
    assert list(both.token_ids) == reference.answer(pictures(2), QUESTIONS[0], max_new_tokens=TOKENS)


def test_choices_are_scored_as_in_torch(captioner: Captioner, folder: Path) -> None:
    options: Any = {"prompts": QUESTIONS[0], "choices": ["yes", "no", "red and blue"]}
    with Captioner.load(folder, batch_size=4, device="cpu", dtype="float32") as torchs:
        wanted = torchs.generate(pictures(3), **options)
    made = captioner.generate(pictures(3), **options)

    for answer, other in zip(made, wanted, strict=True):
        assert answer.text == other.text
        assert answer.choice == pytest.approx(other.choice, abs=choice_limit())


@pytest.mark.parametrize("captioner", ["onnx"], indirect=True)
def test_a_further_question_about_a_picture_computes_its_own_tokens_only(
    captioner: Captioner, reference: Reference
) -> None:
    check_further_questions(captioner, reference, max_new_tokens=TOKENS)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    return convert(CaptionerSpec(llama_dir=folder), folder / "bundle", dtype=torch.float32)


def test_an_encoder_of_another_model_is_refused(exported: Path, bundle: Path, folder: Path) -> None:
    other = str(Path(exported_embedded()) / "encoder.onnx")
    for options in ({"decoder": exported}, {"model": bundle}, {"llama_dir": folder}):
        with pytest.raises(GraphError, match=r"makes 10 visual queries of width|makes 10 tokens of width"):
            Captioner.load(encoder=other, **options)


def test_an_encoder_of_a_like_model_is_refused(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = read_exported_model(exported), read_card(Path(exported_embedded()))
    foreign = without_card(exported / "encoder.onnx", tmp_path / "foreign.onnx")
    assert model.vision is not None
    clip = dataclasses.replace(model.vision.clip, image_size=48)
    larger = dataclasses.replace(model, vision=dataclasses.replace(model.vision, clip=clip))
    trained = dataclasses.replace(model, card=dataclasses.replace(model.card, fingerprint=other.fingerprint))
    for read, encoder, words in (
        (larger, foreign, r"foreign\.onnx` takes pictures of 32 pixels, and the decoder in .* is of a model for 48"),
        (trained, exported / "encoder.onnx", r"its (tower|connector)'s weights are not those that the decoder in"),
    ):
        monkeypatch.setattr(assemble_exported, "read_exported_model", lambda folder, read=read: read)
        with pytest.raises(GraphError, match=words):
            Captioner.load(decoder=exported, encoder=encoder)


def test_an_early_export_has_an_encoder_with_a_card(exported: Path, tmp_path: Path) -> None:
    early = shutil.copytree(exported, tmp_path / "early")
    dataclasses.replace(read_card(early), vision=None).write(early)
    with Captioner.load(decoder=early) as captioner, Captioner.load(decoder=exported) as other:
        assert captioner.pixels == other.pixels
    foreign = without_card(exported / "encoder.onnx", tmp_path / "foreign.onnx")
    with pytest.raises(GraphError, match=r"has no card, and that of the decoder in .* does not say how it reads"):
        Captioner.load(decoder=early, encoder=foreign)


def test_what_is_said_of_an_encoder_without_a_card(exported: Path, bundle: Path, kind: str, tmp_path: Path) -> None:
    foreign = without_card(exported / "encoder.onnx", tmp_path / "foreign.onnx")
    typo = without_card(exported / "encoder.onnx", tmp_path / "typo.onnx", green_std=0.24130258)
    said = []
    for file, precision in ((foreign, None), (foreign, "int8"), (typo, None)):
        try:
            with Captioner.load(bundle, encoder=file, precision=precision, device="cpu") as captioner:
                said.append(captioner.info.notes[-1])
        except GraphError as error:
            said.append(f"{error.message} {error.hint}")
    assert "Its encoding of a test picture differs from torch's by 0.0%" in said[0]
    assert "Without the model's full weights, its weights, its normalisation and its order of colours (RGB)" in said[1]
    assert ("the ModelZoo" in said[2], "it has another tower or connector" in said[2]) == (
        (True, False) if kind == "llava" else (False, True)
    )


# Options, and the fixtures or files that are their values; `foreign` is an encoder without a card.
PLACES = {
    "a bundle, an exported encoder": {"model": "bundle", "encoder": "encoder"},
    "a bundle, an encoder without a card": {"model": "bundle", "encoder": "foreign"},
    "a folder, an exported encoder": {"llama_dir": "folder", "encoder": "encoder"},
    "a folder, an encoder without a card": {"model": "folder", "encoder": "foreign"},
    "an exported decoder, an encoder without a card": {"decoder": "exported", "encoder": "foreign"},
    "an exported decoder, torch's encoder": {"decoder": "exported", "llama_dir": "folder"},
}


@pytest.mark.parametrize("named", PLACES.values(), ids=PLACES)
def test_decoder_and_encoder_come_from_different_places(
    named: dict[str, str], exported: Path, bundle: Path, folder: Path, reference: Reference, tmp_path: Path
) -> None:
    images, places = pictures(5), {"exported": exported, "bundle": bundle, "folder": folder}
    places["encoder"] = exported / "encoder.onnx"
    places["foreign"] = without_card(places["encoder"], tmp_path / "foreign.onnx")
    options: Any = {name: places[place] for name, place in named.items()}
    with Captioner.load(**options, dtype="float32", device="cpu") as captioner:
        answers = captioner.generate(images, QUESTIONS[0], max_new_tokens=24)

    assert captioner.info.vision.startswith("onnxruntime") == ("encoder" in named)
    for answer, image in zip(answers, images, strict=True):
        assert list(answer.token_ids) == reference.answer([image], QUESTIONS[0], max_new_tokens=24)


@pytest.mark.slow
def test_a_server_runs_without_torch(exported: Path, tmp_path: Path) -> None:
    pictures(1)[0].save(tmp_path / "one.png")
    assert run_without_torch(exported, tmp_path / "one.png") == "None\n[]\n"
