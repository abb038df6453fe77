"""The command line in processes of its own, with its results on a GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.records.record import read_records
from tests.app.golden import ROOT
from tests.cuda.device import DEVICE, GRAPHS, IS_GPU, loaded
from tests.e2e.test_demo import Ran

COMMAND = ["-m", "llama_adapter"]
CAPTION = [*COMMAND, "caption", str(sample_pictures()), "--device", DEVICE, "--dtype", "float32", "--mode", GRAPHS]
BENCH = [*COMMAND, "bench", "--device", DEVICE, "--mode", GRAPHS, "--workload", "caption"]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Ran]:
    """What the commands printed. They run at once, because most of their time is the start."""
    begun = {
        "caption": start(*CAPTION, "--limit", "5", "--out", str(folder / "captions.jsonl")),
        "demo": start("demo_bsz.py", "--device", DEVICE, "--batch-size", "5"),
        "doctor": start(*COMMAND, "doctor", "--environment", "--device", DEVICE),
        "bench": start(
            *BENCH, "--batch-sizes", "1,4", "--pictures", "4", "--rounds", "1", "--out", str(folder / "bench.json")
        ),
    }
    told = {name: (process.communicate(timeout=300), process.returncode) for name, process in begun.items()}
    return {name: Ran(code, *texts) for name, (texts, code) in told.items()}


@pytest.fixture(scope="module")
def captions() -> dict[str, str]:
    """The CPU's captions by the picture's name."""
    return {Path(answer.picture).name: answer.text for answer in loaded("cpu").generate(sample_pictures())}


def test_the_demo_captions_and_scores_the_samples(ran: dict[str, Ran], captions: dict[str, str]) -> None:
    demo = ran["demo"]

    assert demo.code == 0, demo.err
    assert demo.results == captions
    assert int(re.search(r"(\d+) of 330 answers exactly right", demo.out)[1]) >= 320  # type: ignore[index]


def test_the_doctor_finds_the_gpu(ran: dict[str, Ran]) -> None:
    doctor = ran["doctor"]

    assert doctor.code == 0, doctor.out
    assert bool(re.search(r"^CUDA devices +ok ", doctor.out, re.MULTILINE)) == IS_GPU


def test_captions_are_continued(ran: dict[str, Ran], captions: dict[str, str], folder: Path) -> None:
    first, out = ran["caption"], folder / "captions.jsonl"
    assert first.code == 0, first.err
    assert len(list(read_records(out))) == 5

    process = start(*CAPTION, "--out", str(out))
    rest = Ran(*reversed((*process.communicate(timeout=300), process.returncode)))

    assert rest.code == 0, rest.err
    assert {Path(record["picture"]).name: record["text"] for record in read_records(out)} == captions
    assert len(list(read_records(out))) == 32


def test_the_benchmark_measures_plausible_ceilings(ran: dict[str, Ran], folder: Path) -> None:
    assert ran["bench"].code == 0, ran["bench"].err
    result = json.loads((folder / "bench.json").read_text(encoding="utf-8"))

    print(ran["bench"].out)
    assert all(1e9 < value < 1e16 for value in result["ceilings"].values())
    assert [batch["batch_size"] for batch in result["batches"]] == [1, 4]
    assert all(batch["pictures_per_s"] > 0 for batch in result["batches"])
