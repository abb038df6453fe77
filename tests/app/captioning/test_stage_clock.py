"""Device times by stage are read from marks, without waiting for the device at each boundary."""

from dataclasses import dataclass

import pytest

from llama_adapter.app.captioning.stage_clock import StageClock


@dataclass
class FakeDevice:
    """A queue with `step_ms` between marks; it counts the reads of marks."""

    step_ms: float = 2.0
    num_marks: int = 0
    num_reads: int = 0
    last_read: int = 0  # the newest mark that was read

    def mark(self) -> "FakeMark":
        self.num_marks += 1
        return FakeMark(self, at_ms=self.num_marks * self.step_ms)


@dataclass
class FakeMark:
    device: FakeDevice
    at_ms: float

    def ms_since(self, earlier: "FakeMark") -> float:
        self.device.num_reads += 1
        self.device.last_read = round(self.at_ms / self.device.step_ms)
        return self.at_ms - earlier.at_ms


def test_device_time_belongs_to_the_stage_that_begins_at_a_mark_and_none_to_pauses() -> None:
    clock = StageClock(mark=FakeDevice().mark)
    for stage in ("clip", "forward", "post", "forward"):
        clock.enter(stage)
    clock.stop()

    for factor in (1, 2):  # the time until the next run belongs to no stage
        device_seconds = clock.read_device_seconds()
        assert device_seconds is not None
        assert {stage: s for stage, s in device_seconds.items() if s} == pytest.approx(
            {"clip": 0.002 * factor, "forward": 0.004, "post": 0.002}
        )
        clock.enter("clip")
        clock.stop()


def test_marks_are_not_read_at_every_boundary_and_do_not_pile_up() -> None:
    device = FakeDevice()
    clock = StageClock(mark=device.mark)
    for number in range(100):
        clock.enter("forward" if number % 2 else "post")
    assert device.num_reads == 0

    for number in range(5000):
        clock.enter("forward" if number % 2 else "post")
        assert device.num_marks - device.last_read >= 200 or not device.num_reads  # recent ones are not waited for
    assert device.num_reads > 4000
    clock.stop()
    assert clock.read_device_seconds() is not None
    assert sum(clock.read_device_seconds().values()) == pytest.approx((device.num_marks - 1) * 0.002)


def test_a_host_that_computes_itself_has_no_device_time() -> None:
    clock = StageClock(mark=lambda: None)
    clock.enter("clip")
    clock.stop()

    assert clock.read_device_seconds() is None
    assert StageClock().read_device_seconds() is None
