"""What commands write has the mode that the user's umask allows, and no other."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.graphs.sidecar import OM_MODE
from llama_adapter.runtime.partial import partial_folder
from tests.app.command import Run
from tests.app.golden import ROOT, model_flags, picture
from tests.app.learning.training.pets import draw_pets

ODD = 0o063  # no program writes the modes 604 and 714 by itself


@pytest.fixture
def umask() -> Iterator[int]:
    before = os.umask(ODD)
    yield ODD
    os.umask(before)


def odd_modes(folder: Path, umask: int) -> dict[str, str]:
    """The folders and files in a folder that have another mode than new ones get, with that mode."""
    found = {}
    for path in folder.rglob("*"):
        most = 0o777 if path.is_dir() else OM_MODE if path.name.endswith((".om", ".om.json")) else 0o666
        if (mode := stat.S_IMODE(path.stat().st_mode)) != most & ~umask:
            found[str(path.relative_to(folder))] = f"{mode:o}"
    return found


def test_results_have_the_mode_of_new_files(umask: int, tmp_path: Path) -> None:
    with atomic_write(tmp_path / "new" / "file") as file:
        file.write(b"whole")
    with partial_folder(tmp_path / "folder") as partial:
        assert odd_modes(tmp_path, umask) == {}
        partial.rename(tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"new", "folder"}
    assert odd_modes(tmp_path, umask) == {}


@pytest.mark.slow
def test_commands_write_what_the_umask_allows(
    umask: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, pets = tmp_path / "out", str(draw_pets(tmp_path / "pets", each=8))
    bundle, om, records = str(tmp_path / "bundle"), str(out / "oms" / "clip.onnx"), str(out / "jobs" / "a.jsonl")
    places = (str(ROOT / "tests" / "fakes"), str(Path(sys.executable).parent), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(places))  # of the stand-in for ATC
    monkeypatch.setattr("llama_adapter.app.learning.training.eye._FEWEST_BLOCK_STEPS", 1)
    assert run("convert", *model_flags(), "--out", bundle).code == 0
    assert odd_modes(tmp_path / "bundle", umask) == {}
    for file in (tmp_path / "bundle").iterdir():
        file.chmod(0o444)  # copies get the mode of new files

    question = ["--question", "What is it?"]
    for command in (
        ["convert", "--model", bundle, "--tensor-parallel", "2", "--out", str(out / "bundles" / "split")],
        ["quantize", "--model", bundle, "--out", str(out / "bundles" / "int8")],
        ["pack", "--model", bundle, "--out", str(out / "bundles" / "packed")],
        ["pack", "--model", bundle, "--out", str(out / "bundles" / "packed"), "--force"],
        ["caption", picture(), "--model", bundle, "--max-new-tokens", "4", "--out", records],
        ["export-records", records, "--to", "csv", "--out", str(out / "tables" / "a.csv")],
        ["export-records", records, "--to", "parquet", "--out", str(out / "tables" / "a.parquet")],
        ["export-records", records, "--to", "sidecars", "--out", str(out / "texts")],
        ["encode", picture(), "--model", bundle, "--out", str(out / "prefixes")],
        ["encode", "--text", "Hello", "--model", bundle, "--out", str(out / "past" / "a.npy")],
        ["export", "onnx", "--model", bundle, "--out", om],
        ["export", "om", om, "--soc-version", "Ascend310P3", "--out", str(out / "oms" / "clip")],
        ["export", "decoder", "--model", bundle, "--without-encoder", "--out", str(out / "decoder")],
        ["eval", pets, *question, "--out", str(out / "scores"), "--reader", "thread"],
        ["ask", "--calibrate", pets, *question, "--choices", "ring,triangle", "--calibration-out", str(out / "a.json")],
        ["train", pets, "--out", str(out / "pets.pth"), "--score", "loss", "--epochs", "1", "--tower-epochs", "1"],
    ):
        ran = run(command)
        assert ran.code == 0, f"{command}\n{ran.err}"
        assert odd_modes(out, umask) == {}, command
