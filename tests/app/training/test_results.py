"""Results of a run: the free disk space is checked before the first step."""

import dataclasses
import shutil
from os import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.checkpoints import sources_of
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.training.checkpoint import BEST, LAST, LoopState, write_checkpoint
from llama_adapter.app.training.choice import ParameterSet, TrainingChoice
from llama_adapter.app.training.errors import TrainingError
from llama_adapter.app.training.job import TrainJob
from llama_adapter.app.training.model import TrainableModel, open_trainable
from llama_adapter.app.training.plan import MOMENTS
from llama_adapter.app.training.results import require_disk, write_model
from tests.app.golden import model_options


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def opened(job: TrainJob) -> TrainableModel:
    return open_trainable(job.spec, job.choice, dtype=torch.float32, device="cpu", seed=0)


def write_results(job: TrainJob, model: TrainableModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Write all large files of a run; returns the peak number of additional bytes on disk."""
    before, most = bytes_in(folder.parent), list[int]()

    def measured(source: Path, target: Path) -> None:
        most.append(bytes_in(folder.parent) - before)
        replace(source, target)

    weights = {name: weight.detach().clone() for name, weight in model.trained().items()}
    moments = {f"{name}.{number}": weight.clone() for number in range(MOMENTS) for name, weight in weights.items()}
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", measured)
        for _ in range(2):
            write_checkpoint(folder / LAST, weights | moments, LoopState())
            write_checkpoint(folder / BEST, weights, LoopState())
        write_model(job, model, folder)
    return max(most)


def require(job: TrainJob, model: TrainableModel, folder: Path, *, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free))
    require_disk(job, model, folder)


@pytest.mark.parametrize("base", ["bundle", "files"])
@pytest.mark.parametrize("sets", [("bias",), ("adapter",), ("lora",)], ids="".join)
def test_the_disk_must_have_room_for_all_files_and_for_a_bundle_beside_the_one_that_it_replaces(
    base: str, sets: tuple[ParameterSet, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = CaptionerSpec(**model_options("BIAS-TINY"))
    if base == "bundle":
        spec = CaptionerSpec(model=str(convert(sources_of(spec), tmp_path / "base")))
    job = TrainJob(data=("a",), out=str(tmp_path / "run/a.pth"), spec=spec, choice=TrainingChoice(sets=sets))
    job = dataclasses.replace(job, bundle=base == "files")
    model, folder = opened(job), tmp_path / "run/a.training"
    empty, again = tmp_path / "empty", tmp_path / "again"
    folder.mkdir(parents=True)
    shutil.copytree(tmp_path / "run", empty)

    grown = [write_results(job, model, folder, monkeypatch)]
    shutil.copytree(tmp_path / "run", again)
    grown.append(write_results(job, model, folder, monkeypatch))

    assert grown[1] < grown[0]  # earlier checkpoints free space, an earlier bundle does not
    for place, most in zip((empty, again), grown, strict=True):
        moved = dataclasses.replace(job, out=str(place / "a.pth"))
        with pytest.raises(TrainingError, match="MB free"):
            require(moved, model, place / "a.training", free=int(0.9 * most), monkeypatch=monkeypatch)
        require(moved, model, place / "a.training", free=int(1.1 * most), monkeypatch=monkeypatch)
