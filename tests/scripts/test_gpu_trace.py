"""Traces of a GPU: kernels, the time without any, and a rehearsal on the CPU."""

import pytest

from scripts.gpu_trace import Span, Summary, main


def test_gaps_are_the_time_in_which_no_kernel_runs() -> None:
    spans = [Span("b", 5000, 6000), Span("a", 0, 2000), Span("a", 1000, 3000), Span("b", 5500, 5600)]

    summary = Summary.of(spans)

    assert (summary.num_kernels, summary.window_ms, summary.busy_ms, summary.longest_gap_ms) == (4, 6.0, 4.0, 2.0)
    assert summary.kernels == (("a", 2, 4.0), ("b", 2, 1.1))
    assert list(summary.lines("a step")) == [
        "a step | 6.00 ms, busy 66.7%, 4 kernels, longest gap 2.000 ms",
        "      4.000 ms  66.7%      2 x a",
        "      1.100 ms  18.3%      2 x b",
    ]


@pytest.mark.slow
def test_all_parts_are_rehearsed_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--decoder", "tiny", "--encoder", "vit-tiny", "--slots", "4", "--on", "cpu"]) == 0

    parts = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert parts == [
        "a step, rows: 1",
        "a step, rows: 4",
        "a prefill of 55 tokens each, prompts: 1",
        "the encoder, pictures: 1",
        "a job of 8 pictures, slots: 4",
    ]
