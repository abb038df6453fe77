"""An exported encoder replaces the picture half of its own model, and is refused for other models."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

import demo_bsz
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.encoders import encoder_spec
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.devices import Capabilities, CpuBackend
from llama_adapter.runtime.errors import ExitCode, GraphError
from llama_adapter.runtime.graphs.card import GraphCard, fingerprint, is_same
from llama_adapter.runtime.graphs.onnx_provider import CPU, provider_of_device
from llama_adapter.vision.card import EncoderCard
from llama_adapter.vision.config import VisionConfig
from tests.app.assembled import assemble_sources
from tests.app.golden import model_options, picture
from tests.fakes.exported import without_card
from tests.parity.exported import golden_bgr_onnx, golden_onnx

pytestmark = pytest.mark.slow

PICTURES = [picture("shapes_200x300.jpg"), picture()]


@pytest.fixture(scope="module")
def encoder() -> Path:
    return golden_onnx()


@pytest.fixture
def no_clip_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders in which CLIP is looked for are empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def without_clip(adapter: str = "BIAS-TINY") -> dict[str, object]:
    options = model_options(adapter)
    del options["clip"], options["visual_heads"]
    return options


@pytest.mark.proves("int8 weights", "ONNX")
def test_the_encoder_of_full_weights_fits_8_bit_ones(encoder: Path, tmp_path: Path) -> None:
    full = convert(CaptionerSpec(**model_options()), tmp_path / "full")
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


@pytest.mark.usefixtures("no_clip_about")
def test_an_encoder_of_another_model_is_refused(encoder: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    refused: dict[str, dict[str, object]] = {
        "another adapter": model_options("CAPTION-TINY"),
        "another adapter, without CLIP": without_clip("CAPTION-TINY"),
        "another width": {},
        "another order of colours": {**model_options(), "channel_order": "bgr"},
        "another number of heads": {**model_options(), "visual_heads": 2},
    }
    told = {}
    for name, options in refused.items():
        with pytest.raises(GraphError) as caught:
            Captioner.load(**options, encoder=encoder)
        told[name] = f"{caught.value.message} [{caught.value.hint}]".replace(str(encoder), "ENCODER")
    assert told == snapshot
    file = without_card(encoder, tmp_path / "clip.onnx")
    for options, sentence in (
        (model_options("CAPTION-TINY"), "is not that of the model CAPTION-TINY"),
        ({}, "makes 10 visual queries of width 64, and the model embedded reads 10 of width 192"),
    ):
        with pytest.raises(GraphError, match=sentence):
            Captioner.load(**options, encoder=file)


@pytest.mark.usefixtures("no_clip_about")
def test_an_encoder_without_a_card_is_taken_with_and_without_clip(
    encoder: Path, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    ours = without_card(encoder, tmp_path / "ours.onnx", is_ours=True)
    foreign = without_card(encoder, tmp_path / "foreign.onnx")
    typo = without_card(encoder, tmp_path / "typo.onnx", green_std=0.24130258)
    beside = shutil.copytree(Path(model_options()["adapter"]).parent, tmp_path / "adapters")
    shutil.copy(model_options()["clip"], beside / "ViT-L-14.pt")
    bgr = {"channel_order": "bgr"}
    cases: dict[str, tuple[Path, dict[str, object]]] = {
        "ours, without CLIP": (ours, without_clip()),
        "ours, without CLIP, of a model that reads bgr": (ours, {**without_clip(), **bgr}),
        "foreign, without CLIP": (foreign, without_clip()),
        "foreign, without CLIP, of a model that reads bgr": (foreign, {**without_clip(), **bgr}),
        "foreign, with CLIP": (foreign, model_options()),
        "foreign, with CLIP, of a model that reads bgr": (foreign, {**model_options(), **bgr}),
        "with CLIP in a usual place": (
            foreign,
            {**model_options(), "clip": None, "adapter": str(beside / "BIAS-TINY.pth")},
        ),
        "with the ModelZoo's deviation": (typo, model_options()),
    }
    notes, ids, identities = {}, {}, {}
    for name, (file, options) in cases.items():
        with Captioner.load(**options, encoder=file) as captioner:
            _, note = captioner.info.notes  # the first is about the device
            notes[name] = note.replace(str(tmp_path), "FOLDER")
            ids[name] = [answer.token_ids for answer in captioner.generate(PICTURES, max_new_tokens=8)]
            identities[name] = captioner.info.encoder

    assert notes == snapshot
    reference = Captioner.load(**model_options()).generate(PICTURES, max_new_tokens=8)
    assert ids["foreign, with CLIP"] == [answer.token_ids for answer in reference]
    # Graphs exported by us take RGB; other graphs take the channel order that the model was trained with.
    of_bgr = [name for name in cases if name.startswith("foreign") and name.endswith("bgr")]
    as_rgb = [name for name in cases if ids[name] == ids["foreign, with CLIP"]]
    assert as_rgb == [name for name in cases if name not in (*of_bgr, "with the ModelZoo's deviation")]
    assert len({str(ids[name]) for name in of_bgr}) == 1
    assert identities[of_bgr[0]] != identities["foreign, with CLIP"]  # the same file, with another channel order


@pytest.mark.usefixtures("no_clip_about")
@pytest.mark.proves("Meta LLaMA and adapter", "ONNX")
@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_answers_are_those_of_the_models_own_encoder(order: str, encoder: Path, tmp_path: Path) -> None:
    """A BGR model's export takes RGB. Without the graph's names, only a comparison with torch can detect this."""
    options = {**model_options(), "channel_order": order}
    file = encoder if order == "rgb" else without_card(golden_bgr_onnx(), tmp_path / "foreign.onnx")
    with Captioner.load(**options, encoder=file) as exported:
        ours = exported.generate(PICTURES, max_new_tokens=16)
    reference = Captioner.load(**options).generate(PICTURES, max_new_tokens=16)

    assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in reference]
    assert exported.info.vision.startswith("onnxruntime")
    assert exported.spec.vision == "onnx"


@pytest.mark.parametrize("half", ["clip", "query"])
def test_a_fingerprint_survives_rounding_and_tells_models_apart(half: str) -> None:
    state = assemble_sources(CaptionerSpec(**model_options())).vision_state
    other = assemble_sources(CaptionerSpec(**model_options("CAPTION-TINY"))).vision_state
    own = fingerprint(state)[half]

    for dtype in (torch.float16, torch.bfloat16):
        rounded = fingerprint({key: tensor.to(dtype) for key, tensor in state.items()})[half]
        assert is_same(own, rounded)
        assert is_same(rounded, own)
    assert is_same(own, fingerprint(other)[half]) == (half == "clip")  # the adapters share CLIP
    # The signs are the same, but one tensor is larger by 5 %.
    name = next(name for name in state if name.startswith(half) and name.endswith("norm1.weight"))
    assert not is_same(own, fingerprint({**state, name: state[name] * 1.05})[half])
    assert not is_same(own, None)
    assert not is_same(own, own.split()[0])
    only = {key: tensor for key, tensor in state.items() if key.startswith(half)}
    assert fingerprint(only).keys() == {half}, "a missing half has none"


def test_a_missing_encoder_is_an_error_before_anything_is_read() -> None:
    with pytest.raises(GraphError, match=r"none\.om"):
        Captioner.load(llama_dir="nowhere", adapter="nothing", encoder="none.om")


@pytest.mark.parametrize(
    ("given", "runs_om", "mode", "device_id", "own_process"),
    [
        ({"encoder": "clip.om", "device": "npu:3"}, True, "eager", 3, False),  # on the decoder's device
        ({"encoder": "clip.om", "device": "npu:3", "encoder_device": 1}, True, "eager", 1, False),
        ({"encoder": "clip.om", "device": "npu:3"}, True, "npugraph_ex", 3, True),  # graphs create their streams later
        ({"encoder": "clip.om"}, True, "eager", 0, False),  # the first NPU, as the decoder's
        ({"encoder": "clip.om"}, False, "eager", 0, False),  # the decoder runs on another kind of device
        ({"encoder": "clip.om", "encoder_device": "npu:2"}, True, "eager", 2, False),
        ({"encoder": "clip.om", "encoder_process": True, "encoder_device": 2}, False, "eager", 2, True),
        ({"encoder": "clip.onnx"}, True, "npugraph_ex", 0, False),
    ],
)
def test_where_an_exported_encoder_runs(
    given: dict[str, Any], runs_om: bool, mode: str, device_id: int, own_process: bool
) -> None:
    class Other(CpuBackend):
        capabilities = Capabilities(dtypes=("float32",), runs_om=runs_om)

    wanted = encoder_spec(CaptionerSpec(**given), backend=Other(), mode=mode)

    assert (wanted.device_id, wanted.own_process) == (device_id, own_process)


def test_the_file_of_an_encoder_says_what_runs_it_and_its_device_where() -> None:
    for options, kind in (
        ({}, "torch"),
        ({"encoder": "clip.onnx"}, "onnx"),
        ({"encoder": "clip.om"}, "om"),
        ({"encoder": "folder"}, "om"),
        ({"encoder": "clip.model", "vision": "onnx"}, "onnx"),
    ):
        assert CaptionerSpec(**options).vision_kind == kind  # type: ignore[arg-type]
    for device in (True, 1.0, -1, 256, "cpu"):
        with pytest.raises(ValueError, match="encoder_device for vision om: wanted a number from 0 to 255 or npu:N"):
            CaptionerSpec(encoder="clip.om", encoder_device=device)
    spec = CaptionerSpec(encoder="clip.onnx", encoder_device="npu:2", provider_option=["enable_cann_graph=0"])

    provider = encoder_spec(spec, backend=CpuBackend(), mode="eager").provider

    assert provider == provider_of_device("npu:2", options=["enable_cann_graph=0"])
    assert encoder_spec(CaptionerSpec(encoder="clip.onnx"), backend=CpuBackend(), mode="eager").provider == CPU


def test_a_damaged_card_is_refused() -> None:
    config: VisionConfig = assemble_sources(CaptionerSpec(**model_options())).vision_config
    card = EncoderCard(name="m", vision=config, dtype="float16", opset=18, fingerprint={"clip": "0"})
    text = card.to_graph().to_json()
    assert EncoderCard.from_graph(GraphCard.from_json(text, file="f"), file="f") == card
    faulty = {"name": ["a name"], "opset": "18", "dtype": 4, "vision": {"clip": {}}, "fingerprint": 5}
    broken = [json.dumps({**json.loads(text), key: value}) for key, value in faulty.items()]
    for odd in (*broken, "", "[]", "{}", text.replace('"version": 1', '"version": 2'), text[:-9]):
        with pytest.raises(GraphError, match="`f`"):
            EncoderCard.from_graph(GraphCard.from_json(odd, file="f"), file="f")
    with pytest.raises(GraphError, match="depth"):
        EncoderCard.from_graph(GraphCard.from_json(text.replace('"depth"', '"dept"'), file="f"), file="f")
    with pytest.raises(ValueError, match="float32 or float16"):
        dataclasses.replace(card.to_graph(), dtype="int8")  # type: ignore[arg-type]


def test_the_demo_takes_an_encoder_as_clip_dir(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(encoder, tmp_path)
    options = model_options()
    flags = ["--infer-loop", "1", "--max-new-tokens", "4", "--llama-type", "TINY", "--visual-heads", "4"]
    flags += ["--llama-dir", options["llama_dir"], "--bias-dir", options["adapter"], "--pic-file-path", picture()]
    results = []
    for clip_dir in (options["clip"], str(tmp_path)):  # CLIP's weights, then the folder of the encoder
        monkeypatch.setattr("sys.argv", ["demo_bsz.py", *flags, "--clip-dir", clip_dir])
        assert demo_bsz.main() == ExitCode.OK
        results.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("[result]")])
    assert results[0] == results[1] != []
