"""An exported encoder takes the picture half's place only where it is that of the same model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.cli import main
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.checkpoints import ModelSources, assemble_sources
from llama_adapter.app.models.encoders import encoder_spec
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices.backend import Capabilities, CpuBackend
from llama_adapter.runtime.errors import ExitCode, GraphError
from llama_adapter.runtime.graphs.card import fingerprint, is_same
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.export.onnx import export_onnx
from tests.app.golden import model_flags, model_options, picture

pytestmark = pytest.mark.slow

PICTURES = [picture("shapes_200x300.jpg"), picture()]


def export(path: Path, *, adapter: str = "BIAS-TINY", channel_order: str = "rgb") -> Path:
    model = assemble_sources(ModelSources(**model_options(adapter), channel_order=channel_order))
    export_onnx(model.vision_config, model.vision_state, path, name=model.name)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("encoder") / "bias.onnx")


def without_clip(adapter: str = "BIAS-TINY") -> dict[str, object]:
    options = model_options(adapter)
    del options["clip"], options["visual_heads"]
    return options


def test_the_answers_are_those_of_the_models_own_picture_half(encoder: Path) -> None:
    with Captioner.load(**model_options(), encoder=encoder) as exported:
        ours = exported.generate(PICTURES, max_new_tokens=16)
    reference = Captioner.load(**model_options()).generate(PICTURES, max_new_tokens=16)

    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in reference]
    assert exported.info.vision.startswith("onnxruntime")
    assert exported.spec.vision == "onnx"


def test_clip_and_the_number_of_heads_are_not_needed_beside_an_exported_encoder(encoder: Path) -> None:
    with Captioner.load(**without_clip(), encoder=encoder) as exported:
        [answer] = exported.generate(PICTURES[:1], max_new_tokens=8)

    [expected] = Captioner.load(**model_options()).generate(PICTURES[:1], max_new_tokens=8)
    assert answer.token_ids == expected.token_ids


def test_the_encoder_of_full_weights_goes_beside_8_bit_ones(encoder: Path, tmp_path: Path) -> None:
    full = convert(ModelSources(**model_options()), tmp_path / "full")
    rounded = quantise_bundle(QuantiseJob(model=str(full), out=str(tmp_path / "rounded")))
    models: list[dict[str, object]] = [
        {"model": rounded},
        {"model": full, "precision": "int8"},
        {**without_clip(), "precision": "int8"},
    ]
    answers = []
    for options in models:
        with Captioner.load(**options, encoder=encoder) as captioner:
            assert captioner.info.precision == "int8"
            [answer] = captioner.generate(PICTURES[:1], max_new_tokens=8)
            answers.append(answer.token_ids)

    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("options", [model_options("CAPTION-TINY"), without_clip("CAPTION-TINY")])
def test_the_encoder_of_another_model_is_refused(encoder: Path, options: dict[str, object]) -> None:
    with pytest.raises(GraphError, match=r"exported from BIAS-TINY, and its visual blocks are not those of") as caught:
        Captioner.load(**options, encoder=encoder)
    assert "llama-adapter export onnx" in caught.value.hint


def test_an_encoder_of_another_width_is_refused(encoder: Path) -> None:
    with pytest.raises(GraphError, match=r"makes 10 visual queries of width \d+, and the model embedded reads 10 of"):
        Captioner.load(encoder=encoder)


def test_an_encoder_for_the_other_order_of_colours_is_refused(encoder: Path) -> None:
    with pytest.raises(GraphError, match="reads colours in the order rgb, and the model BIAS-TINY was trained on bgr"):
        Captioner.load(**model_options(), encoder=encoder, channel_order="bgr")


@pytest.mark.slow
def test_the_order_of_colours_is_inside_the_graph(tmp_path: Path) -> None:
    path = export(tmp_path / "bgr.onnx", channel_order="bgr")
    options = model_options() | {"channel_order": "bgr"}
    with Captioner.load(**options, encoder=path) as exported:
        ours = exported.generate(PICTURES, max_new_tokens=16)

    reference = Captioner.load(**options).generate(PICTURES, max_new_tokens=16)
    other = Captioner.load(**model_options()).generate(PICTURES, max_new_tokens=16)
    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in reference]
    assert [answer.token_ids for answer in other] != [answer.token_ids for answer in reference]


@pytest.mark.parametrize("half", ["clip", "query"])
def test_a_fingerprint_survives_rounding_and_tells_models_apart(half: str) -> None:
    state = assemble_sources(ModelSources(**model_options())).vision_state
    other = assemble_sources(ModelSources(**model_options("CAPTION-TINY"))).vision_state
    own = fingerprint(state)[half]

    for dtype in (torch.float16, torch.bfloat16):
        rounded = fingerprint({key: tensor.to(dtype) for key, tensor in state.items()})[half]
        assert is_same(own, rounded)
        assert is_same(rounded, own)
    assert is_same(own, fingerprint(other)[half]) == (half == "clip")  # the adapters share CLIP
    # The same signs, one tensor larger by a twentieth.
    name = next(name for name in state if name.startswith(half) and name.endswith("norm1.weight"))
    assert not is_same(own, fingerprint({**state, name: state[name] * 1.05})[half])
    assert not is_same(own, None)
    assert not is_same(own, own.split()[0])


def test_a_half_that_is_not_there_has_no_fingerprint() -> None:
    assert fingerprint({"query.queries": torch.ones(2, 3)}).keys() == {"query"}


def test_an_encoder_exported_with_another_number_of_heads_is_refused(encoder: Path) -> None:
    with pytest.raises(GraphError, match="exported with query num_heads 4, where 2 is wanted"):
        Captioner.load(**model_options() | {"visual_heads": 2}, encoder=encoder)


def test_an_encoder_that_is_not_there_is_told_before_anything_is_read() -> None:
    with pytest.raises(GraphError, match=r"The encoder `none.om` does not exist"):
        Captioner.load(llama_dir="nowhere", adapter="nothing", encoder="none.om")


def test_what_runs_the_encoder_follows_from_its_file() -> None:
    assert CaptionerSpec().vision_kind == "torch"
    assert CaptionerSpec(encoder="clip.onnx").vision_kind == "onnx"
    assert CaptionerSpec(encoder="clip.om").vision_kind == "om"
    assert CaptionerSpec(encoder="folder").vision_kind == "om"
    assert CaptionerSpec(encoder="clip.model", vision="onnx").vision_kind == "onnx"


@pytest.mark.parametrize(
    ("given", "runs_om", "mode", "device_id", "own_process"),
    [
        ({"encoder": "clip.om"}, True, "eager", 3, False),  # beside the decoder
        ({"encoder": "clip.om", "encoder_device": 1}, True, "eager", 1, False),
        ({"encoder": "clip.om"}, True, "npugraph_ex", 3, True),  # graphs make their streams late
        ({"encoder": "clip.om"}, False, "eager", 0, False),  # the decoder's device is of another kind
        ({"encoder": "clip.om", "encoder_process": True, "encoder_device": 2}, False, "eager", 2, True),
        ({"encoder": "clip.onnx"}, True, "npugraph_ex", 0, False),
    ],
)
def test_where_an_exported_encoder_runs(
    given: dict[str, Any], runs_om: bool, mode: str, device_id: int, own_process: bool
) -> None:
    class NumberThree(CpuBackend):
        device = torch.device("meta", 3)
        capabilities = Capabilities(dtypes=("float32",), runs_om=runs_om)

    wanted = encoder_spec(CaptionerSpec(**given), backend=NumberThree(), mode=mode)

    assert (wanted.device_id, wanted.own_process) == (device_id, own_process)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--vision", "onnx"], "--vision onnx needs --encoder, the file that `llama-adapter export onnx` writes"),
        (
            ["--vision", "torch", "--encoder", "clip.onnx"],
            "--encoder and --encoder-process go with --vision onnx or om",
        ),
        (["--encoder-process"], "--encoder and --encoder-process go with --vision onnx or om"),
        (["--encoder", ""], "--encoder is empty"),
        (["--encoder", "a.onnx", "--encoder-device", "1"], "--encoder-device is 0 to 255 and goes with --vision om"),
        (["--encoder", "a.om", "--encoder-device", "256"], "--encoder-device is 0 to 255 and goes with --vision om"),
    ],
)
def test_flags_that_cannot_be_meant_are_told(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["caption", picture(), *flags]) == ExitCode.USAGE
    assert told in capsys.readouterr().err


def test_the_command_line_takes_an_encoder(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["caption", picture(), "--format", "text", "--max-new-tokens", "8", *model_flags()]
    assert main(common) == ExitCode.OK
    expected = capsys.readouterr().out
    assert main([*common, "--vision", "onnx", "--encoder", str(encoder)]) == ExitCode.OK
    assert capsys.readouterr().out == expected


def test_a_card_of_another_sort_is_told(encoder: Path, tmp_path: Path) -> None:
    from llama_adapter.runtime.graphs.card import EncoderCard

    config: VisionConfig = assemble_sources(ModelSources(**model_options())).vision_config
    card = EncoderCard(name="m", vision=config, dtype="float16", opset=18, fingerprint={"clip": "0"})
    assert EncoderCard.from_json(card.to_json(), file="f") == card
    faulty = {"name": ["a name"], "opset": "18", "dtype": 4, "vision": [], "fingerprint": 5}
    broken = [json.dumps({**json.loads(card.to_json()), key: value}) for key, value in faulty.items()]
    for text in (*broken, "", "[]", "{}", card.to_json().replace('"version": 1', '"version": 2'), card.to_json()[:-9]):
        with pytest.raises(GraphError, match="`f`"):
            EncoderCard.from_json(text, file="f")
    with pytest.raises(ValueError, match="float32 or float16"):
        EncoderCard(name="m", vision=config, dtype="int8", opset=18, fingerprint={})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_demo_takes_an_encoder_where_the_guide_has_its_om(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import demo_bsz
    from llama_adapter.app.models.bundle import load_bundle
    from llama_adapter.app.models.resources import embedded_model

    model = load_bundle(embedded_model())
    export_onnx(model.vision_config, model.vision_state, tmp_path / "clip.onnx", name=model.name)
    shutil.copy(picture(), tmp_path / "picture.jpg")
    results = []
    for clip_dir in ("", str(tmp_path), str(tmp_path / "clip.onnx")):
        monkeypatch.setattr("sys.argv", ["demo_bsz.py", "--infer-loop", "1", "--batch-size", "3"])
        monkeypatch.setenv("CLIP_DIR", clip_dir)
        assert demo_bsz.main() == ExitCode.OK
        results.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("[result]")])
    assert results[0]
    assert results[1] == results[2] == results[0]
