"""The report has stage times, counts and circumstances as they were measured."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import STAGES, StageClock
from llama_adapter.app.jobs import report as report_module
from llama_adapter.app.jobs.report import Report, Tally, commit, longest_stage, percentile, versions
from llama_adapter.app.pictures.answer_error import AnswerError
from tests.app.golden import PICTURES, model_options
from tests.app.recorded import answered
from tests.app.toys import INFO

MODEL = dataclasses.replace(INFO, name="toy", digest="d" * 64, default_prompt="")
NOTHING = Report(
    tally=Tally(), stages_s=dict.fromkeys(STAGES, 0.0), wall_s=0.0, model=MODEL, batch_size=4, synchronised=True
)


def test_the_longest_stage_bounds_a_run_and_one_without_answers_has_a_report() -> None:
    assert longest_stage({"clip": 1.0, "forward": 2.0, "read": 1.0}) == ("forward", 0.5)
    assert longest_stage(NOTHING.stages_s) is None
    assert NOTHING.format_table()


def test_the_table(snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "versions", lambda: {"python": "3.x", "torch": "2.x"})
    monkeypatch.setattr(report_module, "commit", lambda: "abc1234")
    report = dataclasses.replace(NOTHING, tally=Tally(), stages_s={"read": 1.0, "forward": 3.0}, wall_s=4.0)
    for ms in range(100, 0, -1):
        report.tally.add(answered(ms={"total": float(ms)}))
    report.tally.add(answered(error=AnswerError(code="empty", message="")))

    assert report.format_table() == snapshot
    marked = dataclasses.replace(
        report,
        model=dataclasses.replace(MODEL, dtype="bfloat16", precision="int8"),
        synchronised=False,
        tally=dataclasses.replace(report.tally, what="question"),
        device_stages_s={"read": 0.0, "forward": 2.5},
    )
    table = marked.format_table()
    assert [line.split()[-1] for line in table.splitlines()[:4]] == ["device", "0.000", "2.500", "2.500"]
    assert all(words in table for words in ("int8 and bfloat16", "the host's times, device not waited for"))
    assert all(words in table for words in ("ms/question", "100 questions (1 more", " 25.00 questions/s"))
    busy = dataclasses.replace(marked, device_stages_s={"read": 0.5, "clip": 1.0, "forward": 2.0, "write": 0.5})
    told = ("bound by: forward (50% of the time)", "device without work: 1.000 s (25% of its time), in read, decode")
    assert all(words in busy.format_table() for words in told)


def test_versions_are_those_that_are_imported() -> None:
    assert versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]


@pytest.mark.parametrize(("variable", "value"), [("PATH", ""), ("GIT_DIR", "/nonexistent")])
def test_a_commit_is_missing_without_git(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)

    assert commit() is None


def test_profile_mode_gives_the_devices_work_to_the_stage_that_asked_for_it() -> None:
    """The device queues work without delay; waiting for the work takes its time."""
    device = SimpleNamespace(now_s=0.0, pending_s=0.0, num_waits=0)

    def synchronise() -> None:
        device.num_waits += 1
        device.now_s, device.pending_s = device.now_s + device.pending_s, 0.0

    clock = StageClock(synchronise=synchronise, now=lambda: device.now_s)
    clock.enter("clip")
    device.pending_s = 2.0
    clock.enter("forward")
    clock.stop()

    assert (clock.seconds["clip"], clock.seconds["forward"], device.num_waits) == (2.0, 0.0, 3)


def test_stages_add_up_to_the_time_of_a_run() -> None:
    captioner = Captioner.load(**model_options(), batch_size=4)
    num_ticks = 0

    def tick() -> float:
        nonlocal num_ticks
        num_ticks += 1
        return float(num_ticks)

    clock = StageClock(now=tick)
    captioner.generate(sorted(PICTURES.iterdir()), max_new_tokens=8, clock=clock)

    assert sum(clock.seconds.values()) == num_ticks - 1
    assert all(clock.seconds[stage] > 0 for stage in STAGES)


@pytest.mark.parametrize(
    ("times", "fraction", "expected"), [([12.3], 0.5, 12.3), ([0.0, 1.0, 5.0], 0.5, 1.0), ([0.0, 5.0], 1.0, 5.0)]
)
def test_percentiles_of_few_times(times: list[float], fraction: float, expected: float) -> None:
    assert percentile(times, fraction) == expected
