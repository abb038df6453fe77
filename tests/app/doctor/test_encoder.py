"""The doctor says of an exported encoder whether it opens, is whole, and belongs to the model beside it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.app.doctor.encoder import EncoderQuestion, diagnose_with_encoder
from llama_adapter.app.doctor.model import Finding
from llama_adapter.app.models.checkpoints import ModelSources, assemble_sources
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.graphs.card import EncoderCard
from llama_adapter.runtime.graphs.sidecar import OmInput, OmSidecar, file_sha256, write_sidecar
from llama_adapter.vision.export.onnx import export_onnx
from tests.app.golden import ROOT, model_flags, model_options

pytestmark = pytest.mark.slow

SOURCES = ModelSources(**model_options())


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "clip.onnx"
    model = assemble_sources(SOURCES)
    export_onnx(model.vision_config, model.vision_state, path, name=model.name)
    return path


@pytest.fixture(scope="module")
def card(onnx: Path) -> EncoderCard:
    from llama_adapter.vision.backends.onnx import OnnxVisionBackend

    found = OnnxVisionBackend(onnx).card
    assert found is not None
    return found


def put_om(folder: Path, card: EncoderCard | None, *, name: str = "clip.om", batch_size: int = 5) -> Path:
    """A file that passes for an OM as long as nobody runs it, and its side-car."""
    om = folder / name
    om.write_bytes(name.encode())
    om.chmod(0o640)
    shape = (batch_size, 224, 224, 3)
    write_sidecar(
        om,
        OmSidecar(
            card=card,
            input=OmInput(dtype="float16", shape=shape),
            batch_sizes=(batch_size,),
            has_gears=False,
            soc_version="Ascend310P3",
            precision_mode="fp16",
            sha256=file_sha256(om),
            onnx_sha256="0",
        ),
    )
    return om


def look(encoder: Path, target: Any = SOURCES, **changes: Any) -> list[Finding]:
    """The findings about the encoder alone."""
    question = EncoderQuestion(spec=CaptionerSpec(encoder=str(encoder), **changes), beside=None)
    return [finding for finding in diagnose_with_encoder(target, question) if finding.what == "encoder"]


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.sentence) for finding in findings]


def test_the_models_own_onnx_is_right(onnx: Path) -> None:
    assert told(look(onnx)) == [
        (
            "ok",
            f"onnxruntime (CPUExecutionProvider) opens `{onnx}`: pictures of 224 pixels, batch size any",
        ),
        ("ok", f"`{onnx}` is this model's own, by CLIP and visual blocks"),
    ]


def test_beside_an_encoder_clip_and_heads_may_be_missing(onnx: Path) -> None:
    options = model_options()
    del options["clip"], options["visual_heads"]
    question = EncoderQuestion(spec=CaptionerSpec(encoder=str(onnx)), beside=None)
    findings = diagnose_with_encoder(ModelSources(**options), question)

    assert {finding.level for finding in findings} == {"ok"}
    assert ("vision", "The visual blocks are complete; CLIP is taken from the exported encoder") in [
        (finding.what, finding.sentence) for finding in findings
    ]
    assert findings[-1].sentence.endswith("by the visual blocks (there is no CLIP to compare)")


def test_the_encoder_of_another_model_is_an_error(onnx: Path) -> None:
    *_, finding = look(onnx, ModelSources(**model_options("CAPTION-TINY")))

    assert finding.level == "error"
    assert "exported from BIAS-TINY, and its visual blocks are not those of" in finding.sentence
    assert "export onnx" in finding.hint


def test_an_encoder_beside_a_model_that_cannot_be_read_was_not_compared(onnx: Path, tmp_path: Path) -> None:
    opened, compared = look(onnx, tmp_path / "no-bundle")

    assert opened.level == "ok"
    assert (compared.level, compared.sentence) == (
        "not tried",
        "The model cannot be read, so nobody can tell whether the encoder is its own",
    )


@pytest.mark.parametrize("name", ["none.onnx", "none.om"])
def test_an_encoder_that_is_not_there_is_an_error(name: str, tmp_path: Path) -> None:
    [(level, sentence)] = told(look(tmp_path / name))

    assert (level, sentence) == ("error", f"The encoder `{tmp_path / name}` does not exist")


def test_a_damaged_onnx_is_an_error(onnx: Path, tmp_path: Path) -> None:
    (tmp_path / "clip.onnx").write_bytes(onnx.read_bytes()[:1000])
    [finding] = look(tmp_path / "clip.onnx")

    assert finding.level == "error"
    assert "cannot open" in finding.sentence


def test_an_om_is_looked_at_by_its_files_and_not_loaded(card: EncoderCard, tmp_path: Path) -> None:
    om = put_om(tmp_path, card)

    assert told(look(om)) == [
        ("ok", f"`{om}` is whole, by the digest in its side-car: float16 for Ascend310P3, batch size 5"),
        ("not tried", "The OM was not loaded, since no device that runs it is named"),
        ("ok", f"`{om}` is this model's own, by CLIP and visual blocks"),
    ]


def change(om: Path, damage: str) -> None:
    if damage == "open":
        om.chmod(0o666)
    elif damage == "changed":
        om.write_bytes(b"another")
    elif damage == "link":
        om.symlink_to(om.rename(om.with_name("real")))
    else:
        om.with_name(om.name + ".json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("open", "can be written by others (mode 666), which InferSession refuses"),
        ("changed", "is that of another file than"),
        ("link", "is a symbolic link, which InferSession refuses"),
        ("side-car", "The side-car"),
    ],
)
def test_an_om_that_would_be_refused_is_an_error(damage: str, sentence: str, card: EncoderCard, tmp_path: Path) -> None:
    om = put_om(tmp_path, card)
    change(om, damage)
    findings = look(om)

    assert [finding.level for finding in findings] == ["error"]
    assert sentence in findings[0].sentence
    assert findings[0].hint


def test_an_om_without_its_side_car_is_warned_of(card: EncoderCard, tmp_path: Path) -> None:
    om = put_om(tmp_path, card)
    (tmp_path / "clip.om.json").unlink()
    missing, _, unknown = look(om)

    assert (missing.level, unknown.level) == ("warning", "warning")
    assert "has no side-car `clip.om.json` beside it" in missing.sentence
    assert "does not say of which model it is" in unknown.sentence


def test_all_files_of_a_folder_are_looked_at(card: EncoderCard, tmp_path: Path) -> None:
    other = assemble_sources(ModelSources(**model_options("CAPTION-TINY")))
    from llama_adapter.runtime.graphs.card import fingerprint

    foreign = EncoderCard(
        name="CAPTION-TINY",
        vision=other.vision_config,
        dtype="float32",
        opset=18,
        fingerprint=fingerprint(other.vision_state),
    )
    put_om(tmp_path, card, name="a.om", batch_size=1)
    put_om(tmp_path, foreign, name="b.om")
    findings = look(tmp_path)

    assert [finding.level for finding in findings] == ["ok", "ok", "not tried", "ok", "error"]
    assert "b.om` was exported from CAPTION-TINY" in findings[-1].sentence


def test_a_link_that_leads_nowhere_does_not_stop_the_doctor(card: EncoderCard, tmp_path: Path) -> None:
    put_om(tmp_path, card)
    (tmp_path / "gone.om").symlink_to(tmp_path / "nowhere")

    assert [finding.level for finding in look(tmp_path)] == ["ok", "error", "ok"]


def test_a_folder_without_an_om_is_an_error(tmp_path: Path) -> None:
    [finding] = look(tmp_path)

    assert (finding.level, finding.sentence) == ("error", f"The folder `{tmp_path}` holds no .om file")


@pytest.mark.parametrize(
    ("beside", "encoder_device", "device_id"), [(None, None, None), (None, 1, None), (2, None, 2), (2, 0, 0)]
)
def test_an_om_is_loaded_only_beside_a_decoder_on_its_kind_of_device(
    beside: int | None, encoder_device: int | None, device_id: int | None
) -> None:
    spec = CaptionerSpec(encoder="clip.om", encoder_device=encoder_device)

    assert EncoderQuestion(spec=spec, beside=beside).device_id == device_id


# The command line, with stand-ins for atc and ais_bench.


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    fakes = ROOT / "tests" / "fakes"
    places = [fakes / "ais_bench" / "2024", fakes / "ais_bench" / "aclruntime", ROOT]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "COLUMNS": "120", **variables}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), str(fakes), os.environ["PATH"]])
    command = [sys.executable, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


def words(ran: subprocess.CompletedProcess[str]) -> str:
    return " ".join(ran.stdout.split())


def doctor(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`doctor` with a table of one row, a part of Ascend's that is not there: the whole takes many processes."""
    return run("-c", ONE_ROW, "doctor", *arguments, **variables)


