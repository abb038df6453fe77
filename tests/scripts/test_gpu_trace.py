"""Traces of a GPU: kernels, and the time without any. A round's rehearsal calls `main` (test_gpu_round.py)."""

import subprocess
import sys

import pytest

from scripts.common import ROOT
from scripts.gpu_trace import Span, parts_of, summary


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


@pytest.mark.slow
def test_the_program_is_started_as_a_module_and_reads_its_flags() -> None:
    command = [sys.executable, "-m", "scripts.gpu_trace", "--slots", "0"]

    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2
