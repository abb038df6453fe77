"""`export onnx` and `export om`: from an adapter to files for other runtimes, written completely or not at all."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.command_line.main import build_parser, main
from llama_adapter.app.models.graph_export import to_onnx
from llama_adapter.app.models.graph_export.to_onnx import OnnxJob, load_encoder
from llama_adapter.app.models.spec import EncoderSources
from llama_adapter.runtime.errors import CheckpointError, ExitCode
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.sidecar import read_sidecar
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import preprocess
from scripts.pth2onnx import main as script
from tests.app.command import Run
from tests.app.golden import GOLDEN, ROOT, picture
from tests.app.pictures.inputs.files import tar_bytes
from tests.fakes.exported import without_card
from tests.parity.exported import golden_onnx, reading_here

pytestmark = pytest.mark.slow

CHIP = "Ascend310P3"
ADAPTER = GOLDEN / "adapters" / "BIAS-TINY.pth"
CLIP = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"
MODEL = ["--adapter", str(ADAPTER), "--clip", str(CLIP), "--visual-heads", "4", "--channel-order", "bgr"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden encoder alone in a folder. Tests must not change it."""
    return Path(shutil.copy(golden_onnx(), tmp_path_factory.mktemp("export") / "clip.onnx"))


def test_named_pictures_are_not_decoded_in_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    shard = tmp_path / "shard.tar"
    shard.write_bytes(tar_bytes({"inside.jpg": Path(picture()).read_bytes()}))
    pattern = str(tmp_path / "*.png")
    expected = preprocess(load_picture(picture()).image, rule=PixelRule(image_size=28))
    monkeypatch.delattr("PIL.Image.open")

    named = [picture(), pattern, "/none.png", str(shard)]
    pixels_BHWC = to_onnx.read_pixels(named, rule=PixelRule(image_size=28))

    assert np.array_equal(pixels_BHWC, np.stack([expected, expected]))
    said = capsys.readouterr().err
    assert (said.count("not compared on this picture: "), "broken.png" in said, "none.png" in said) == (2, True, True)


@pytest.fixture
def with_atc(monkeypatch: pytest.MonkeyPatch) -> None:
    places = (str(ROOT / "tests" / "fakes"), str(Path(sys.executable).parent), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(places))


@pytest.fixture
def without_atc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_an_adapter_becomes_onnx_without_any_llama(snapshot: SnapshotAssertion) -> None:
    """Stdout is the path and stderr the report, which ends with a command that takes the file."""
    made = golden_onnx()
    card = read_graph(made).card
    assert card is not None
    assert (card.name, card.dtype, card.opset, card.config["channel_order"]) == ("BIAS-TINY", "float32", 18, "rgb")
    report = made.with_suffix(".err").read_text()
    figures = re.sub(r"[\d.,]+(e-\d+)?(?= (MB|s\b|of|allowed))|(?<=mean )[\d.e-]+|(?<=cosine )[\d.]+", "N", report)
    assert made.with_suffix(".out").read_text() == f"{made}\n"
    assert figures.replace(str(made), "CLIP.onnx").replace(str(GOLDEN), "GOLDEN") == snapshot
    told = report.splitlines()[-1].removeprefix("next: llama-adapter ")
    parsed = build_parser().parse_args(shlex.split(told))
    assert (parsed.adapter, parsed.encoder) == (str(ADAPTER), str(made))
    for sources, flags in (
        (EncoderSources(model="m", channel_order="bgr"), "--model m --channel-order bgr"),
        (EncoderSources(llama_dir="l", llama_type="t", adapter="a"), "--llama-dir l --llama-type t --adapter a"),
    ):
        assert to_onnx._model_flags(sources) == flags.split()


def test_the_script_of_the_guide_asks_for_the_same_as_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.onnx").write_text("mine")
    for arguments, named in (
        ([str(ADAPTER), *MODEL[2:]], "--force"),
        (["weights/*_BIAS-7B.pth"], "`weights/*_BIAS-7B.pth`"),
        (["none.pth", "--out", "x.om"], "--out"),
    ):
        assert script(arguments) == ExitCode.USAGE
        assert named in capsys.readouterr().err
    assert (tmp_path / "clip.onnx").read_text() == "mine"

    jobs: list[OnnxJob] = []
    monkeypatch.setattr(to_onnx, "run_export_onnx", jobs.append)
    for flags in ([], ["--dtype", "float16", "--opset", "17", "--pictures", "a.png", "--force", *MODEL[2:]]):
        assert script([str(ADAPTER), *flags]) == ExitCode.OK
        assert main(["export", "onnx", "--adapter", str(ADAPTER), *flags, "--out", "clip.onnx"]) == ExitCode.OK
    plain, also_plain, by_script, by_command = jobs
    assert plain == also_plain == OnnxJob(sources=EncoderSources(adapter=str(ADAPTER)), out="clip.onnx")
    assert by_script == by_command
    assert (by_script.dtype, by_script.opset, by_script.sources.channel_order) == ("float16", 17, "bgr")


