"""Results of a run: the free disk space is checked before the first step, and a card shows text of users as text."""

import dataclasses
import shutil
import sys
from os import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.scoring import score
from llama_adapter.app.learning.training.checkpoint import BEST, LAST, LoopState, TrainingError, write_checkpoint
from llama_adapter.app.learning.training.job import ParameterSet, TrainingChoice, TrainJob
from llama_adapter.app.learning.training.loop import Ended
from llama_adapter.app.learning.training.model import TrainableModel, open_trainable
from llama_adapter.app.learning.training.plan import MOMENTS
from llama_adapter.app.learning.training.results import CARD, draw, require_disk, write_card, write_model
from llama_adapter.app.learning.training.yardstick import measure_answers
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.text import shown_text
from tests.app.golden import model_options
from tests.app.learning.labelled.tables import write_lines
from tests.app.learning.training.pets import draw_pets, prepared
from tests.markdown import NASTY, elements_of


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_results(job: TrainJob, model: TrainableModel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Write all large files of a run; returns the peak number of additional bytes on disk."""
    folder = job.folder
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
        write_model(job, model, detector=None)
    return max(most)


def require(job: TrainJob, model: TrainableModel, *, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free))
    require_disk(job, model)


@pytest.mark.parametrize("base", ["bundle", "files"])
@pytest.mark.parametrize("sets", [("bias",), ("lora",)], ids="".join)
def test_the_disk_must_have_room_for_all_files_and_for_a_bundle_beside_the_one_that_it_replaces(
    base: str, sets: tuple[ParameterSet, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = CaptionerSpec(**model_options("BIAS-TINY"))
    if base == "bundle":
        spec = CaptionerSpec(model=str(convert(spec, tmp_path / "base")))
    job = TrainJob(data=("a",), out=str(tmp_path / "run/a.pth"), spec=spec, choice=TrainingChoice(sets=sets))
    job = dataclasses.replace(job, bundle=base == "files")
    model = open_trainable(job.spec, job.choice, dtype=torch.float32, device="cpu", seed=0)
    folder = tmp_path / "run/a.training"
    empty, again = tmp_path / "empty", tmp_path / "again"
    folder.mkdir(parents=True)
    shutil.copytree(tmp_path / "run", empty)

    grown = [write_results(job, model, monkeypatch)]
    shutil.copytree(tmp_path / "run", again)
    grown.append(write_results(job, model, monkeypatch))

    assert grown[1] < grown[0]  # earlier checkpoints free space, an earlier bundle does not
    for place, most in zip((empty, again), grown, strict=True):
        moved = dataclasses.replace(job, out=str(place / "a.pth"))
        with pytest.raises(TrainingError, match="MB free"):
            require(moved, model, free=int(0.9 * most), monkeypatch=monkeypatch)
        require(moved, model, free=int(1.1 * most), monkeypatch=monkeypatch)


def test_a_card_shows_labels_and_names_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "<i>`|[x](y)*_a_*"
    labels = (*NASTY[::3], "<b>|`*_[x](javascript:alert(1))_*`|</b>\n# x", "plain")
    draw_pets(tmp_path / "pets", each=6 * len(labels))
    rows = [
        {"image": f"pets/ring/{number}.png", "question": f"```\n{label}?", "answer": label}
        for number, label in enumerate(labels * 6)
    ]
    table = write_lines(tmp_path / f"{name}.jsonl", *rows)
    job = TrainJob(data=(str(table),), out=f"{name}.pth").with_rate(width=64)
    data = prepared(job)
    outcomes = [Outcome(picture=one, question=one, answer="no", references=labels[:3], part=one) for one in labels]
    job.folder.mkdir()
    model = SimpleNamespace(sources=SimpleNamespace(name=name), dtype=torch.float32, counts=dict)

    write_card(
        job,
        model,  # type: ignore[arg-type]
        data,
        ended=Ended(state=LoopState(), why=name),
        unreadable=(),
        scores=[score(outcomes, model=name)],
        unscored="",
        memory=name,
        yardstick=measure_answers([("", labels)], [("", labels)]),
        verdict=name,
        bundle=None,
    )

    elements, texts = elements_of((job.folder / CARD).read_text())
    table_elements = {"table", "thead", "tbody", "tr", "th", "td"}
    assert set(elements) == table_elements | {"h1", "h2", "h3", "h4", "p", "ul", "li", "code", "strong"}
    assert elements.count("h1") == 1
    shown = [shown_text(label).strip(" ") for label in labels]
    assert {label: texts.count(label) >= 2 for label in shown} == dict.fromkeys(shown, True)  # an answer and a part
    assert texts.count(name) == 3  # title, memory and verdict
    assert f"An adapter for {name}, trained with llama-adapter train." in texts


def test_without_matplotlib_a_note_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not draw(TrainJob(data=("a",), out=str(tmp_path / "a.pth")))
    said = capsys.readouterr().err
    assert said.startswith("note: `curves.png` is not drawn, because matplotlib is not installed. Install it:\n")
    assert "[train]'" in said
