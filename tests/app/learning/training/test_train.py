"""`train` as users call it: data to adapter, resumed bit for bit, on several ranks, interrupted, with bad data."""

import csv
import errno
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from llama_adapter import Captioner
from llama_adapter.app.learning.scores import scoring
from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.scoring import Scores
from llama_adapter.app.learning.training import eye, results, stepping
from llama_adapter.app.learning.training.cache import EncodedCache
from llama_adapter.app.learning.training.checkpoint import read_checkpoint, write_checkpoint
from llama_adapter.app.learning.training.eye import Eye
from llama_adapter.app.learning.training.job import TrainingChoice
from llama_adapter.app.learning.training.model import open_trainable
from llama_adapter.app.learning.training.results import draw
from llama_adapter.app.learning.training.run import model_texts
from llama_adapter.app.learning.training.scoring import Validation, Validator
from llama_adapter.app.learning.training.stepping import Step, Stepper
from llama_adapter.app.models.described import DEFAULT_PROMPT
from llama_adapter.app.models.resources import embedded_model
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.pictures.reading.reader import PictureReader
from llama_adapter.runtime.devices.cpu import CpuBackend
from llama_adapter.runtime.errors import ExitCode
from llama_adapter.runtime.tensor_files.files import read_safetensors
from tests.app.command import Ran, Run, separated, several
from tests.app.golden import ROOT
from tests.app.learning.labelled.tables import write_lines
from tests.app.learning.training.pets import CLASSES, draw_pets
from tests.parity.golden import model_flags

pytestmark = pytest.mark.slow

QUICK = ["--score", "loss", "--evaluate-every", "3", "--epochs", "2", "--batch-size", "8", "--sets", "bias"]
QUICK += ["--lr", "1e-3"]
# AdamW's first steps have the same size for a gradient of rounding errors as for any other. With a tiny rate the
# weights hardly move, so that results computed differently stay comparable.
STEADY = [*QUICK, "--lr", "1e-7"]
OPENS = "llama_adapter.app.learning.training.run.open_trainable"
SEEING = ["--tower-epochs", "1", "--epochs", "2", "--test", "0"]  # a small encoder learns first
Train = Callable[..., Ran]


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pets(tmp_path_factory.mktemp("pets"), each=15)


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """Runs in this process draw no curves and their intervals are of few draws, except in the first test.

    Both together take a third of such a short run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "draw", lambda job: True)
        patch.setattr(scoring, "Draws", partial(Draws, count=10))
        yield


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--encoded", str(tmp_path_factory.mktemp("encoded"))]


@pytest.fixture
def train(pets: Path, encoded: list[str], tmp_path: Path, run: Run) -> Train:
    """Runs `train` for a few steps on the pets, or on other data, and writes `pets.pth` in the test's folder."""

    def ran(*flags: str, data: Path = pets, out: str = "pets.pth", settings: list[str] = QUICK) -> Ran:
        return run("train", str(data), "--out", str(tmp_path / out), *settings, *encoded, *flags)

    return ran


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are read in this process, because starting others takes longer than reading these."""
    place = "llama_adapter.app.learning.training.encoding.IsolatedReader"
    monkeypatch.setattr(place, lambda spec, *, pixels, timeout_s: PictureReader(spec, pixels=pixels))


def tensors(folder: Path) -> dict[str, Tensor]:
    return read_checkpoint(folder / "last.safetensors")[0]


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def logged(folder: Path) -> list[tuple[str, ...]]:
    """Step, loss, validation loss, norm of the gradients before clipping, and tokens, of each row of the log."""
    columns = ("step", "loss", "validation_loss", "gradient_norm", "tokens")
    with (folder / "log.csv").open() as file:
        return [tuple(row[name] for name in columns) for row in csv.DictReader(file)]


def kill_after(num_steps: int, patch: pytest.MonkeyPatch) -> None:
    """Let a run end with exit code 9 in its next step after `num_steps`."""
    steps, original = list[float](), Stepper.step

    def killed(self: Stepper, *arguments: Any, **options: Any) -> Step:
        if len(steps) == num_steps:
            raise SystemExit(9)
        steps.append(options["lr"])
        return original(self, *arguments, **options)

    patch.setattr(stepping.Stepper, "step", killed)


def interrupt(owner: type, method: str, patch: pytest.MonkeyPatch) -> None:
    """Let SIGTERM arrive in the first call of a method."""
    original, left = getattr(owner, method), [signal.SIGTERM]

    def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
        if left:
            signal.raise_signal(left.pop())
        return original(self, *arguments, **options)

    patch.setattr(owner, method, interrupted)


def trained(pets: Path, out: Path, *flags: str) -> Path:
    """The folder of a run with six steps."""
    from llama_adapter.app.command_line.main import main

    assert main(["train", str(pets), "--out", str(out / "pets.pth"), *flags, "--quiet"]) == 0
    return out / "pets.training"


@pytest.fixture(scope="module")
def whole(pets: Path, encoded: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pets, tmp_path_factory.mktemp("whole"), *QUICK, *encoded)


@pytest.fixture(scope="module")
def steady(pets: Path, encoded: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with weights that hardly move."""
    return trained(pets, tmp_path_factory.mktemp("steady"), *STEADY, *encoded)


