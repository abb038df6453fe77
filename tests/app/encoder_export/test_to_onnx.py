"""`export onnx` and `export om`: from an adapter to files that other runtimes take, and nothing half-done."""

import dataclasses
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from llama_adapter.app.cli import build_parser, main
from llama_adapter.app.encoder_export import to_om, to_onnx
from llama_adapter.app.encoder_export.output import told_parity
from llama_adapter.app.encoder_export.to_onnx import EncoderSources, OnnxJob, load_encoder
from llama_adapter.runtime.errors import CheckpointError, ExitCode
from llama_adapter.runtime.graphs.graph import read_graph
from llama_adapter.runtime.graphs.sidecar import read_sidecar
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.export import Parity, export_onnx
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import preprocess
from tests.app.golden import GOLDEN, ROOT, picture

pytestmark = pytest.mark.slow

ADAPTER = GOLDEN / "adapters" / "BIAS-TINY.pth"
CLIP = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"
MODEL = ["--adapter", str(ADAPTER), "--clip", str(CLIP), "--visual-heads", "4", "--channel-order", "bgr"]


class Run(NamedTuple):
    path: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The golden encoder, exported by the command once."""
    out = tmp_path_factory.mktemp("export") / "made" / "clip.onnx"
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        code = main(["export", "onnx", *MODEL, "--dtype", "float16", "--pictures", picture(), "--out", str(out)])
    assert code == ExitCode.OK
    return Run(out, stdout.getvalue(), stderr.getvalue())


def test_named_pictures_are_not_decoded_in_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    expected = preprocess(load_picture(picture()).image, size=28)
    monkeypatch.delattr("PIL.Image.open")

    pixels_BHWC = to_onnx._pixels([picture(), str(broken), "/none.png"], size=28)

    assert np.array_equal(pixels_BHWC, expected[None])
    said = capsys.readouterr().err
    assert (said.count("not compared on this picture: "), "broken.png" in said, "none.png" in said) == (2, True, True)


@pytest.fixture
def exported(run: Run) -> Path:
    return run.path


@pytest.fixture
def with_atc(monkeypatch: pytest.MonkeyPatch) -> None:
    places = (str(ROOT / "tests" / "fakes"), str(Path(sys.executable).parent), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(places))


@pytest.fixture
def without_atc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_an_adapter_becomes_onnx_without_any_llama(exported: Path) -> None:
    graph = read_graph(exported)

    assert [path.name for path in exported.parent.iterdir()] == ["clip.onnx"]
    assert graph.card is not None
    assert (graph.card.name, graph.card.dtype, graph.card.opset) == ("BIAS-TINY", "float16", 18)
    assert graph.card.config["channel_order"] == "bgr"


def test_the_report_is_talk_and_the_path_is_data(run: Run) -> None:
    assert run.stdout == f"{run.path}\n"
    for said in ("opset 18", "no complaints", "over 1 picture "):
        assert said in run.stderr
    assert "LayerNormalization" not in run.stderr  # the operators are for --debug


def test_the_verdict_is_the_first_word_of_the_comparison_and_the_next_step_the_last_line(run: Run) -> None:
    lines = run.stderr.splitlines()
    assert re.match(r"same results as torch: largest difference [\d.e-]+ of [\d.e-]+ allowed", lines[1])
    command = shlex.split(lines[-1].removeprefix("next: llama-adapter "))
    assert (lines[-1][:5], command[:4]) == ("next:", ["caption", "PICTURE", "--encoder", str(run.path)])
    parsed = build_parser().parse_args(command)
    assert (parsed.adapter, parsed.channel_order) == (str(ADAPTER), "bgr")


def test_a_failed_comparison_does_not_begin_like_a_good_one() -> None:
    parity = Parity(max_abs=1.0, mean_abs=0.5, cosine_min=0.1, num_pictures=2, tolerance=1e-4, ok=False)
    assert told_parity(parity).startswith("other results than torch")
    assert told_parity(parity).endswith("over 2 pictures")


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "clip.onnx"
    out.write_text("mine")

    assert main(["export", "onnx", *MODEL, "--out", str(out)]) == ExitCode.USAGE
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_file_is_replaced_by_force_and_an_export_is_repeatable(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "clip.onnx"
    out.write_text("mine")

    assert main(["export", "onnx", *MODEL, "--out", str(out), "--force", "--dtype", "float16"]) == ExitCode.OK
    assert out.read_bytes() == exported.read_bytes()


def test_a_graph_that_computes_something_else_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export_other(config: VisionConfig, *arguments: Any, **keywords: Any) -> Any:
        return export_onnx(dataclasses.replace(config, channel_order="rgb"), *arguments, **keywords)

    monkeypatch.setattr(to_onnx, "export_onnx", export_other)

    code = main(["export", "onnx", *MODEL, "--dtype", "float16", "--out", str(tmp_path / "clip.onnx")])

    assert code == ExitCode.FAILED
    assert "does not compute what the encoder does" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["beside", "here", "cache"])
def test_clip_is_found_where_it_usually_lies(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "flags",
    [
        ["--clip", str(CLIP)],
        ["--visual-heads", "4"],
        ["--model", "bundle", "--adapter", str(ADAPTER)],
        ["--model", ""],
        ["--llama-dir", "LLaMA"],
        ["--opset", "20"],
        ["--dtype", "bfloat16"],
        ["--out", "clip.pt"],
    ],
)
def test_flags_that_cannot_be_meant_are_usage_errors(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = [] if "--out" in flags else ["--out", "clip.onnx"]

    assert main(["export", "onnx", *flags, *out]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.usefixtures("without_atc")
def test_the_command_is_printed_where_there_is_no_atc(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["export", "om", str(exported), "--print-command", "--soc-version", "Ascend910B3", "--out", "clips/clip"]
    code = main([*asked, "--batch-sizes", "1,8", "--atc-flag=--op_precision_mode=my mode.ini"])

    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert code == ExitCode.OK
    assert [line[0] for line in lines] == ["atc", "atc"]
    assert [next(flag for flag in line if "input_shape" in flag) for line in lines] == [
        "--input_shape=input:1,224,224,3",
        "--input_shape=input:8,224,224,3",
    ]
    assert lines[1][1:4] == ["--framework=5", f"--model={exported}", "--output=clips/clip_bs8"]
    assert lines[1][-1] == "--op_precision_mode=my mode.ini"


@pytest.mark.usefixtures("without_atc")
@pytest.mark.parametrize(
    ("flags", "said"),
    [([], "npu-smi"), (["--print-command"], "npu-smi"), (["--soc-version", "Ascend310P3"], "no `atc`")],
)
def test_what_is_missing_is_told(
    exported: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "om", str(exported), *flags]) == ExitCode.FAILED
    assert said in capsys.readouterr().err
    assert [path.name for path in exported.parent.iterdir()] == ["clip.onnx"]


@pytest.mark.usefixtures("with_atc")
@pytest.mark.parametrize(("flags", "names"), [([], ["clip_bs1.om", "clip_bs4.om"]), (["--gears"], ["clip.om"])])
def test_an_onnx_becomes_om(
    exported: Path, flags: list[str], names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", "om", str(exported), "--out", str(tmp_path / "clip"), "--batch-sizes", "4,1", *flags]

    code = main([*asked, "--soc-version", "Ascend310P3"])

    assert code == ExitCode.OK
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / name) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, *(f"{name}.json" for name in names)])
    sidecars = [read_sidecar(tmp_path / name) for name in names]
    assert [sidecar.batch_sizes for sidecar in sidecars if sidecar] == ([(1, 4)] if flags else [(1,), (4,)])
    assert all(sidecar and sidecar.card == read_graph(exported).card for sidecar in sidecars)

    assert main([*asked, "--soc-version", "Ascend310P3"]) == ExitCode.USAGE  # there already
    assert main([*asked, "--soc-version", "Ascend310P3", "--force"]) == ExitCode.OK


@pytest.mark.usefixtures("with_atc")
def test_what_the_lint_refuses_is_converted_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", 4)) for name in ("input", "output")]
    graph = helper.make_graph([helper.make_node("Gelu", ["input"], ["output"])], "test", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "gelu.onnx")
    asked = ["export", "om", str(tmp_path / "gelu.onnx"), "--soc-version", "Ascend310P3"]

    assert main(asked) == ExitCode.FAILED
    assert "ATC will refuse" in capsys.readouterr().err

    assert main([*asked, "--force"]) == ExitCode.FAILED
    assert "E16002" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["gelu.onnx"]


@pytest.mark.parametrize("sizes", ["", "1,", "0", "-1,2", "one", "1;2"])
def test_batch_sizes_are_whole_numbers(exported: Path, sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "om", str(exported), f"--batch-sizes={sizes}"]) == ExitCode.USAGE
    assert "whole numbers" in capsys.readouterr().err


def test_the_defaults_of_flags_and_jobs_agree() -> None:
    om = build_parser().parse_args(["export", "om", "clip.onnx"])
    job = to_om.OmJob(onnx="clip.onnx")
    values: dict[str, Any] = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    assert {**values, "atc_flags": []} == {name: getattr(om, name) for name in values}

    made = build_parser().parse_args(["export", "onnx", "--out", "clip.onnx"])
    onnx_job = OnnxJob(sources=EncoderSources(), out="clip.onnx")
    for name in ("dtype", "opset", "pictures", "force"):
        assert getattr(made, name) == getattr(onnx_job, name)


def test_the_defaults_of_the_script_are_those_of_the_command() -> None:
    from scripts.pth2onnx import build_parser as build_script_parser

    command = build_parser().parse_args(["export", "onnx", "--out", "clip.onnx"])
    script = build_script_parser().parse_args(["adapter.pth"])

    for name in ("clip", "dtype", "opset", "visual_heads", "channel_order", "pictures", "force", "debug"):
        assert getattr(script, name) == getattr(command, name)


@pytest.mark.parametrize("command", [["-m", "llama_adapter", "export", "om"], ["scripts/pth2onnx.py"]])
def test_help_is_there_without_torch_and_tells_the_defaults(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch is imported')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = [sys.executable, *command, "--help"]
    done = subprocess.run(asked, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)

    told = "1,2,4,8" if "om" in command else "(default: 18)"
    assert told in done.stdout


def test_the_script_settles_the_environment_before_anything_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os; print(os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'), os.environ.get('ORT_DISABLE_TELEMETRY'))\n"
        "raise ImportError('enough')"
    )
    unset = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "ORT_DISABLE_TELEMETRY")
    environ = {name: value for name, value in os.environ.items() if name not in unset} | {"PYTHONPATH": str(tmp_path)}
    asked = [sys.executable, "scripts/pth2onnx.py", str(ADAPTER), "--out", str(tmp_path / "clip.onnx")]
    done = subprocess.run(asked, cwd=ROOT, env=environ, capture_output=True, text=True)

    assert done.stdout.splitlines()[0] == "0 1"


@pytest.mark.usefixtures("with_atc")
def test_an_onnx_of_others_becomes_an_om_whose_gears_are_known(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = tmp_path / "foreign.onnx"
    model = onnx.load(exported)
    del model.metadata_props[:]
    onnx.save(model, foreign)

    code = main(["export", "om", str(foreign), "--gears", "--batch-sizes", "1,4", "--soc-version", "Ascend310P3"])

    assert code == ExitCode.OK
    assert "was not exported here" in capsys.readouterr().err
    sidecar = read_sidecar(tmp_path / "foreign.om")
    assert sidecar is not None
    assert (sidecar.card, sidecar.batch_sizes) == (None, (1, 4))


def test_the_script_of_the_ascend_guide_writes_the_same_file(exported: Path, tmp_path: Path) -> None:
    asked = [sys.executable, str(ROOT / "scripts" / "pth2onnx.py"), str(ADAPTER), "--dtype", "float16", *MODEL[2:]]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True)

    assert done.stdout == "clip.onnx\n"
    assert (tmp_path / "clip.onnx").read_bytes() == exported.read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_embedded_model_can_be_exported_in_the_older_opset_too(dtype: str, tmp_path: Path) -> None:
    """In the usual one, tests/e2e/test_ascend_route.py does."""
    assert main(["export", "onnx", "--out", str(tmp_path / "x.onnx"), "--dtype", dtype, "--opset", "17"]) == ExitCode.OK


@pytest.mark.usefixtures("with_atc")
def test_all_files_are_made_also_when_nobody_reads_their_names(exported: Path, tmp_path: Path) -> None:
    asked = ["export", "om", str(exported), "--out", str(tmp_path / "clip"), "--batch-sizes", "1,2,4"]
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "llama_adapter", *asked, "--soc-version", "Ascend310P3"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)

    assert done.returncode == ExitCode.OK, done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in sorted(tmp_path.glob("*.om"))] == ["clip_bs1.om", "clip_bs2.om", "clip_bs4.om"]


def test_without_any_picture_that_can_be_read_nothing_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", "onnx", *MODEL, "--out", str(tmp_path / "clip.onnx"), "--pictures", "/none.png"]

    assert main(asked) == ExitCode.FAILED
    assert "None of the pictures can be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--out", ""], "--out must end in a file's name, such as folder/clip, got ''"),
        (["--out", "."], "--out must"),
        (["--out", ".."], "--out must"),
        (["--out", "/"], "--out must"),
        (["--out", "oms/"], "--out must"),
        (["--batch-sizes", "5000"], "--batch-sizes must be whole numbers of 1 to 2048"),
        (["--gears", "--batch-sizes", "4"], "--gears need 2 to 100 different --batch-sizes"),
        (["--precision-mode", "best"], "--precision-mode must be one of fp16,"),
        (["--log-level", "loud"], "--log-level must be one of debug,"),
        (["--soc-version", ""], "--soc-version must be a chip's full name, such as Ascend310P3, got ''"),
        (["--soc-version", "310P3"], "such as Ascend310P3, got '310P3'"),
        (["--adopt", ""], "--adopt is empty"),
        (["--adopt", "x.om"], "--adopt needs the one number of --batch-sizes"),
        (["--adopt", "x.om", "--out", "y"], "--adopt takes an OM as it is, and excludes --out and --print-command"),
    ],
)
def test_values_that_are_refused_name_their_flags_before_any_file_is_read(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "om", "/none.onnx", *flags]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--print-command"]])
def test_a_path_that_the_runtime_would_refuse_is_told_before_the_work(
    exported: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["export", "om", str(exported), "--soc-version", "Ascend310P3", "--out", "my clips/clip", *flags]

    assert main(asked) == ExitCode.FAILED
    captured = capsys.readouterr()
    assert "InferSession refuses: ' '" in captured.err
    assert "--out" in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("with_atc")
@pytest.mark.parametrize(
    "flags",
    [
        ["--batch-sizes", "2"],
        ["--batch-sizes", "1,4", "--gears", "--precision-mode", "force_fp16"],
        ["--batch-sizes", "1", "--atc-flag=--input_fp16_nodes=input"],
    ],
)
def test_what_is_printed_makes_the_same_om_as_the_command_itself(
    exported: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    asked = ["export", "om", str(exported), "--soc-version", "Ascend310P3", *flags]
    assert main([*asked, "--out", str(tmp_path / "there" / "clip"), "--print-command"]) == ExitCode.OK
    printed = capsys.readouterr()
    subprocess.run(shlex.split(printed.out), check=True, cwd=tmp_path, capture_output=True)
    afterwards = next(line for line in printed.err.splitlines() if line.startswith("afterwards: llama-adapter "))
    adopting = shlex.split(afterwards.removeprefix("afterwards: llama-adapter "))

    assert main(adopting) == ExitCode.OK
    made = Path(capsys.readouterr().out.strip())
    assert main([*asked, "--out", str(tmp_path / "here" / "clip")]) == ExitCode.OK

    assert read_sidecar(made) == read_sidecar(tmp_path / "here" / made.name) is not None
    assert made.stat().st_mode & 0o777 == 0o640
    capsys.readouterr()
    assert main(adopting) == ExitCode.USAGE  # there already
    assert "--out" not in capsys.readouterr().err
    assert main([*adopting, "--force"]) == ExitCode.OK


@pytest.mark.parametrize("place", ["/proc/q.onnx", "file/q.onnx", "folder.onnx"])
def test_a_place_that_cannot_be_written_is_told_before_the_model_is_read(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.onnx").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    assert main(["export", "onnx", "--adapter", "/none.pth", "--out", place, "--force"]) == ExitCode.FAILED

    assert f"`{place}` cannot be written" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("with_atc")
def test_free_sides_are_refused_even_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("batch", "height", "width", 3)
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("input", "output")]
    graph = helper.make_graph([helper.make_node("Relu", ["input"], ["output"])], "test", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "free.onnx")

    assert (
        main(["export", "om", str(tmp_path / "free.onnx"), "--soc-version", "Ascend310P3", "--force"])
        == ExitCode.FAILED
    )
    assert "fixed sides" in capsys.readouterr().err


def test_the_help_of_an_export_shows_what_it_uses_and_takes_the_flags_of_a_whole_model() -> None:
    def shown(*command: str) -> str:
        said = io.StringIO()
        with redirect_stdout(said):
            main([*command, "--help"])
        return said.getvalue()

    text = shown("export", "onnx")
    assert "--adapter" in text
    assert not any(flag in text for flag in ("--llama-dir", "--llama-type", "--context"))
    assert "--llama-dir" in shown("caption")
    assert "exit codes" in shown("export")
    flags = ["--llama-dir", "L", "--llama-type", "7B", "--context", "512"]
    assert build_parser().parse_args(["export", "onnx", *flags, "--out", "x.onnx"]).llama_type == "7B"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["weights/*_BIAS-7B.pth"], "Nothing matches `weights/*_BIAS-7B.pth`"),
        (["none.pth", "--out", "x.om"], "--out must end in .onnx, got 'x.om'"),
    ],
)
def test_the_script_tells_what_it_cannot_use(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from scripts.pth2onnx import main as script

    assert script(arguments) == ExitCode.USAGE
    assert said in capsys.readouterr().err
