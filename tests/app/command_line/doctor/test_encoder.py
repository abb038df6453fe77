"""The doctor finds out whether an exported encoder opens, is intact, and belongs to the model that it is used with."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.command_line.doctor.encoder import diagnose_with_encoder, runs_om
from llama_adapter.app.command_line.main import main
from llama_adapter.app.models.exported import encoder_graph
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.graphs.card import Port, fingerprint
from llama_adapter.runtime.graphs.sidecar import OmSidecar, write_sidecar
from llama_adapter.vision.card import EncoderCard
from tests.app.assembled import assemble_sources
from tests.app.golden import ROOT, model_options
from tests.fakes.exported import open_onnx, without_card
from tests.parity.exported import golden_onnx

pytestmark = pytest.mark.slow

SOURCES = CaptionerSpec(**model_options())


@pytest.fixture(scope="module")
def onnx() -> Path:
    return golden_onnx()


@pytest.fixture(scope="module")
def card(onnx: Path) -> EncoderCard:
    return open_onnx(onnx).card


def put_om(folder: Path, card: EncoderCard | None, *, name: str = "clip.om", batch_size: int = 5) -> Path:
    """A file that looks like an OM until it is run, and its sidecar."""
    om = folder / name
    om.write_bytes(name.encode())
    om.chmod(0o640)
    graph = None if card is None else card.to_graph()
    pixels = Port(dtype="float16", shape=(batch_size, 224, 224, 3))
    settings = {"has_gears": False, "soc_version": "Ascend310P3", "precision_mode": "fp16", "onnx_sha256": "0"}
    sidecar = OmSidecar(card=graph, input=pixels, batch_sizes=(batch_size,), sha256=file_digest(om), **settings)
    write_sidecar(om, sidecar.to_json())
    return om


def look(encoder: Path, model: CaptionerSpec = SOURCES, **changes: Any) -> list[str]:
    """The findings about the encoder only, one per line, with its folder replaced."""
    found = diagnose_with_encoder(dataclasses.replace(model, encoder=encoder, **changes))
    folder = str(encoder if encoder.is_dir() else encoder.parent)
    return [
        f"{one.level}: {one.sentence} [{one.hint}]".replace(folder, "FOLDER") for one in found if one.what == "encoder"
    ]


@pytest.mark.proves("doctor", "ONNX")
def test_an_onnx_file_is_opened_and_compared(onnx: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    cut = tmp_path / "clip.onnx"
    cut.write_bytes(onnx.read_bytes()[:1000])
    found = {
        "its own model": look(onnx),
        "another model": look(onnx, CaptionerSpec(**model_options("CAPTION-TINY"))),
        "no model": look(onnx, CaptionerSpec(model=tmp_path / "no-bundle")),
        "no file": look(tmp_path / "none.onnx"),
        "cut short": [line.partition(":")[0] for line in look(cut)],
    }
    assert found == snapshot


def test_an_encoder_without_a_card_is_compared_where_there_is_clip(
    onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # this folder has no CLIP
    file = without_card(onnx, tmp_path / "clip.onnx")
    alone = {name: value for name, value in model_options().items() if name not in ("clip", "visual_heads")}
    found = {
        "its own model": look(file),
        "another model": look(file, CaptionerSpec(**model_options("CAPTION-TINY"))),
        "without CLIP": look(file, CaptionerSpec(**alone)),
    }
    assert found == snapshot


def test_beside_an_encoder_clip_and_heads_may_be_missing(onnx: Path) -> None:
    options = model_options()
    del options["clip"], options["visual_heads"]
    findings = diagnose_with_encoder(CaptionerSpec(**options, encoder=onnx))

    assert {finding.level for finding in findings} == {"ok"}
    assert "vision" in {finding.what for finding in findings}


@pytest.mark.proves("doctor", "OM")
def test_an_om_is_checked_by_its_files_and_not_loaded(
    card: EncoderCard, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    om = put_om(tmp_path, card)
    found = {"no file": look(tmp_path / "none.om"), "whole": look(om)}
    om.chmod(0o666)
    found["others may write"] = look(om)
    om.chmod(0o640)
    om.write_bytes(b"another")
    found["changed"] = look(om)
    om.symlink_to(om.rename(tmp_path / "real"))
    found["link"] = look(om)
    om.unlink()
    put_om(tmp_path, card)
    om.with_name("clip.om.json").write_text("{}")
    found["damaged side-car"] = look(om)
    om.with_name("clip.om.json").unlink()
    found["no side-car"] = look(om)

    folder = tmp_path / "folder"
    folder.mkdir()
    found["empty folder"] = look(folder)
    put_om(folder, card, name="a.om", batch_size=1)
    other = assemble_sources(CaptionerSpec(**model_options("CAPTION-TINY")))
    foreign = dataclasses.replace(card, name="CAPTION-TINY", fingerprint=fingerprint(other.vision_state))
    put_om(folder, foreign, name="b.om")
    found["folder with the OM of another model"] = look(folder)
    (folder / "b.om").unlink()
    (folder / "gone.om").symlink_to(tmp_path / "nowhere")
    assert [line.partition(":")[0] for line in look(folder)] == ["ok", "error", "ok"], "a broken link"
    refusals = {
        "no file": "does not exist",
        "others may write": "can be written by others (mode 666)",
        "changed": "the digests differ",
        "link": "is a symbolic link",
        "damaged side-car": "cannot be read: it has no version",
    }
    for name, words in refusals.items():
        (said,) = found.pop(name)
        assert (said[:7], words in said) == ("error: ", True), said
    assert found == snapshot


@pytest.mark.parametrize(
    ("device", "encoder_device", "device_id"),
    [("cpu", None, None), ("cuda:1", 1, None), ("npu:2", None, 2), ("npu:2", 0, 0), ("auto", None, 0), ("auto", 1, 1)],
)
def test_an_om_is_loaded_only_beside_a_decoder_on_its_kind_of_device(
    device: str, encoder_device: int | None, device_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_adapter.app.command_line.doctor.encoder.accelerator_kind", lambda: "npu")
    spec = CaptionerSpec(encoder="a.om", device=device, encoder_device=encoder_device)
    assert (encoder_graph(spec).device_id if runs_om(spec) else None) == device_id


# With stand-ins for ATC and ais_bench.


@pytest.fixture
def om(onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fakes = ROOT / "tests" / "fakes"
    monkeypatch.setenv("PATH", os.pathsep.join([str(fakes), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.syspath_prepend(fakes / "ais_bench")
    flags = ["--batch-sizes", "2", "--soc-version", "Ascend310P3", "--out", str(tmp_path / "c")]
    assert main(["export", "om", str(onnx), *flags]) == 0
    return tmp_path / "c_bs2.om"


def test_with_the_device_named_the_om_is_loaded_there(
    om: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    found = {"device 0": look(om, device="npu:0"), "no device 7": look(om, device="npu:0", encoder_device=7)}
    monkeypatch.setenv("FAKE_SOC", "Ascend910B3")
    found["another chip"] = look(om, device="npu:0")
    assert found == snapshot


@pytest.mark.usefixtures("known_environment")
def test_the_encoder_of_another_model_fails_the_command(onnx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--encoder", str(onnx)]) == 1
    assert capsys.readouterr().out.endswith("checks: encoder\n")