ONE_ROW = """
import sys
from llama_adapter.app.cli import main
from llama_adapter.app.doctor import command
from llama_adapter.app.doctor.environment import Probe
command.look_at_environment = lambda: [Probe(name="CANN", state="absent")]
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def om(onnx: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("om") / "c"
    flags = ("--batch-sizes", "2", "--soc-version", "Ascend310P3", "--out", out)
    made = run("-m", "llama_adapter", "export", "om", onnx, *flags)
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.strip())


def beside(om: Path) -> tuple[str | Path, ...]:
    return (*model_flags(), "--encoder", om, "--device", "npu:0")


def test_with_the_device_named_the_om_is_loaded_there(om: Path) -> None:
    ran = doctor(*beside(om))

    # What is not there of Ascend's software remains an error; the encoder is none of it.
    assert ran.returncode == 1
    assert f"opens `{om}`: pictures of 224 pixels, batch size 2" in words(ran)
    assert words(ran).endswith("checks: CANN")


def test_an_om_for_another_chip_than_the_devices_is_an_error(om: Path) -> None:
    ran = doctor(*beside(om), FAKE_SOC="Ascend910B3")

    assert ran.returncode == 1
    assert "made for another chip than the one of device 0" in words(ran)
    assert words(ran).endswith("to fix in this order: CANN, encoder")


def test_the_encoders_own_device_is_the_one_that_is_tried(om: Path) -> None:
    ran = doctor(*beside(om), "--encoder-device", "7")

    assert ran.returncode == 1
    assert "device 7" in words(ran)


def test_the_onnx_of_another_model_fails_the_command(onnx: Path) -> None:
    ran = doctor("--encoder", onnx)

    assert ran.returncode == 1
    assert words(ran).endswith("checks: encoder")
