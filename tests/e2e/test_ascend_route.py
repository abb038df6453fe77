"""The Ascend guide to its end: adapter file -> ONNX -> OM -> captions, with stand-ins for atc and ais_bench."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from tests.app.golden import GOLDEN, ROOT, model_options
from tests.fakes.exported import embedded_onnx

pytestmark = pytest.mark.slow

FAKES = ROOT / "tests" / "fakes"
PICTURES = ROOT / "assets" / "pictures"
SOC = "Ascend310P3"


def run(*arguments: str | Path, generation: str = "2024", **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(FAKES), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, [FAKES / "ais_bench" / generation, FAKES / "ais_bench" / "aclruntime"])),
        "FAKE_AIS_BENCH": generation,
        **variables,
    }
    command = [sys.executable, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran


def text(ran: subprocess.CompletedProcess[str]) -> list[str]:
    assert ran.returncode == 0, ran.stderr
    return sorted(ran.stdout.splitlines())


# Command lines one after another in one process, for those that are not about how a process starts.
SEVERAL = """
import json, sys
from llama_adapter.app.cli import main
for arguments in json.loads(sys.argv[1]):
    if code := main(arguments):
        sys.exit(f"{arguments} ended with {code}")
    print("end of page", flush=True)
"""


def run_several(commands: Iterable[Sequence[str | Path]], *, generation: str = "2024") -> list[list[str]]:
    """The sorted lines of each of them."""
    asked = json.dumps([[*map(str, arguments)] for arguments in commands])
    ran = run("-c", SEVERAL, asked, generation=generation)
    assert ran.returncode == 0, ran.stderr
    return [sorted(page.splitlines()) for page in ran.stdout.split("end of page\n")[:-1]]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ONNX of the embedded model in float16, and OMs of it: one with gears, and fixed ones in a folder."""
    folder = tmp_path_factory.mktemp("encoders")
    onnx = folder / "clip.onnx"
    convert = ("export", "om", onnx, "--soc-version", SOC)
    shutil.copy(embedded_onnx("float32"), folder / "float32.onnx")
    *_, made = run_several(
        [
            ("export", "onnx", "--out", onnx, "--dtype", "float16"),
            (*convert, "--batch-sizes", "1,4,8", "--gears"),
            (*convert, "--batch-sizes", "1,5", "--out", folder / "fixed" / "clip"),
        ]
    )
    assert [Path(line).name for line in made] == ["clip_bs1.om", "clip_bs5.om"]
    return folder


CAPTION = ("caption", PICTURES, "--format", "text", "--quiet")
# Flags by an encoder and the generation of ais_bench.
ROUTES: dict[tuple[str, str], tuple[str, ...]] = {
    ("clip.onnx", "2024"): ("--batch-size", "5"),
    ("float32.onnx", "2024"): ("--batch-size", "5"),
    ("fixed/clip_bs1.om", "2024"): (),
    ("fixed/clip_bs5.om", "2024"): ("--batch-size", "5"),  # 32 pictures: the last batch has two
    ("fixed/clip_bs5.om", "2023"): ("--batch-size", "7"),
    ("clip.om", "2023"): ("--batch-size", "5"),
    ("clip.om", "2024"): ("--batch-size", "11", "--encoder-process"),
    ("fixed", "2024"): ("--batch-size", "5"),
}


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The captions of all sample pictures, by torch."""
    lines = text(run("-m", "llama_adapter", *CAPTION))
    assert len(lines) == 32
    return lines


@pytest.fixture(scope="module")
def captions(encoders: Path) -> Callable[[str], dict[str, list[str]]]:
    """The captions of each encoder by a generation of ais_bench, all in one process."""

    @functools.cache
    def captions(generation: str) -> dict[str, list[str]]:
        routes = {encoder: flags for (encoder, when), flags in ROUTES.items() if when == generation}
        commands = [(*CAPTION, "--encoder", encoders / encoder, *flags) for encoder, flags in routes.items()]
        return dict(zip(routes, run_several(commands, generation=generation), strict=True))

    return captions


@pytest.mark.parametrize(("encoder", "generation"), ROUTES)
def test_every_encoder_gives_the_captions_of_torch(
    encoder: str, generation: str, captions: Callable[[str], dict[str, list[str]]], expected: list[str]
) -> None:
    assert captions(generation)[encoder] == expected


def test_the_demo_runs_the_om_that_the_guides_variable_names(encoders: Path, expected: list[str]) -> None:
    ran = run(
        "demo_bsz.py",
        "--infer-loop",
        "1",
        CLIP_DIR=str(encoders / "fixed" / "clip_bs5.om"),
        PIC_FILE_PATH=str(PICTURES),
    )
    assert ran.returncode == 0, ran.stderr
    results = sorted(line.split(": ", 2)[2] for line in ran.stdout.splitlines() if line.startswith("[result]"))
    assert results == sorted(line.split(": ", 1)[1] for line in expected)
    assert "encoder by ais_bench (device 0), batch size 5" in ran.stdout


def test_an_adapter_file_becomes_an_om_that_answers_as_its_weights(tmp_path: Path) -> None:
    options = model_options()
    onnx = tmp_path / "clip.onnx"
    made = run(
        "scripts/pth2onnx.py", options["adapter"], "--clip", options["clip"], "--visual-heads", "4", "--out", onnx
    )
    text(made)
    text(run("-m", "llama_adapter", "export", "om", onnx, "--soc-version", SOC, "--batch-sizes", "2"))
    llama = ("--llama-dir", options["llama_dir"], "--llama-type", "TINY", "--adapter", options["adapter"])
    common = (
        "-m",
        "llama_adapter",
        "caption",
        GOLDEN / "images",
        "--format",
        "text",
        "--quiet",
        "--max-new-tokens",
        "12",
        *llama,
    )

    # CLIP's weights are inside the OM: the decoder is all that is read beside it.
    ours = run(*common, "--encoder", tmp_path / "clip_bs2.om")
    reference = run(*common, "--clip", options["clip"], "--visual-heads", "4")
    assert ours.returncode == reference.returncode == 0, ours.stderr
    assert sorted(ours.stdout.splitlines()) == sorted(reference.stdout.splitlines())


@pytest.mark.parametrize(
    ("damage", "told", "hint"),
    [
        ("corrupt", "is that of another file", "copy"),
        ("link", "is a symbolic link, which InferSession refuses", "cp --dereference"),
        ("open", "can be written by others (mode 664), which InferSession refuses", "chmod 640"),
        ("soc", "made for another chip than the one of device 0", "export om"),
    ],
)
def test_what_the_user_reads_of_an_om_that_cannot_be_used(
    damage: str, told: str, hint: str, encoders: Path, tmp_path: Path
) -> None:
    om, variables = tmp_path / "clip.om", {}
    for file in ("clip.om", "clip.om.json"):
        (tmp_path / file).write_bytes((encoders / file).read_bytes())
    om.chmod(0o640)
    if damage == "corrupt":
        om.write_bytes(om.read_bytes()[:-100])
    elif damage == "link":
        om.rename(tmp_path / "real.om")
        om.symlink_to(tmp_path / "real.om")
    elif damage == "open":
        om.chmod(0o664)
    else:
        variables["FAKE_SOC"] = "Ascend910B3"
    ran = run("-m", "llama_adapter", "caption", PICTURES, "--encoder", om, **variables)

    assert ran.returncode == 1
    assert ran.stdout == ""
    sentence, _, advice = ran.stderr.partition("\n\nhint: ")
    assert told in sentence
    assert hint in advice
