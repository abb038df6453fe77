"""Traces of a GPU: kernels, and the time without any. A round's rehearsal calls `main` (test_gpu_round.py)."""

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.runners.base import Runner
from scripts import gpu_trace
from scripts.common import ROOT
from scripts.gpu_trace import Span, parts_of, summary
from scripts.peers.ours import OurDecoder, open_parts


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


@pytest.mark.parametrize(
    ("flags", "count", "context"), [((), 4, 71), (("--slots", "3"), 3, 71), (("--context", "128"), 4, 128)]
)
def test_long_steps_are_of_one_row_and_of_all_slots_by_both_kernels(
    flags: tuple[str, ...],
    count: int,
    context: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps, opened = list[tuple[int, int]](), list[weakref.ref[Runner]]()

    def step(self: OurDecoder, ids: list[int], place: int) -> list[int]:
        steps.append((len(ids), place))
        return decode(self, ids, place)

    def open_alone(config: DecoderConfig, *rest: Any, **options: Any) -> Parts:
        assert config.context == context
        assert [runner() for runner in opened] == [None] * len(opened), "a model before this one still takes memory"
        parts = open_parts(config, *rest, **options)
        opened.append(weakref.ref(parts.runner))
        return parts

    def traced(call: Callable[[], object], *, device: str) -> list[Span]:
        call()
        return [Span(device, 0, 1)]

    decode = OurDecoder.step
    monkeypatch.setattr(OurDecoder, "step", step)
    monkeypatch.setattr(gpu_trace, "open_parts", open_alone)
    monkeypatch.setattr(gpu_trace, "traced", traced)

    assert gpu_trace.main(["--decoder", "tiny", "--encoder", "vit-tiny", "--on", "cpu", "--places", "70", *flags]) == 0

    parts = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert parts == [
        f"a step, rows: {rows}, places: 70 of {context}, ours-bfloat16{kernels}"
        for kernels in ("", "-proposed")
        for rows in (1, count)
    ]
    assert steps == [(1, 70), (count, 70)] * 2


@pytest.mark.parametrize("flags", [("--context", "512"), ("--places", "70", "--context", "70")])
def test_a_context_holds_the_places_and_the_step(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_trace.main(flags)

    assert "it needs --places, and must be larger than these" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_is_started_as_a_module_and_reads_its_flags() -> None:
    command = [sys.executable, "-m", "scripts.gpu_trace", "--slots", "0"]

    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2
