"""The whole Ascend guide: adapter file -> ONNX -> OM -> captions, with stand-ins for ATC, ais_bench and a 310P3."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.jobs.wording import one_line
from tests.app.command import Ran, run_several
from tests.app.exported import om_embedded
from tests.app.golden import GOLDEN, ROOT, model_options
from tests.fakes.exported import embedded_onnx
from tests.npu import conftest
from tests.npu.wheel import FakeNpu
from tests.parity.exported import golden_onnx

pytestmark = pytest.mark.slow

npu = conftest.npu  # a fixture
FAKES = ROOT / "tests" / "fakes"
SAMPLES = sorted((ROOT / "assets" / "pictures").glob("*.[pj][np]g"))
PICTURES = SAMPLES[:8]
SOC = "Ascend310P3"


def run(commands: Iterable[Sequence[str | Path]]) -> list[Ran]:
    path = os.pathsep.join([str(Path(sys.executable).parent), str(FAKES), os.environ["PATH"]])
    return run_several(commands, environ={**os.environ, "PATH": path, "PYTHONPATH": str(FAKES / "ais_bench")})


def lines(ran: Ran) -> list[str]:
    assert ran.code == 0, ran.err
    return sorted(ran.out.splitlines())


ADAPTER = ("--adapter", model_options()["adapter"])
CLIP = ("--clip", model_options()["clip"], "--visual-heads", "4")


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX and OM files in one folder.

    For the embedded model: ONNX in float16, an OM with gears, and OMs with fixed batch sizes in a subfolder. For an
    adapter's file: ONNX and OM.
    """
    folder = tmp_path_factory.mktemp("encoders")
    onnx = Path(shutil.copy(embedded_onnx("float16"), folder / "clip.onnx"))
    of_adapter = Path(shutil.copy(golden_onnx(), folder / "adapter.onnx"))
    *_, made = run(
        [
            ("export", "om", of_adapter, "--soc-version", SOC, "--batch-sizes", "2"),
            ("export", "om", onnx, "--soc-version", SOC, "--batch-sizes", "1,2,4", "--gears"),
            ("export", "om", onnx, "--soc-version", SOC, "--batch-sizes", "1,5", "--out", folder / "fixed" / "clip"),
        ]
    )
    assert [Path(line).name for line in lines(made)] == ["clip_bs1.om", "clip_bs5.om"]
    return folder


OPTIONS = ("--format", "text", "--quiet", "--reader", "thread")
CAPTION = ("caption", *PICTURES, *OPTIONS)
# Flags for each encoder and generation of ais_bench.
ROUTES: dict[tuple[str, str], tuple[str, ...]] = {
    ("clip.onnx", "2024"): ("--batch-size", "5"),
    ("fixed/clip_bs5.om", "2023"): ("--batch-size", "7"),  # the last batch has one picture
    ("clip.om", "2024"): ("--batch-size", "7", "--encoder-process"),
    ("fixed", "2024"): ("--batch-size", "5"),
}


@pytest.fixture(scope="module")
def ended(encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Ran]:
    """The result of captioning by each route.

    For 2024 also: by a decoder in OM files, by torch, over prefixes, and with an adapter's file.
    """
    prefixes = tmp_path_factory.mktemp("encoded") / "prefixes"
    decoder, encoder_om = om_embedded()
    llama = ("--llama-dir", model_options()["llama_dir"], "--llama-type", "TINY", *ADAPTER)
    of_adapter = ("caption", GOLDEN / "images", *OPTIONS, "--max-new-tokens", "12", *llama)
    commands: dict[tuple[str, str], Sequence[str | Path]] = {
        # The first one, because others of this process import torch.
        ("decoder", "2024"): (*CAPTION, "--decoder", decoder, "--encoder", encoder_om, "--batch-size", "4"),
    }
    commands |= {
        (encoder, generation): (*CAPTION, "--encoder", encoders / encoder, *flags)
        for (encoder, generation), flags in ROUTES.items()
    } | {
        ("torch", "2024"): CAPTION,
        ("encode", "2024"): ("encode", *PICTURES, "--encoder", encoders / "fixed", "--out", prefixes, *OPTIONS),
        ("prefixes", "2024"): ("caption", prefixes, *OPTIONS),
        # CLIP's weights are inside the OM, so only the decoder is read in addition.
        ("adapter_bs2.om", "2024"): (*of_adapter, "--encoder", encoders / "adapter_bs2.om"),
        ("adapter by torch", "2024"): (*of_adapter, *CLIP),
    }
    asked = [(f"FAKE_AIS_BENCH={generation}", *command) for (_, generation), command in commands.items()]
    return dict(zip(commands, run(asked), strict=True))


@pytest.fixture(scope="module")
def by_torch(ended: dict[tuple[str, str], Ran]) -> list[str]:
    return lines(ended["torch", "2024"])


@pytest.mark.parametrize("route", ROUTES, ids="-".join)
@pytest.mark.proves("embedded model", "OM")
def test_every_encoder_gives_the_captions_of_torch(
    route: tuple[str, str], ended: dict[tuple[str, str], Ran], by_torch: list[str]
) -> None:
    assert lines(ended[route]) == by_torch
    assert len(by_torch) == 8


