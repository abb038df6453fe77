"""The command line on a GPU, in processes of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llama_adapter.app.jobs.records.record import read_records
from llama_adapter.app.models.resources import sample_pictures
from tests.app.golden import ROOT
from tests.cuda.device import DEVICE, GRAPHS, IS_GPU, loaded
from tests.e2e.test_demo import Ran

CAPTION = f"-m llama_adapter caption {sample_pictures()} --device {DEVICE} --dtype float32 --mode {GRAPHS}"


def results(**commands: str) -> dict[str, Ran]:
    """What commands print that run at once, because most of their time is the start."""
    pipe = subprocess.PIPE
    begun = {
        name: subprocess.Popen([sys.executable, *command.split()], stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
        for name, command in commands.items()
    }
    told = {name: process.communicate(timeout=300) for name, process in begun.items()}
    return {name: Ran(begun[name].returncode, *texts) for name, texts in told.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Ran]:
    return results(
        caption=f"{CAPTION} --limit 5 --out {folder}/captions.jsonl",
        demo=f"demo_bsz.py --device {DEVICE} --batch-size 5",
        doctor=f"-m llama_adapter doctor --environment --device {DEVICE}",
        bench=f"-m llama_adapter bench --device {DEVICE} --mode {GRAPHS} --workload caption --batch-sizes 1,4 "
        f"--pictures 4 --rounds 1 --out {folder}/bench.json",
    )


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
    out = folder / "captions.jsonl"
    assert ran["caption"].code == 0, ran["caption"].err
    first = list(read_records(out))
    [rest] = results(caption=f"{CAPTION} --out {out}").values()

    assert rest.code == 0, rest.err
    records = list(read_records(out))
    assert (len(first), len(records), records[:5]) == (5, 32, first)
    assert {Path(record["picture"]).name: record["text"] for record in records} == captions


def test_the_benchmark_measures_plausible_ceilings(ran: dict[str, Ran], folder: Path) -> None:
    assert ran["bench"].code == 0, ran["bench"].err
    print(ran["bench"].out)
    result = json.loads((folder / "bench.json").read_text(encoding="utf-8"))

    assert all(1e9 < value < 1e16 for value in result["ceilings"].values())
    assert [batch["batch_size"] for batch in result["batches"]] == [1, 4]
    assert all(batch["pictures_per_s"] > 0 for batch in result["batches"])
