"""Training on a GPU: losses are near the CPU's, and a killed run goes on."""

from pathlib import Path
from typing import Any

import pytest

from tests.app.learning.training.pets import draw_pets
from tests.app.learning.training.test_train import STEADY, assert_same_sums, kill_after, logged
from tests.cuda.device import DEVICE


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pets(tmp_path_factory.mktemp("pets"), each=15)


def numbers(folder: Path) -> list[float]:
    """Step, loss and validation loss of each row."""
    return [float(text or 0) for row in logged(folder) for text in row[:3]]


def train(run: Any, pets: Path, out: Path, *flags: str) -> Any:
    """Run `train` for six steps. The encoded pictures are kept beside `out`."""
    return run("train", str(pets), "--out", str(out), *STEADY, "--encoded", f"{out}.encoded", *flags)


def test_losses_are_the_cpus_and_a_killed_run_goes_on(
    pets: Path, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {}
    for name, device, dtype in (("cpu", "cpu", "float32"), ("full", DEVICE, "float32"), ("half", DEVICE, "bfloat16")):
        ran = train(run, pets, tmp_path / f"{name}.pth", "--device", device, "--dtype", dtype)
        assert ran.code == 0, ran.err
        folders[name] = tmp_path / f"{name}.training"
    out, flags = tmp_path / "killed.pth", ("--device", DEVICE, "--dtype", "float32")
    with monkeypatch.context() as patch:
        kill_after(4, patch)
        assert train(run, pets, out, *flags).code == 9
    assert train(run, pets, out, *flags, "--resume").code == 0

    cpus, full, half = (numbers(folder) for folder in folders.values())
    print(f"steps and losses: CPU {cpus}, float32 {full}, bfloat16 {half}")
    assert full == pytest.approx(cpus, rel=1e-4)
    assert half == pytest.approx(cpus, rel=0.03)
    assert_same_sums(out.with_suffix(".training"), folders["full"])