@pytest.mark.proves("prefix files", "OM")
def test_an_om_encodes_for_a_decoder_elsewhere(ended: dict[tuple[str, str], Ran], by_torch: list[str]) -> None:
    assert ended["encode", "2024"].code == 0
    assert lines(ended["prefixes", "2024"]) == by_torch


def test_a_decoder_in_om_files_answers_without_torch(ended: dict[tuple[str, str], Ran], by_torch: list[str]) -> None:
    assert lines(ended["decoder", "2024"]) == by_torch
    assert "torch" not in ended["decoder", "2024"].modules


@pytest.mark.proves("BIAS adapters", "OM")
def test_an_adapter_file_becomes_an_om_that_answers_as_its_weights(ended: dict[tuple[str, str], Ran]) -> None:
    assert lines(ended["adapter_bs2.om", "2024"]) == lines(ended["adapter by torch", "2024"])


# The commands of the Ascend guide. One flag is added: the golden adapter's visual blocks are smaller than 7B's.
GUIDE = """
python pth2onnx.py ${pth_path} --visual-heads 4

atc --model clip.onnx \\
   --framework 5 \\
   --output clip \\
   --input_shape "input:${batch_size},224,224,3" \\
   --input_format ND \\
   --device 0 \\
   --soc_version Ascend${chip_name} \\
   --log info \\
   --optypelist_for_implmode="Sigmoid,Gelu" \\
   --op_select_implmode=high_performance

python demo_bsz.py
"""


@pytest.mark.npu_contract
@pytest.mark.proves("Meta LLaMA and adapter", "OM", "NPU")
@pytest.mark.proves("float16", "OM")
def test_the_guides_own_commands_lead_from_the_adapter_to_the_report_on_a_310p(npu: FakeNpu, tmp_path: Path) -> None:
    for script in ("scripts/pth2onnx.py", "demo_bsz.py"):
        (tmp_path / Path(script).name).symlink_to(ROOT / script)
    weights = tmp_path / "weights"
    weights.mkdir()
    shutil.copy(model_options()["adapter"], weights / "BIAS-7B.pth")
    shutil.copy(model_options()["clip"], weights / "ViT-L-14.pt")
    shutil.copy(GOLDEN / "LLaMA" / "tokenizer.model", weights)
    (weights / "7B").symlink_to(GOLDEN / "LLaMA" / "TINY")
    (tmp_path / "pictures").mkdir()
    # These pictures have the same answers in float32 and float16, with AVX2 and with AVX-512. That of 0 has 64 tokens,
    # the default length; the others are short. Those of the first batch differ.
    names = {f"pic_{number}.jpg": SAMPLES[index] for number, index in enumerate((7, 16, 2, 9, 13, 0))}
    for name, picture in names.items():
        shutil.copy(picture, tmp_path / "pictures" / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    # Only the demo needs the device.
    (programs / "python").write_text(
        f'#!/bin/sh\n[ "$1" = demo_bsz.py ] && set -- -m tests.npu.inside.script "$@"\nexec {sys.executable} "$@"\n'
    )
    (programs / "python").chmod(0o755)
    (programs / "python3").symlink_to("python")  # the stand-in for ATC is run by this name
    modules = (npu.wheel, ROOT, FAKES / "ais_bench")
    stand_ins = {
        "PATH": f"{programs}{os.pathsep}{FAKES}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, modules)),
        "LD_LIBRARY_PATH": str(npu.libraries),
        "FAKE_SOC": SOC,
        "TASK_QUEUE_ENABLE": "0",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "OMP_NUM_THREADS": "1",
    }
    variables = {
        "DEVICE_ID": "0",
        "IMG_SIZE": "224",
        "BATCH_SIZE": "5",
        "INFER_LOOP": "2",
        "LLAMA_DIR": "weights",
        "CLIP_DIR": "clip.om",
        "BIAS_DIR": "weights/BIAS-7B.pth",
        "PIC_FILE_PATH": "pictures",
    }
    shell = {"pth_path": "weights/BIAS-7B.pth", "batch_size": "5", "chip_name": "310P3"}

    ran = subprocess.run(
        ["bash", "-euc", GUIDE],
        cwd=tmp_path,
        env={**os.environ, **stand_ins, **variables, **shell},
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "clip.om.json").exists()
    assert f"npu:0 ({SOC})" in ran.stdout
    assert "encoder by ais_bench (device 0), batch size 5" in ran.stdout
    assert "its adapter cannot be checked" in ran.stderr
    results = dict(re.findall(r"^\[result\]: (?:.*/)?(pic_\d+\.jpg): (.*)$", ran.stdout, re.MULTILINE))
    with Captioner.load(**model_options()) as captioner:
        answers = captioner.generate([str(picture) for picture in names.values()])
    assert results == {name: one_line(answer.text) for name, answer in zip(names, answers, strict=True)}
    assert re.search(r"^\[avg_time\]: [\d.]+ ms$", ran.stdout, re.MULTILINE)
    assert "pictures/s" in ran.stdout
