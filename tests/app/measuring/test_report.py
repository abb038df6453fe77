"""Stage times, counts and circumstances end up in the report as they were measured."""

import json
import subprocess
import time
from dataclasses import dataclass, field

import pytest

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.stage_clock import STAGES, StageClock
from llama_adapter.app.measuring import report as report_module
from llama_adapter.app.measuring.report import Report, Tally, commit, make_report, numbers, versions
from tests.app.golden import PICTURES, model_options


@dataclass(frozen=True)
class FakeAnswer:
    num_tokens: int = 3
    total_ms: float = 1.0
    error: object | None = None

    @property
    def token_ids(self) -> list[int]:
        return [0] * self.num_tokens

    @property
    def ms(self) -> dict[str, float]:
        return {"total": self.total_ms}


@dataclass(frozen=True)
class FakeModel:
    name: str = "toy"
    digest: str = "d" * 64
    device: str = "cpu"
    dtype: str = "float32"
    precision: str = "float"
    vision: str = "torch"
    mode: str = "eager"
    operators: str = "aten"


def tally_of(*answers: FakeAnswer) -> Tally:
    tally = Tally()
    for answer in answers:
        tally.add(answer)
    return tally


def report_of(tally: Tally, *, stages_s: dict[str, float], wall_s: float) -> Report:
    return make_report(tally, stages_s=stages_s, wall_s=wall_s, model=FakeModel(), batch_size=4, synchronised=True)


def test_rates_are_counts_by_wall_time() -> None:
    tally = tally_of(FakeAnswer(num_tokens=6), FakeAnswer(num_tokens=2), FakeAnswer(error="empty"))

    report = report_of(tally, stages_s={"read": 0.5, "forward": 1.5}, wall_s=2.0)

    assert (report.num_pictures, report.num_failed, report.num_tokens) == (2, 1, 8)
    assert (report.pictures_per_s, report.tokens_per_s, report.tokens_per_picture) == (1.0, 4.0, 4.0)


def test_latency_is_given_at_nearest_ranks() -> None:
    tally = tally_of(*(FakeAnswer(total_ms=float(ms)) for ms in range(100, 0, -1)))

    report = report_of(tally, stages_s={"read": 1.0}, wall_s=1.0)

    assert (report.latency_p50_ms, report.latency_p95_ms) == pytest.approx((50.0, 95.0), rel=0.005)


def test_one_answer_is_both_percentiles() -> None:
    report = report_of(tally_of(FakeAnswer(total_ms=7.0)), stages_s={"read": 1.0}, wall_s=1.0)

    assert (report.latency_p50_ms, report.latency_p95_ms) == (7.0, 7.0)


def test_the_longest_stage_bounds_the_run() -> None:
    report = report_of(tally_of(FakeAnswer()), stages_s={"clip": 1.0, "forward": 2.0, "read": 1.0}, wall_s=4.0)

    assert report.bound_by == ("forward", 0.5)
    assert "bound by: forward (50% of the time)" in report.format_table()


def test_a_run_without_answers_has_a_report() -> None:
    report = report_of(Tally(), stages_s=dict.fromkeys(STAGES, 0.0), wall_s=0.0)

    assert report.bound_by is None
    assert report.latency_p50_ms is None
    assert "0 pictures in 0.000 s" in report.format_table()
    json.dumps(report.to_dict(), allow_nan=False)


def test_json_and_table_state_the_circumstances() -> None:
    report = report_of(tally_of(FakeAnswer()), stages_s={"read": 1.0}, wall_s=1.0)

    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["device"] == "cpu"
    assert values["batch_size"] == 4
    assert values["num_warm_up_pictures"] == 0
    assert values["bound_by"] == {"stage": "read", "share": 1.0}
    assert {"python", "torch"} <= values["versions"].keys()
    table = report.format_table()
    for fact in (
        "cpu, float32, eager (aten), encoder by torch, batch size 4",
        "warm-up 0 pictures",
        "model toy dddddddddddd",
        "python 3.",
        "torch 2.",
    ):
        assert fact in table


def test_numbers_are_named_with_8_bits_where_weights_have_them() -> None:
    assert numbers("float32", "float") == "float32"
    assert numbers("bfloat16", "int8") == "int8 and bfloat16"


def test_versions_are_those_that_are_imported() -> None:
    import torch

    assert versions()["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_a_commit_is_missing_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*arguments: object, **options: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(report_module.subprocess, "run", no_git)

    assert commit() is None


def test_a_commit_is_missing_where_git_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **options: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(report_module.subprocess, "run", failing)

    assert commit() is None


@dataclass
class FakeDevice:
    """Work is handed over at once and done only when waited for."""

    num_waits: int = 0
    pending_s: list[float] = field(default_factory=list)

    def synchronise(self) -> None:
        self.num_waits += 1
        while self.pending_s:
            time.sleep(self.pending_s.pop())


def test_profile_mode_gives_the_devices_work_to_the_stage_that_asked_for_it() -> None:
    device = FakeDevice()
    clock = StageClock(synchronise=device.synchronise)

    clock.enter("clip")
    device.pending_s.append(0.02)
    clock.enter("forward")
    clock.stop()

    assert clock.seconds["clip"] >= 0.02
    assert clock.seconds["forward"] < clock.seconds["clip"]
    assert device.num_waits == 3


def test_stages_add_up_to_the_wall_time_of_a_run() -> None:
    captioner = Captioner.load(**model_options(), batch_size=4)
    pictures = sorted(PICTURES.iterdir())
    captioner.generate(pictures[:4], max_new_tokens=4)

    def missed_share() -> float:
        clock = captioner.profile_clock()
        started = time.perf_counter()
        captioner.generate(pictures, max_new_tokens=32, clock=clock)
        wall_s = time.perf_counter() - started
        assert clock.total <= wall_s
        assert clock.total == pytest.approx(sum(clock.seconds.values()))
        assert all(clock.seconds[stage] > 0 for stage in STAGES)
        return (wall_s - clock.total) / wall_s

    # The machine may be busy with something else just between the two clocks: the best of a few counts.
    assert min(missed_share() for _ in range(3)) < 0.02
