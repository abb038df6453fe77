"""Traces of a GPU: kernels, and the time without any. A round's rehearsal calls `main` (test_gpu_round.py)."""

import subprocess
import sys

import pytest

from scripts.common import ROOT
from scripts.gpu_trace import Span, long_steps, parts_of, summary
from scripts.peers.ours import OurDecoder


def test_gaps_are_the_time_in_which_no_kernel_runs() -> None:
    spans = [Span("b", 5000, 6000), Span("a", 0, 2000), Span("a", 1000, 3000), Span("b", 5500, 5600)]

    assert list(summary("a step", spans)) == [
        "a step | 6.00 ms, busy 66.7%, 4 kernels, longest gap 2.000 ms",
        "      4.000 ms  66.7%      2 x a",
        "      1.100 ms  18.3%      2 x b",
    ]


def test_parts_are_of_a_quarter_of_the_slots_and_of_all() -> None:
    assert [name for name, _ in parts_of("tiny", "vit-tiny", slots=8, device="cpu")] == [
        "a step, rows: 2",
        "a step, rows: 8",
        "a prefill of 55 tokens each, prompts: 2",
        "the encoder, pictures: 2",
        "a job of 16 pictures, slots: 8",
    ]


def test_long_steps_are_of_one_row_and_of_all_slots_by_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[tuple[list[int], int]]()
    decode = OurDecoder.step
    monkeypatch.setattr(
        OurDecoder, "step", lambda self, ids, place: steps.append((ids, place)) or decode(self, ids, place)
    )
    names = []
    for name, call in long_steps("tiny", "vit-tiny", num_places=70, slots=3, device="cpu"):
        names.append(name)
        call()

    kernels = ("ours-bfloat16", "ours-bfloat16-proposed")
    assert names == [f"a step, rows: {count}, places: 70, {name}" for name in kernels for count in (1, 3)]
    assert [(len(ids), place) for ids, place in steps] == [(count, 70) for _ in kernels for count in (1, 3)]


@pytest.mark.slow
def test_the_program_is_started_as_a_module_and_reads_its_flags() -> None:
    command = [sys.executable, "-m", "scripts.gpu_trace", "--slots", "0"]

    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2