@reading_here()
def test_a_graph_that_computes_something_else_is_not_put_in_place_and_force_replaces_a_file(
    run: Run, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export_rgb(config: VisionConfig, *arguments: Any, check: Callable[[Path], None], **keywords: Any) -> None:
        check(exported)
        shutil.copy(exported, out)

    monkeypatch.setattr(to_onnx, "export_onnx", export_rgb)
    out = tmp_path / "clip.onnx"
    of_bgr = run("export", "onnx", MODEL, "--out", str(out))
    assert of_bgr.code == ExitCode.FAILED
    assert "other results than torch" in of_bgr.err
    assert list(tmp_path.iterdir()) == []
    out.write_text("mine")
    assert run("export", "onnx", MODEL[:-2], "--out", str(out), "--force").code == ExitCode.OK
    assert out.read_bytes() == exported.read_bytes()


@pytest.mark.parametrize("place", ["beside", "here", "cache"])
def test_clip_is_found_in_its_usual_places(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {"beside": tmp_path / "adapters", "here": tmp_path / "here", "cache": tmp_path / ".cache" / "clip"}
    for folder in folders.values():
        folder.mkdir(parents=True)
    adapter = shutil.copy(ADAPTER, folders["beside"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(folders["here"])
    sources = EncoderSources(adapter=str(adapter), visual_heads=4)
    with pytest.raises(CheckpointError) as caught:
        load_encoder(sources)
    assert "--clip" in caught.value.hint
    for folder in folders.values():
        assert f"`{folder / 'ViT-L-14.pt'}`" in caught.value.hint

    shutil.copy(CLIP, folders[place] / "ViT-L-14.pt")

    assert load_encoder(sources).config == load_encoder(dataclasses.replace(sources, clip=str(CLIP))).config


def test_the_embedded_model_has_an_encoder_and_a_bundle_may_be_named() -> None:
    embedded = load_encoder(EncoderSources())
    named = load_encoder(EncoderSources(model=str(ROOT / "assets" / "embedded"), channel_order="bgr"))

    assert embedded.config.channel_order == "rgb"
    assert named.config == dataclasses.replace(embedded.config, channel_order="bgr")
    assert {str(tensor.dtype) for tensor in embedded.state.values()} == {"torch.float32"}


@pytest.mark.usefixtures("without_atc")
def test_without_atc_the_command_can_be_printed(run: Run, exported: Path) -> None:
    asked = ["export", "om", str(exported), "--print-command", "--soc-version", "Ascend910B3", "--out", "clips/clip"]
    ran = run(asked, "--batch-sizes", "1,8", "--atc-flag=--op_precision_mode=my mode.ini")

    lines = [shlex.split(line) for line in ran.out.splitlines()]
    assert ran.code == ExitCode.OK
    assert [line[0] for line in lines] == ["atc", "atc"]
    for line, count in zip(lines, (1, 8), strict=True):
        assert f"--input_shape=input:{count},224,224,3" in line
    assert lines[1][1:4] == ["--framework=5", f"--model={exported}", "--output=clips/clip_bs8"]
    assert lines[1][-1] == "--op_precision_mode=my mode.ini"
    assert {"--precision_mode_v2=mixed_float16", "--log=error"} <= set(lines[1])  # the defaults


@pytest.mark.usefixtures("without_atc")
@pytest.mark.parametrize(
    ("flags", "said"),
    [([], "npu-smi"), (["--print-command"], "npu-smi"), (["--soc-version", CHIP], "no `atc`")],
)
def test_without_atc_or_a_chip_nothing_is_converted(run: Run, exported: Path, flags: list[str], said: str) -> None:
    ran = run("export", "om", str(exported), flags)
    assert ran.code == ExitCode.FAILED
    assert said in ran.err
    assert [path.name for path in exported.parent.iterdir()] == ["clip.onnx"]


@pytest.mark.usefixtures("with_atc")
@pytest.mark.parametrize(("flags", "names"), [([], ["clip_bs1.om", "clip_bs4.om"]), (["--gears"], ["clip.om"])])
def test_an_onnx_becomes_om(run: Run, exported: Path, flags: list[str], names: list[str], tmp_path: Path) -> None:
    asked = ["export", "om", str(exported), "--out", str(tmp_path / "clip"), "--batch-sizes", "4,1", *flags]

    ran = run(asked, "--soc-version", CHIP)

    assert ran.code == ExitCode.OK
    assert ran.out.splitlines() == [str(tmp_path / name) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, *(f"{name}.json" for name in names)])
    sidecars = [read_sidecar(tmp_path / name) for name in names]
    assert [sidecar.batch_sizes for sidecar in sidecars if sidecar] == ([(1, 4)] if flags else [(1,), (4,)])
    assert all(sidecar and sidecar.card == read_graph(exported).card for sidecar in sidecars)

    assert run(asked, "--soc-version", CHIP).code == ExitCode.USAGE  # it exists already
    assert run(asked, "--soc-version", CHIP, "--force").code == ExitCode.OK


def graph_of(path: Path, operator: str, shape: tuple[str | int, ...], *, opset: int) -> str:
    """Write a graph of one operator; gives its path."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("input", "output")]
    graph = helper.make_graph([helper.make_node(operator, ["input"], ["output"])], "test", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return str(path)


@pytest.mark.usefixtures("with_atc")
def test_a_graph_that_the_lint_refuses_needs_force(run: Run, tmp_path: Path) -> None:
    gelu = graph_of(tmp_path / "gelu.onnx", "Gelu", ("batch", 4), opset=20)
    free = graph_of(tmp_path / "free.onnx", "Relu", ("batch", "height", "width", 3), opset=18)
    for onnx_file, flags, said in (
        (gelu, [], "ATC will refuse"),
        (gelu, ["--force"], "E16002"),
        (free, ["--force"], "fixed sides"),  # refused even so
    ):
        ran = run("export", "om", onnx_file, "--soc-version", CHIP, flags)
        assert ran.code == ExitCode.FAILED
        assert said in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free.onnx", "gelu.onnx"]


def test_the_script_settles_the_environment_before_anything_but_help_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os; print(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'), os.environ.get('ORT_DISABLE_TELEMETRY'))\n"
        "raise ImportError('enough')"
    )
    unset = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "ORT_DISABLE_TELEMETRY")
    environ = {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": str(tmp_path)}

    def ran(*asked: str) -> str:
        command = [sys.executable, "scripts/pth2onnx.py", *asked]
        return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True).stdout

    assert ran(str(ADAPTER), "--out", str(tmp_path / "clip.onnx")).splitlines()[0] == "0 1"
    assert ran("--help").startswith("usage: ")


@pytest.mark.usefixtures("with_atc")
def test_a_closed_stdout_does_not_stop_the_conversion(exported: Path, tmp_path: Path) -> None:
    foreign = without_card(exported, tmp_path / "foreign.onnx")
    asked = ["export", "om", str(foreign), "--out", str(tmp_path / "clip"), "--batch-sizes", "1,2"]
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "llama_adapter", *asked, "--soc-version", CHIP]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)

    assert done.returncode == ExitCode.OK, done.stderr
    assert "Traceback" not in done.stderr
    assert "was not exported here" in done.stderr
    assert [path.name for path in sorted(tmp_path.glob("*.om"))] == ["clip_bs1.om", "clip_bs2.om"]


@reading_here()
def test_without_a_readable_picture_nothing_is_exported(run: Run, tmp_path: Path) -> None:
    ran = run("export", "onnx", MODEL, "--out", str(tmp_path / "clip.onnx"), "--pictures", "/none.png")
    assert ran.code == ExitCode.FAILED
    assert "None of the pictures can be read" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", [[], ["--print-command"]])
def test_a_path_that_the_runtime_refuses_is_an_error_before_the_work(
    run: Run, exported: Path, flags: list[str]
) -> None:
    ran = run("export", "om", str(exported), "--soc-version", CHIP, "--out", "my clips/clip", flags)
    assert (ran.code, ran.out) == (ExitCode.FAILED, "")
    assert "InferSession" in ran.err


@pytest.mark.usefixtures("with_atc")
@pytest.mark.parametrize(
    "flags",
    [
        ["--batch-sizes", "2"],
        ["--batch-sizes", "1,4", "--gears", "--precision-mode", "force_fp16"],
        ["--batch-sizes", "1", "--atc-flag=--input_fp16_nodes=input"],
    ],
)
def test_the_printed_command_makes_the_same_om(run: Run, exported: Path, flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    asked = ["export", "om", str(exported), "--soc-version", CHIP, *flags]
    printed = run(asked, "--out", str(tmp_path / "there" / "clip"), "--print-command")
    assert printed.code == ExitCode.OK
    assert ("needs its side-car" in printed.err) is ("--gears" in flags)
    subprocess.run(shlex.split(printed.out), check=True, cwd=tmp_path, capture_output=True)
    assert run(asked, "--out", str(tmp_path / "here" / "clip")).code == ExitCode.OK

    [made] = (tmp_path / "there").glob("*.om")
    assert made.read_bytes() == (tmp_path / "here" / made.name).read_bytes()


@pytest.mark.parametrize("place", ["/proc/q.onnx", "file/q.onnx", "folder.onnx"])
def test_a_place_that_cannot_be_written_is_an_error_before_the_model_is_read(
    run: Run, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.onnx").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    ran = run("export", "onnx", "--adapter", "file", "--out", place, "--force")

    assert ran.code == ExitCode.FAILED
    assert f"`{place}` cannot be written" in ran.err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_help_of_an_export_shows_the_flags_that_it_reads_and_takes_those_of_a_whole_model(run: Run) -> None:
    text = run("export", "onnx", "--help").out
    assert all(flag in text for flag in ("--adapter", "--llama-dir", "--llama-type"))
    assert "--context" not in text
    assert "exit codes" in run("export", "--help").out
    assert "(default: 1,2,4,8)" in run("export", "om", "--help").out
    flags = ["--llama-dir", "L", "--llama-type", "7B", "--context", "512"]
    assert build_parser().parse_args(["export", "onnx", *flags, "--out", "x.onnx"]).llama_type == "7B"