@pytest.mark.proves("training", "CPU")
def test_a_folder_of_two_classes_becomes_an_adapter_that_answers(
    pets: Path,
    train: Train,
    tmp_path: Path,
    odd_modes: Callable[[Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "draw", draw)
    monkeypatch.setattr(scoring, "Draws", Draws)
    monkeypatch.setattr(eye, "_FEWEST_BLOCK_STEPS", 10)  # enough for two plain classes, as are the epochs and views
    monkeypatch.setattr(eye, "_MOST_VIEWS", 4)
    ran = train(settings=["--tower-epochs", "6", "--epochs", "6"])
    assert ran.code == 0, ran.err
    assert odd_modes(tmp_path) == {}
    out, folder = tmp_path / "pets.pth", tmp_path / "pets.training"
    question = "Which of these is it: ring, triangle?"
    pictures = [str(pets / "ring" / "0.png"), str(pets / "triangle" / "0.png")]
    with Captioner.load(llama_dir=embedded_model(), adapter=out) as one, Captioner.load(folder / "bundle") as other:
        answers = [each.generate(pictures, [question] * 2, choices=["ring", "triangle"]) for each in (one, other)]
        assert {one.info.default_prompt, other.info.default_prompt} == {question}  # what `caption` asks
    assert [[answer.text for answer in of_one] for of_one in answers] == [["ring", "triangle"]] * 2
    for trained in (
        CaptionerSpec(model=str(folder / "bundle")),
        CaptionerSpec(llama_dir=embedded_model(), adapter=str(out)),
    ):
        assert model_texts(trained)[2] == DEFAULT_PROMPT  # of captions that are learned next
    card = (folder / "card.md").read_text()
    assert "| ring | 12 |" in card
    written = "train.jsonl validation.jsonl test.jsonl curves.png data.json log.csv settings.yaml test.json test.md"
    assert {*written.split(), "best.safetensors"} <= {path.name for path in folder.iterdir()}


@pytest.mark.proves("train: resume after kill -9", "CPU")
def test_a_run_that_is_killed_goes_on_bit_for_bit(
    whole: Path, train: Train, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pets.training"
    with monkeypatch.context() as patch:
        kill_after(4, patch)  # one step after the checkpoint
        assert train().code == 9
    assert not (tmp_path / "pets.pth").exists()
    kept = (folder / "train.jsonl").read_bytes()
    refused = train()
    assert refused.code == 2
    assert "--resume" in refused.err
    others = draw_pets(tmp_path / "others", each=5)
    with monkeypatch.context() as patch:
        patch.setattr(OPENS, lambda *_, **__: pytest.fail("it is loaded"))
        for other in (
            train("--resume", "--lr", "1e-4"),
            train("--resume", "--seed", "1"),
            train("--resume", data=others),
        ):
            assert other.code == 2
            assert "another model, data, examples, settings or version" in other.err
    (folder / "data.json").unlink()
    assert "another model, data, examples, settings or version" in train("--lr", "1e-4", "--resume").err, (
        "the checkpoint says so too"
    )
    for other_base in (["--model", str(whole / "bundle")], ["--dtype", "bfloat16"]):
        assert "another model" in train("--resume", *other_base).err
    assert (folder / "train.jsonl").read_bytes() == kept, "the run's own division"

    resumed = run("train", "--config", str(folder / "settings.yaml"), "--resume")
    assert resumed.code == 0
    assert f"goes on after step 3 of 6, from `{folder / 'last.safetensors'}`" in resumed.err
    assert_same_bits(tensors(folder), tensors(whole))
    assert logged(folder) == logged(whole)
    assert_same_bits(read_safetensors(folder / "best.safetensors"), read_safetensors(whole / "best.safetensors"))


def test_a_model_trained_for_captions_is_asked_its_own_question(
    pets: Path, encoded: list[str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"image": str(path), "text": f"a small {path.parent.name} here"} for path in sorted(pets.rglob("*.png"))]
    write_lines(tmp_path / "captions.jsonl", *rows)
    question = "Describe {{the}} picture."
    ran = run("train", "captions.jsonl", "--out", "a.pth", "--question", question, *QUICK, *encoded)
    assert ran.code == 0, ran.err
    assert "wrote `a.pth` and `a.training/bundle`\n" in ran.err, "relative, as it was named"
    [record] = run("caption", rows[0]["image"], "--model", "a.training/bundle", "--max-new-tokens", "1").records
    assert record["prompt"] == "Describe {the} picture."
    over = ["--llama-dir", str(embedded_model()), "--adapter", "a.pth"]
    ran = run("eval", "a.training/test.jsonl", *over, "--out", "scores", "--max-new-tokens", "1")
    assert ran.code == 0, ran.err
    assert "captions without a question are asked “Describe {the} picture.”" in ran.err


def shortened(folder: Path) -> None:
    """Give one moment of the last checkpoint another shape."""
    found, state = read_checkpoint(folder / "last.safetensors")
    name = next(one for one in found if one.startswith("exp_avg_sq/"))
    write_checkpoint(folder / "last.safetensors", found | {name: torch.ones(1)}, state)


def of_another_run(folder: Path) -> None:
    """Put the best checkpoint of another run into the folder."""
    found, state = read_checkpoint(folder / "best.safetensors")
    state.run = "0" * 64
    write_checkpoint(folder / "best.safetensors", found, state)


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (["--score", "auto"], 2, "by loss, and would go on by answers\n\nhint: resume with --score loss"),
        (shortened, 1, "last.safetensors`: `exp_avg_sq/.*has the shape"),
        (of_another_run, 2, "has another model, data, examples, settings or version"),
        (lambda folder: (folder / "best.safetensors").unlink(), 1, "best.safetensors"),
        (lambda folder: (folder / "log.csv").write_bytes(b"\xff\0\n"), 1, "log.csv` is no log of a training"),
        (lambda folder: (folder / "bundle" / "mine.txt").touch(), 1, "`mine.txt` beside its bundle"),
    ],
)
def test_what_a_resumed_run_reads_is_checked_before_use(
    change: list[str] | Callable[[Path], object], code: int, told: str, whole: Path, tmp_path: Path, train: Train
) -> None:
    folder = tmp_path / "pets.training"
    shutil.copytree(whole, folder)
    if not isinstance(change, list):
        change(folder)
    ran = train("--resume", *(change if isinstance(change, list) else ()))
    assert "fault of the program" not in ran.err
    assert ran.code == code, ran.err
    assert re.search(told, ran.err)
    assert not (tmp_path / "pets.pth").exists()


def test_accumulated_parts_give_the_same_sums(steady: Path, tmp_path: Path, train: Train) -> None:
    assert train(*STEADY, "--rows", "3", "--checkpointing").code == 0
    assert_same_sums(tmp_path / "pets.training", steady)


def assert_same_sums(folder: Path, whole: Path) -> None:
    """Losses, norms, and the moments, which are sums of gradients, are equal except for rounding.

    A wrong sum lacks or repeats one of the batch's eight examples at least. A hundredth of its share is the limit.
    Gradients are clipped, which hides a wrong size of all of them from the moments, and not from the norms.
    """
    limit = 0.01 / 8
    for ours, theirs in zip(logged(folder), logged(whole), strict=True):
        assert [float(text or 0) for text in ours] == pytest.approx([float(text or 0) for text in theirs], rel=limit)
    mine, other = tensors(folder), tensors(whole)
    for name in (name for name in mine if name.startswith("exp_avg/")):
        assert float((mine[name] - other[name]).norm()) <= limit * float(other[name].norm()), name


# A rank that the variable DIES names ends in its first step. Curves and intervals are as in `no_curves`.
DYING = """
from llama_adapter.app.models.parallel.launch import quieten_torch
quieten_torch()
import functools, os
from llama_adapter.app.learning.scores import scoring
from llama_adapter.app.learning.training import results
from llama_adapter.app.learning.training.stepping import Stepper
results.draw = lambda job: True
scoring.Draws = functools.partial(scoring.Draws, count=10)
def step(self, *arguments, step=Stepper.step, **options):
    if os.environ.get("DIES") == os.environ["RANK"]:
        os.kill(os.getpid(), 9)
    return step(self, *arguments, **options)
Stepper.step = step
"""


class OnRanks(NamedTuple):
    """Runs of two ranks of `torchrun`, one after the other."""

    folder: Path  # has `ddp.pth` and `fsdp.pth`
    code: int  # of torchrun
    first: list[Ran]  # of rank 0, with DDP and with FSDP
    second: list[Ran]  # of rank 1
    lost: str  # what rank 0 said when rank 1 had ended


@pytest.fixture(scope="module")
def on_ranks(pets: Path, encoded: list[str], tmp_path_factory: pytest.TempPathFactory) -> OnRanks:
    """The run of `steady` with DDP, with FSDP, and one in which rank 1 dies.

    In the first, the ranks meet as torchrun says; in the others at a port of their own, as with other programs that
    start ranks.
    """
    folder = tmp_path_factory.mktemp("ranks")
    own = [f"MASTER_PORT={port}" for port in free_ports(2)]

    def learn(name: str, *flags: str) -> list[str]:
        return ["train", str(pets), "--out", str(folder / f"{name}.pth"), *STEADY, *encoded, "--device", "cpu", *flags]

    apart = "TORCHELASTIC_USE_AGENT_STORE=False"
    commands = several(
        [
            learn("ddp", "--parallel", "ddp"),
            [own[0], apart, *learn("fsdp", "--parallel", "fsdp")],
            [own[1], "DIES=1", *learn("lost", "--rank-timeout", "30")],
        ],
        before=DYING,
    )
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=2"]
    said = folder / "said"
    ran = subprocess.run(
        [*torchrun, "--redirects=3", f"--log-dir={said}", "--no-python", *commands],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    streams = [[one.read_text() for one in sorted(said.glob(f"*/attempt_0/{rank}/std*.log"))] for rank in (0, 1)]
    assert [len(of_rank) for of_rank in streams] == [2, 2], ran.stderr
    (err, out), (other_err, other_out) = streams
    lost = err.rpartition("\nended with 0")[2]
    return OnRanks(folder, ran.returncode, separated(out, err)[:2], separated(other_out, other_err), lost)


def free_ports(number: int) -> list[int]:
    """Free ports below those that the system gives to programs which ask for any, so that they stay free."""
    found: list[int] = []
    tried = range(20_000 + os.getpid() % 10_000, 32_000)
    for port in tried:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == number:
            return found
    raise OSError(f"{number} ports of {tried} are wanted, and {len(found)} are free")


@pytest.mark.proves("train: several ranks", "CPU")
@pytest.mark.parametrize(("number", "kind"), [(0, "ddp"), (1, "fsdp")])
def test_two_ranks_equal_one(number: int, kind: str, steady: Path, on_ranks: OnRanks) -> None:
    first, second = on_ranks.first[number], on_ranks.second[number]
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    assert_same_sums(on_ranks.folder / f"{kind}.training", steady)
    assert (on_ranks.folder / f"{kind}.pth").is_file()
    assert first.err.count("wrote `") == 1
    assert second.err == "", "the first rank speaks"


@pytest.mark.proves("train: early stopping", "CPU")
def test_a_run_ends_early_with_its_best_weights(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The score rises once; after that, neither score nor loss improves."""
    given = iter([(0.5, 3.0), (0.7, 2.0), (0.6, 2.5), (0.7, 2.0), (0.6, 2.1)])
    held: list[dict[str, Tensor]] = []

    def validate(self: Validator) -> Validation:
        held.append({name: one.detach().clone() for name, one in self._distributed.model.trained().items()})
        score, loss = next(given)
        return Validation(score=score, loss=loss, measure="accuracy")

    monkeypatch.setattr(Validator, "__call__", validate)
    out = tmp_path / "pets.pth"
    flags = ["--patience", "3", "--evaluate-every", "1", "--test", "0", "--epochs", "1.5", "--score", "answers"]
    ran = train(*flags)
    assert ran.code == 0, ran.err
    folder = out.with_suffix(".training")
    best, state = read_checkpoint(folder / "best.safetensors")

    assert (state.best_step, read_checkpoint(folder / "last.safetensors")[1].step) == (1, 4), "of six steps"
    assert_same_bits({name.removeprefix("weight/"): one for name, one in best.items()}, held[1])
    assert any(not torch.equal(held[1][name], held[4][name]) for name in held[1]), "the last weights are others"
    card = (folder / "card.md").read_text()
    assert "| steps | 4 of 6, early, because the validation score did not improve |" in card
    assert "| best step | 1 |" in card
    assert "after step 1: validation loss 2.0000, accuracy 0.7000 (best so far)" in ran.err
    spec = CaptionerSpec(llama_dir=str(embedded_model()), adapter=str(out))
    written = open_trainable(spec, TrainingChoice(), dtype=torch.float32, device="cpu", seed=0).trained()
    for name, one in held[1].items():
        assert torch.allclose(written[name], one, rtol=1e-3, atol=1e-3), name  # gates are written in float16
    again = train(*flags, "--resume")
    assert again.code == 0, "nothing is left to do, and no evaluation either"
    assert "4 of 6, early" in (folder / "card.md").read_text()


@pytest.mark.proves("train: memory plan", "CPU")
def test_the_plan_is_printed_and_a_run_that_does_not_fit_is_refused(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[object]()
    monkeypatch.setattr(OPENS, lambda *_, **__: loaded.append(0))

    def refused(*flags: str) -> tuple[float, str]:
        ran = train(*flags)
        assert ran.code == ExitCode.USAGE, ran.err
        found = re.search(r"Training needs ([0-9.]+) GB at its peak .* and 0\.00 GB are free on cpu", ran.err)
        assert found is not None, ran.err
        return float(found[1]), ran.err

    monkeypatch.setattr(CpuBackend, "free_bytes", lambda self: 10**6)
    whole, said = refused()
    assert "--rows" in said
    assert refused("--batch-size", "2000000000")[0] == refused("--batch-size", "24")[0] > whole, "24 are to learn"
    assert refused("--batch-size", "24", "--rows", "8")[0] == whole
    assert not loaded
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(CpuBackend, "free_bytes", lambda self: int(whole * 1e9) + 10**8)
    ran = train()
    predicted = re.search(r"predicted peak memory: ([0-9.]+) GB", ran.err)
    assert predicted is not None, ran.err
    assert whole <= float(predicted[1]) <= whole + 0.1, "with packed weights, as they fit"
    assert loaded, "it fits, so the model is opened"


def test_validation_computes_no_more_rows_at_once_than_the_plan_counts(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def parts(*_: Any, rows: int, **__: Any) -> None:
        seen.append(rows)
        raise SystemExit(9)

    monkeypatch.setattr("llama_adapter.app.learning.training.scoring.microbatches", parts)
    assert train("--batch-size", "1000", "--validation", "0.6").code == 9
    assert seen == [len((tmp_path / "pets.training" / "train.jsonl").read_text().splitlines())]


def test_what_cannot_be_written_is_told_before_the_first_step(train: Train, tmp_path: Path) -> None:
    (tmp_path / "folder.pth").mkdir()
    (tmp_path / "file.training").write_text("mine")
    for out, told in (
        ("folder.pth", "and a folder is there"),
        ("file.pth", "and a file is there"),
        ("/proc/pets.pth", "No such file or directory: `/proc/pets.pth`"),
    ):
        ran = train("--force", out=out)
        assert ran.code in (1, 2), ran.err
        assert told in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.training", "folder.pth"]


def test_a_full_disk_names_the_checkpoint_and_the_way_on(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[str]()

    def write(path: Path, *arguments: Any) -> None:
        written.append(path.name)
        if written.count("last.safetensors") == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_checkpoint(path, *arguments)

    monkeypatch.setattr("llama_adapter.app.learning.training.checkpoint.write_checkpoint", write)
    ran = train()

    assert ran.code == 1
    assert "last.safetensors` cannot be written: No space left on device" in ran.err
    assert "--resume" in ran.err
    assert read_checkpoint(tmp_path / "pets.training" / "last.safetensors")[1].step == 3


@pytest.mark.usefixtures("read_here")
def test_without_a_cache_folder_encodings_are_beside_the_adapter_and_a_note_says_so(
    pets: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(f"{OPENS.rpartition('.run.')[0]}.encoding._MANY", 30)
    kill_after(0, monkeypatch)
    ran = run("train", str(pets), "--out", str(tmp_path / "pets.pth"), *QUICK)

    assert ran.code == 9
    note, looking, encoding = [line for line in ran.err.splitlines() if "pictures" in line]
    assert "encoded pictures are kept in" in note
    assert "--encoded names another folder" in note
    assert looking == "looking for the encodings of 30 pictures"
    assert encoding == "encoding 30 pictures", "progress is shown once a minute"
    assert len(list((tmp_path / "pets.training" / "encoded").rglob("*.safetensors"))) == 30


@pytest.mark.proves("train: TensorBoard", "CPU")
def test_tensorboard_reads_what_the_table_has(whole: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(whole / "tensorboard"))
    events.Reload()
    with (whole / "log.csv").open() as file:
        rows = list(csv.DictReader(file))

    for name in ("loss", "lr", "validation_loss"):
        shown = [(one.step, one.value) for one in events.Scalars(name)]
        assert shown == [(int(row["step"]), pytest.approx(float(row[name]), rel=1e-5)) for row in rows if row[name]]
        assert len(shown) >= 3
    assert set(events.Tags()["scalars"]) == set(rows[0]) - {"step", "validation_score"}


def test_an_interrupted_run_keeps_the_best_so_far(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(Stepper, "step", monkeypatch)
    ran = train()

    assert ran.code == ExitCode.INTERRUPTED
    assert (tmp_path / "pets.pth").is_file()
    assert "2 of 6, interrupted" in (tmp_path / "pets.training" / "card.md").read_text()
    steps = {
        name: read_checkpoint(tmp_path / "pets.training" / name)[1].step
        for name in ("best.safetensors", "last.safetensors")
    }
    assert steps == {"best.safetensors": 0, "last.safetensors": 2}, "only the first weights were evaluated"


def test_over_a_trained_encoder_the_last_weights_are_kept_and_an_interrupted_run_goes_on_bit_for_bit(
    whole: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted while the encoder learns, and while the decoder does. No earlier run goes on in its place."""
    monkeypatch.setattr(eye, "_FEWEST_BLOCK_STEPS", 2)
    monkeypatch.setattr(eye, "_MOST_VIEWS", 4)
    learn = partial(train, settings=SEEING)
    ran = learn(out="other.pth")
    assert ran.code == 0, ran.err
    assert re.search(
        r"\bthe encoder alone answers \d+\.\d % of [1-9]\d* validation examples with given answers\b", ran.err
    )
    assert re.search(r" 4 steps of \d+ \(epochs: 2\), highest learning rate ", ran.err)
    other, folder = tmp_path / "other.training", tmp_path / "pets.training"
    shutil.copytree(whole, folder)  # of other sets, and replaced
    with monkeypatch.context() as patch:
        interrupt(Eye, "_step", patch)
        assert learn("--force").code == ExitCode.INTERRUPTED
    refused = learn()
    assert refused.code == ExitCode.USAGE
    assert "tower.safetensors` exists already" in refused.err
    with monkeypatch.context() as patch:
        interrupt(Stepper, "step", patch)
        assert learn("--resume").code == ExitCode.INTERRUPTED
    assert (tmp_path / "pets.pth").is_file(), "the last weights"
    assert "2 of 4, interrupted" in (folder / "card.md").read_text()
    best, state = read_checkpoint(folder / "best.safetensors")
    assert state.best_step == state.step == 2
    assert_same_bits(best, {name: one for name, one in tensors(folder).items() if name in best})

    assert learn("--resume").code == 0
    assert_same_bits(tensors(folder), tensors(other))
    assert logged(folder) == logged(other)
    assert [row for row in logged(other) if row[2]] == [logged(other)[-1]], "one evaluation, at the end"


def test_one_interrupt_ends_the_scoring_and_keeps_the_adapter(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score(*arguments: Any) -> list[Scores]:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("scored on")

    monkeypatch.setattr("llama_adapter.app.learning.training.results.score_test", score)
    ran = train("--epochs", "1", "--batch-size", "1000")

    folder = tmp_path / "pets.training"
    assert ran.code == 130
    assert (tmp_path / "pets.pth").is_file()
    assert "Ask it:" in ran.err
    assert f"not scored: the run was interrupted. Score them:\nllama-adapter eval {folder / 'test.jsonl'}" in ran.err
    card = (folder / "card.md").read_text()
    assert "not scored: the run was interrupted." in card
    assert "| examples a step | 24 |" in card, "there are no more"


def test_an_example_whose_loss_is_not_finite_is_named_and_its_step_skipped(
    pets: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, get = next(pets.rglob("*.png")), EncodedCache.get
    digest = hashlib.sha256(place.read_bytes()).hexdigest()

    def poisoned(self: EncodedCache, wanted: str) -> Tensor:
        return get(self, wanted).clone().fill_(float("nan")) if wanted == digest else get(self, wanted)

    monkeypatch.setattr(EncodedCache, "get", poisoned)
    flags = ["--validation", "0", "--test", "0"]
    ran = train(*flags)

    assert ran.code == 0
    assert ran.err.count(f"is skipped: the loss of {place} is not finite") == 2, "once in each epoch"
    assert all(bool(torch.isfinite(one).all()) for one in tensors(tmp_path / "pets.training").values())

    stopped = train(*flags, "--skip", "1", "--force")
    assert stopped.code == 1
    assert "2 steps had a loss or gradient that is not finite" in stopped.err
    assert str(place) in stopped.err


@pytest.mark.usefixtures("read_here")
def test_float16_learns_as_float32_does(tmp_path: Path, train: Train) -> None:
    learned, few = [], draw_pets(tmp_path / "few", each=8)
    flags = ["--epochs", "1", "--batch-size", "4", "--validation", "0", "--test", "0", "--force"]
    for dtype in ("float32", "float16"):
        ran = train(*model_flags(), "--dtype", dtype, *flags, data=few)
        assert ran.code == 0, ran.err
        learned.append(logged(tmp_path / "pets.training"))
    pairs = [(float(one[1]), float(other[1])) for one, other in zip(*learned, strict=True) if other[1]]
    assert len(pairs) >= 3, "float16 may skip its first step, to find its scale"
    assert all(one == pytest.approx(other, rel=0.05) for one, other in pairs), pairs


def test_pictures_and_texts_are_learnt_together_without_pictures_that_cannot_be_decoded(
    pets: Path, tmp_path: Path, train: Train
) -> None:
    rows: list[dict[str, Any]] = [{"question": f"What is {one} and one?", "answer": str(one + 1)} for one in range(9)]
    for path in sorted(pets.rglob("*.png"))[::3]:
        answers = {name: "yes" if path.parent.name == name else "no" for name in CLASSES}
        asked = [{"question": f"Is it a {name}?", "answer": answer} for name, answer in answers.items()]
        rows.append({"image": str(path), "questions": asked})
    bad = tmp_path / "cut.png"
    bad.write_bytes((pets / "ring" / "0.png").read_bytes()[:100])
    rows.append({"image": str(bad), "question": "Is it a ring?", "answer": "yes"})
    ran = train("--sets", "lora", "--epochs", "1", data=write_lines(tmp_path / "data.jsonl", *rows))

    assert ran.code == 3, ran.err
    assert f"left out: {bad}" in ran.err
    assert "left out: 1\n" in (tmp_path / "pets.training/card.md").read_text()
    assert "LoRA factors" in ran.err
    with Captioner.load(tmp_path / "pets.training" / "bundle") as captioner:
        assert captioner.generate_text("What is one and one?", max_new_tokens=3)


def test_what_is_wrong_with_the_data_is_told_before_the_model_is_loaded(
    pets: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPENS, lambda *_, **__: pytest.fail("it is loaded"))
    picture = str(next((pets / "ring").iterdir()))
    table = write_lines(
        tmp_path / "data.jsonl",
        {"image": picture, "question": "What is it?", "answer": "a ring"},
        {"image": "gone.png", "question": "What is it?", "answer": "a ring"},
        {"image": picture, "question": "How is it?", "answer": {}},
        {"image": picture, "question": "long " * 600, "answer": "yes"},
        {"image": picture, "question": "What is {it}?", "answer": "yes"},
    )
    ran = train(data=table, settings=[])

    assert ran.code == 2
    for words in ("gone.png does not exist", "line 3", "line 4: its prompt and answer have", "the variable {it}"):
        assert words in ran.err


def test_answers_with_many_choices_are_not_scored_unless_asked_for(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOST_COMPARED", "_MOST_TEST_COMPARED"):
        monkeypatch.setattr(f"llama_adapter.app.learning.training.run.{name}", 1)
    ran = train("--epochs", "1", "--score", "auto")
    assert re.search(r"have \d choices to compare in each evaluation, so the loss alone decides", ran.err)
    assert ", accuracy " not in ran.err
    assert re.search(r"not scored: they have \d choices to compare, .*Score them:\nllama-adapter eval", ran.err)
    kill_after(0, monkeypatch)  # after an evaluation
    asked = train("--epochs", "1", "--score", "answers", "--force")
    assert "--score loss is faster" in asked.err
    assert ", accuracy " in asked.err


def test_a_rank_that_dies_ends_the_run(on_ranks: OnRanks) -> None:
    assert on_ranks.code == 1
    assert len(on_ranks.second) == 2, "it ended in its third run"
    assert "Rank 0 of 2 lost the others" in on_ranks.lost
    assert not (on_ranks.folder / "lost.pth").exists()
