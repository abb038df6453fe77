"""What commands write has the mode that the user's umask allows, and no other.

What `train` writes is looked at in tests/app/learning/training/test_train.py.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.partial import partial_folder
from tests.app.command import Run
from tests.app.golden import ROOT, model_flags, picture
from tests.app.learning.training.pets import draw_pets
from tests.parity.exported import golden_onnx

OddModes = Callable[[Path], dict[str, str]]


def test_results_have_the_mode_of_new_files(odd_modes: OddModes, tmp_path: Path) -> None:
    with atomic_write(tmp_path / "new" / "file") as file:
        file.write(b"whole")
    with partial_folder(tmp_path / "folder") as partial:
        assert odd_modes(tmp_path) == {}
        partial.rename(tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"new", "folder"}
    assert odd_modes(tmp_path) == {}


@pytest.mark.slow
def test_commands_write_what_the_umask_allows(
    odd_modes: OddModes, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, pets = tmp_path / "out", str(draw_pets(tmp_path / "pets", each=2))
    bundle, om, records = str(tmp_path / "bundle"), str(out / "oms" / "clip.onnx"), str(out / "jobs" / "a.jsonl")
    places = (str(ROOT / "tests" / "fakes"), str(Path(sys.executable).parent), os.environ["PATH"])
    monkeypatch.setenv("PATH", os.pathsep.join(places))  # of the stand-in for ATC
    assert run("convert", *model_flags(), "--out", bundle).code == 0
    assert odd_modes(tmp_path / "bundle") == {}
    for file in (tmp_path / "bundle").iterdir():
        file.chmod(0o444)  # copies get the mode of new files
    assert odd_modes(golden_onnx()) == {}  # `export onnx` wrote it with the same umask
    (out / "oms").mkdir(parents=True)
    shutil.copyfile(golden_onnx(), om)

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
        ["encode", picture(), "--model", bundle, "--out", str(out / "prefixes"), "--reader", "thread"],
        ["encode", "--text", "Hello", "--model", bundle, "--out", str(out / "past" / "a.npy")],
        ["export", "om", om, "--soc-version", "Ascend310P3", "--out", str(out / "oms" / "clip")],
        ["export", "decoder", "--model", bundle, "--without-encoder", "--out", str(out / "decoder")],
        ["eval", pets, *question, "--out", str(out / "scores"), "--reader", "thread"],
        ["ask", "--calibrate", pets, *question, "--choices", "ring,triangle", "--calibration-out", str(out / "a.json")],
    ):
        ran = run(command)
        assert ran.code == 0, f"{command}\n{ran.err}"
        assert odd_modes(out) == {}, command
