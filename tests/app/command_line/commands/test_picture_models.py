"""Commands take a folder of a model that sees pictures as tokens, by path and by name, and refuse what it has not."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.checkpoints import NO_PIXELS
from llama_adapter.app.models.llama_folder import find_llama
from llama_adapter.runtime.errors import CheckpointError, ExitCode
from tests.app.command import Run
from tests.app.picture_models import Reference, pictures, save
from tests.fakes.exported import without_card

HOME = "LLAMA_ADAPTER_HOME"
pytestmark = pytest.mark.usefixtures("known_environment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for index, image in enumerate(pictures(2)):
        (home / "photos").mkdir(exist_ok=True)
        image.save(home / "photos" / f"{index}.png")
    (home / "other").mkdir()
    (home / "other" / "config.json").write_text("{}")
    return save(home / "toy-vlm", "smolvlm")


@pytest.fixture
def bundle(folder: Path, run: Run) -> str:
    made = folder.parent / "bundle"
    if not made.exists():
        assert run("convert", "--llama-dir", str(folder), "--out", str(made), "--no-known-answer").code == 0
    return str(made)


@pytest.fixture(params=["folder", "bundle"])
def model(request: pytest.FixtureRequest, folder: Path) -> list[str]:
    """The flags of the model."""
    if request.param == "bundle":
        return ["--model", request.getfixturevalue("bundle")]
    return ["--llama-dir", str(folder.parent), "--llama-type", folder.name]


def test_pictures_are_captioned_and_asked_about(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME, str(folder.parent))
    photos, options = str(folder.parent / "photos"), ["--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu"]
    by_path = run("caption", "--model", str(folder), photos, options)
    by_name = run("caption", "--model", "toy-vlm", photos, options)
    asked = run("ask", "--llama-dir", str(folder), photos, "--question", "Red?", "--choices", "yes,no", options)

    reference = Reference(folder, "smolvlm")
    assert [line["prompt"] for line in by_path.records] == ["Describe this image."] * 2
    for line in by_path.records:
        image = pictures(2)[int(Path(line["picture"]).stem)]
        expected = reference.answer([image], "Describe this image.", max_new_tokens=6)
        assert line["text"] == reference.tokenizer.decode(expected, skip_special_tokens=True)
    facts = [sorted((one["picture"], one["id"], one["text"]) for one in ran.records) for ran in (by_path, by_name)]
    assert facts[0] == facts[1]
    assert set(asked.texts().values()) <= {"yes", "no"}


def test_colours_are_read_in_the_order_that_is_named(folder: Path, model: list[str], run: Run) -> None:
    flags = ["--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu", "--channel-order", "bgr"]
    reference, made = Reference(folder, "smolvlm"), pictures(2)
    ran = run("caption", model, str(folder.parent / "photos"), flags)
    assert (ran.code, len(ran.records)) == (0, len(made))
    for line in ran.records:
        red, green, blue = made[int(Path(line["picture"]).stem)].split()
        expected = reference.answer([Image.merge("RGB", (blue, green, red))], "Describe this image.", max_new_tokens=6)
        assert line["text"] == reference.tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.slow
def test_two_ranks_answer_as_one(folder: Path, run: Run) -> None:
    flags = ["--model", str(folder), str(folder.parent / "photos"), "--max-new-tokens", "12", "--device", "cpu"]
    alone = run("caption", flags, "--dtype", "float32")
    together = run("caption", flags, "--dtype", "float32", "--tensor-parallel", "2", "--parallel-timeout", "30")

    assert together.code == 0, together.err
    assert alone.texts() == together.texts() != {}


def test_doctor_says_what_the_model_does_with_pictures(folder: Path, run: Run) -> None:
    ran = run("doctor", "--llama-dir", str(folder))
    words = " ".join(ran.out.split())
    assert ran.code == 0
    assert "Pictures are tokens: a tower of width 32 and 3 layers for 32 pixels and a connector make 4 of" in words
    assert "cut into up to 10 squares" in words


@pytest.mark.parametrize("flags", [["--keys-values"], []], ids=["keys and values", "queries"])
def test_prefix_files_hold_no_tokens_of_pictures(
    folder: Path, model: list[str], flags: list[str], run: Run, tmp_path: Path
) -> None:
    ran = run("encode", str(folder.parent / "photos"), flags, model, "--out", str(tmp_path / "o"))
    assert ran.code == ExitCode.USAGE
    assert "`toy-vlm` sees pictures as tokens of its prompts, and prefix files hold none" in ran.err


def test_prefixes_of_another_model_are_refused(folder: Path, model: list[str], run: Run, tmp_path: Path) -> None:
    prefixes = str(tmp_path / "prefixes")
    assert run("encode", str(folder.parent / "photos"), "--out", prefixes).code == 0
    ran = run("caption", prefixes, model)
    assert (ran.code, "prefix files hold none" in ran.err) == (ExitCode.USAGE, True)


def test_a_bundle_is_exported_with_its_encoder(folder: Path, bundle: str, run: Run, tmp_path: Path) -> None:
    out, photos = str(tmp_path / "out"), str(folder.parent / "photos")
    ran = run("export", "decoder", "--model", bundle, "--out", out)
    assert ran.code == 0, ran.err
    assert "39 of 39 tokens are torch's" in ran.err
    assert "next: llama-adapter caption PICTURE" in ran.err

    flags = ["--max-new-tokens", "6"]
    wanted = run("caption", "--model", str(folder), photos, flags, "--dtype", "float32", "--device", "cpu")
    assert run("caption", "--decoder", out, photos, flags).texts() == wanted.texts() != {}
    checked = run("doctor", "--decoder", out)
    assert checked.code == 0
    assert "opens the decoder, and onnxruntime (CPUExecutionProvider) its picture encoder" in " ".join(
        checked.out.split()
    )
    refused = run("encode", photos, "--encoder", f"{out}/encoder.onnx", "--out", str(tmp_path / "prefixes"))
    assert refused.code == ExitCode.USAGE
    assert "sees pictures as tokens of its prompts, and prefix files hold none" in refused.err


def test_the_encoder_is_exported_alone(folder: Path, model: list[str], run: Run, tmp_path: Path) -> None:
    encoder, photos = str(tmp_path / "one.onnx"), str(folder.parent / "photos")
    exported = run("export", "onnx", model, "--out", encoder)
    assert exported.code == 0, exported.err
    told = exported.err.splitlines()[-1].removeprefix("next: llama-adapter ").replace("PICTURE", photos)
    checked = run("doctor", model, "--encoder", encoder)
    assert checked.code == 0, checked.out
    assert "is this model's own, by tower and connector" in " ".join(checked.out.split())
    bare = without_card(Path(encoder), tmp_path / "bare.onnx")
    compared = run("doctor", model, "--encoder", str(bare), "--precision", "int8")  # of the decoder
    assert re.search(
        r"encoding of a test picture differs from torch's by 0\.\d% .* no errors", " ".join(compared.out.split())
    )

    in_torch = ["--max-new-tokens", "6", "--dtype", "float32", "--device", "cpu"]
    assert run(*shlex.split(told), in_torch).texts() == run("caption", model, photos, in_torch).texts() != {}


def test_gears_are_proposed_within_the_context(folder: Path, run: Run, tmp_path: Path) -> None:
    flags = ["--format", "onnx-atc", "--context", "300", "--without-encoder"]
    ran = run("export", "decoder", "--llama-dir", str(folder), "--out", str(tmp_path / "out"), flags)
    assert ran.code == 0, ran.err
    assert "--sizes R=1,S=300,P=1,T=1 --sizes R=1,S=1,P=300,T=1\n" in ran.err


BREAKS = {
    "no squares": ("preprocessor_config.json", "max_image_size", {"height": 32}, "does not say into which squares"),
    "another token": ("config.json", "image_token_id", 5, "has no special token 5 for pictures"),
    "odd shuffle": ("config.json", "scale_factor", 3, "joins 3 of 4 patches in a row"),
    "another kind": ("config.json", "model_type", "qwen2_vl", "of type 'qwen2_vl', whose pictures are not read here"),
    "original form": ("config.json", "mm_vision_tower", "clip", "in the form of LLaVA's own programs, whose pictures"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_damaged_folder_is_refused_in_a_sentence(folder: Path, name: str, run: Run, tmp_path: Path) -> None:
    file, key, value, words = BREAKS[name]
    for part in folder.iterdir():
        (tmp_path / part.name).symlink_to(part)
    content = json.loads((folder / file).read_text())
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps({**content, key: value}))
    ran = run("caption", "--model", str(tmp_path), str(folder.parent / "photos"))
    assert ran.code != 0
    assert words in ran.err
    with pytest.raises(CheckpointError, match=re.escape(words)):
        Captioner.load(tmp_path)
    assert words in " ".join(run("doctor", "--llama-dir", str(tmp_path)).out.split())


def test_models_that_see_pictures_are_named_without_a_vision_config_and_towers_and_decoders_alone_are_none(
    tmp_path: Path,
) -> None:
    others = "moondream1", "vision-encoder-decoder", "phi3_v", "phi4mm", "molmo", "ovis", "gemma3n_vision"
    for kind in others:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": {"AutoConfig": "a.B"}}))
        with pytest.raises(CheckpointError, match=f"holds a model of type '{kind}', whose pictures are not read here"):
            find_llama(tmp_path).sees_tokens  # noqa: B018
    for kind in ("siglip_vision_model", "granite4_vision_text"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert not find_llama(tmp_path).sees_tokens


def test_pictures_that_a_model_wants_padded_are_refused(tmp_path: Path) -> None:
    file = save(tmp_path, "llava") / "preprocessor_config.json"
    values = json.loads(file.read_text())
    for name, content in (
        ("preprocessor_config.json", {**values, "do_pad": True}),
        ("processor_config.json", {"image_processor": {**values, "do_pad": True}}),  # which precedes the other
    ):
        file.write_text(json.dumps(values))
        (tmp_path / name).write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="pads pictures to squares"):
            Captioner.load(tmp_path)


def test_a_decoder_that_multiplies_the_tokens_of_pictures_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llava", decoder="granite", embedding_multiplier=3.0)
    with pytest.raises(CheckpointError, match=r"multiplies the tokens of pictures by a factor \(3\.0\)"):
        Captioner.load(tmp_path)


@pytest.mark.parametrize("number", [0, 5])
def test_a_tower_without_one_class_token_is_refused_where_that_is_dropped(number: int, tmp_path: Path) -> None:
    """In transformers, registers stay beside the patches."""
    save(tmp_path, "llava" if number else "joycaption")
    config = json.loads((tmp_path / "config.json").read_text()) | {"vision_feature_select_strategy": "default"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if number:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
        tower = transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**sizes))
        tower.save_pretrained(tmp_path / "tower")
        tensors = load_file(tmp_path / "tower" / "model.safetensors")
        named = {f"vision_tower.{key}": tensor for key, tensor in tensors.items()}
        retensored(tmp_path, lambda found: named | {key: one for key, one in found.items() if "_tower." not in key})
    with pytest.raises(CheckpointError, match=f"drops the class token, and its tower has {number} tokens before the"):
        Captioner.load(tmp_path)


def retensored(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("linear_3.weight", torch.ones(64, 64), r"has 1 tensors that do not belong there \(`multi_modal_projector\."),
        (
            "linear_1.weight",
            torch.ones(64, 32, dtype=torch.int8),
            r"`multi_modal_projector\.linear_1\.weight` as a tensor of another kind",
        ),
    ],
    ids=["a third layer", "whole numbers"],
)
def test_a_connector_of_another_form_is_refused(name: str, value: Tensor, said: str, tmp_path: Path) -> None:
    save(tmp_path, "llava")
    retensored(tmp_path, lambda found: found | {f"multi_modal_projector.{name}": value})
    with pytest.raises(CheckpointError, match=said):
        Captioner.load(tmp_path)


def test_a_folder_that_does_not_say_how_pictures_become_pixels_gets_a_note(tmp_path: Path) -> None:
    (save(tmp_path, "llava") / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text('{"patch_size": 8}')  # of versions in which it says no more
    with Captioner.load(tmp_path) as captioner:
        assert captioner.info.notes.count(NO_PIXELS) == 1
