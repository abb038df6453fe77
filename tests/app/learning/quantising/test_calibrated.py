"""`quantize --calibrate`: the bundle that it writes, the samples that it uses, and the requests that it refuses."""

import shutil
from pathlib import Path

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.learning.quantising import samples
from llama_adapter.app.learning.quantising.samples import SampleSpec, collect_samples, quantise_calibrated
from llama_adapter.app.models.bundle import load_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.quantised_model import QuantiseJob
from llama_adapter.app.models.resources import embedded_model, sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.reading.reader import PictureReader
from llama_adapter.runtime.errors import CheckpointError
from tests.app.command import Run
from tests.app.models.bundles import edit_manifest

FILES = sorted(str(path) for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
BROKEN = Path(embedded_model()).parent / "broken"
CALIBRATED = ("quantize", "--precision", "int4", "--calibrate")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's bundle, calibrated with eight of its samples. Tests must not change it."""
    out = str(tmp_path_factory.mktemp("calibrated") / "bundle")
    return quantise_calibrated(QuantiseJob(out=out, precision="int4"), SampleSpec(pictures=tuple(FILES[:8])))


@pytest.mark.slow
def test_the_bundle_has_the_form_of_4_bits_and_says_how_it_was_calibrated(bundle: Path) -> None:
    manifest, source = read_manifest(bundle), read_manifest(embedded_model())
    stored, nearest = load_bundle(bundle), load_bundle(embedded_model(), precision="int4")

    assert (manifest["version"], manifest["precision"], manifest["finer"]) == (6, "int4", {"head.weight": "int8"})
    assert manifest["origin"]["digest"] == source["digest"]
    assert manifest["origin"]["calibration_pictures"] == 8
    assert (stored.origin.calibration_pictures, nearest.origin.calibration_pictures) == (8, 0)
    for ours, theirs in (
        (stored.decoder_state, nearest.decoder_state),
        (stored.vision_state, nearest.vision_state),
    ):
        assert {name: (one.shape, one.dtype) for name, one in ours.items()} == {
            name: (one.shape, one.dtype) for name, one in theirs.items()
        }
        quantised = [name for name, one in ours.items() if one.dtype == torch.uint8]
        assert not any(torch.equal(ours[name], theirs[name]) for name in quantised)
        plain = [name for name, one in ours.items() if name not in quantised and not name.endswith("_scale")]
        assert all(torch.equal(ours[name], theirs[name]) for name in plain)


@pytest.mark.slow
def test_it_answers_as_the_original_and_doctor_finds_it_sound(bundle: Path) -> None:
    with Captioner.load(bundle, dtype="float32") as ours, Captioner.load(dtype="float32") as full:
        texts = [[answer.text for answer in captioner.generate(FILES)] for captioner in (ours, full)]
    findings = {finding.what: finding for finding in diagnose(CaptionerSpec(model=bundle))}

    assert sum(one == other for one, other in zip(*texts, strict=True)) >= 0.95 * len(FILES)
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert "calibrated with 8 pictures" in findings["manifest"].sentence


@pytest.mark.slow
@pytest.mark.parametrize("count", ["many", None, True])
def test_a_damaged_count_of_pictures_is_refused(bundle: Path, tmp_path: Path, count: object) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    edit_manifest(origin={**read_manifest(bundle)["origin"], "calibration_pictures": count})(copy)

    with pytest.raises(CheckpointError, match="origin"):
        load_bundle(copy)


def test_pictures_are_asked_the_jobs_questions_in_turn() -> None:
    questions = (
        Question(),
        Question(instruction="What color is the star?"),
        Question(instruction="Is there a star?", task=OneOf(("yes", "no"))),
    )
    model = load_bundle(embedded_model())

    found = collect_samples(
        SampleSpec(pictures=tuple(FILES[:9]), questions=questions, reader="thread"),
        model=None,
        vision=model.vision_config,
    )

    decode = model.tokenizer.decode
    for index, sample in enumerate(found):
        prompt = decode(sample.token_ids[: sample.num_prompt_tokens])
        answer = decode(sample.token_ids[sample.num_prompt_tokens :])
        assert (questions[index % 3].instruction or model.prompt) in prompt
        assert answer
        assert index % 3 != 2 or answer.strip() in ("yes", "no")
    assert len(found) == 9


@pytest.mark.slow
def test_the_command_skips_what_it_cannot_read_and_asks_a_sheet(run: Run, tmp_path: Path) -> None:
    sheet = tmp_path / "questions.csv"
    sheet.write_text("question\nHow many objects are there?\nWhat is in the picture?\n")
    out = str(tmp_path / "bundle")

    ran = run(*CALIBRATED, *FILES[:9], str(BROKEN), "--questions", str(sheet), "--out", out)

    assert (ran.code, ran.out) == (0, "")
    assert ran.err.count("a picture is skipped") == 3
    assert "calibrating with 9 pictures" in ran.err
    assert "9 pictures are few" in ran.err
    assert "MB in int4, calibrated" in ran.err
    assert read_manifest(out)["origin"]["calibration_pictures"] == 9


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*CALIBRATED, "nowhere"), "at least 8 pictures"),
        ((*CALIBRATED, str(BROKEN)), "at least 8 pictures"),
        ((*CALIBRATED, *FILES[:7]), "got 7"),
        (("quantize", "--precision", "int4", "--questions", "questions.txt"), "--calibrate"),
        ((*CALIBRATED, *FILES, "--questions", "missing.txt"), "missing.txt"),
    ],
)
def test_wrong_use_is_told_and_writes_nothing(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples.Captioner, "from_spec", lambda spec: pytest.fail("the model is loaded"))
    monkeypatch.setattr(samples, "open_reader", lambda kind, spec, pixels: PictureReader(spec, pixels=pixels))

    ran = run(*arguments, "--out", str(tmp_path / "bundle"))

    assert ran.code == 2
    assert told in ran.err
    assert list(tmp_path.iterdir()) == []


def test_more_pictures_than_fit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(samples, "MOST_PICTURES", 10)

    found = collect_samples(
        SampleSpec(pictures=tuple(FILES), reader="thread"),
        model=None,
        vision=load_bundle(embedded_model()).vision_config,
    )

    assert len(found) == 10
    assert "the first 10 pictures are used" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_calibration_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, everything: int, what: str) -> None:
        if done == 30:
            raise KeyboardInterrupt

    monkeypatch.setattr(samples, "say_count", stop)
    with pytest.raises(KeyboardInterrupt):
        quantise_calibrated(
            QuantiseJob(out=str(tmp_path / "bundle"), precision="int4"),
            SampleSpec(pictures=tuple(FILES[:8]), reader="thread"),
        )
    assert list(tmp_path.iterdir()) == []
