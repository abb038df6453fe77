"""Commands with `--tensor-parallel`: what is refused, a benchmark, and the demo with torchrun."""

import sys

import pytest

import demo_bsz
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.runtime.errors import ExitCode
from tests.app.command import Run

SAMPLE = str(min(sample_pictures().glob("*.png")))
TWO = ["--tensor-parallel", "2", "--parallel-timeout", "30"]


@pytest.mark.parametrize("mode", ["graph", "cuda_graph", "npugraph_ex"])
def test_strict_refuses_modes_of_graphs_before_a_device_is_opened(mode: str, run: Run) -> None:
    for device in ("cuda:0", "npu:0"):
        ran = run("caption", SAMPLE, "--mode", mode, "--strict", "--device", device, TWO)
        assert ran.code == ExitCode.USAGE
        assert f"--tensor-parallel goes with --mode eager, and it is {mode}: no graph holds the sums" in ran.err
        assert "Pass --mode eager, or one rank" in ran.err


@pytest.mark.slow
def test_a_benchmark_measures_two_ranks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_adapter.runtime.ceilings._HOST_BUFFER", 1 << 20)
    sizes = "--batch-sizes 1 --pictures 1 --rounds 1 --context 128"
    ran = run("bench", "--random", "tiny", sizes.split(), TWO)
    assert ran.code == 0, ran.err
    assert "2 ranks" in ran.out


def test_other_processes_of_torchrun_follow_in_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = []
    monkeypatch.setattr(
        "llama_adapter.app.models.parallel.rank_process.run_launched",
        lambda place, spec: followed.append((place.rank, spec.tensor_parallel, spec.parallel_timeout)) or 0,
    )
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["demo_bsz.py", *TWO])
    assert demo_bsz.main() == 0
    assert followed == [(1, 2, 30)]
