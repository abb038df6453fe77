"""What a run shows while it trains: the time left is that of the steps and evaluations to come."""

from types import SimpleNamespace

import pytest

from llama_adapter.app.jobs.progress import duration
from llama_adapter.app.learning.training import loop

SLOW = {1: 40.0, 2: 9.0, 71: 60.0}  # step -> seconds; the others take one
EVALUATION_S, EVERY, NUM_STEPS = 20.0, 40, 300


def test_the_time_left_is_right_from_the_fifth_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither evaluations nor checkpoints, neither the first steps nor a single slow one distort it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = loop.TrainProgress(visible=False, num_steps=NUM_STEPS, every=EVERY)
    progress.resume(is_evaluated=False)
    clock.now += EVALUATION_S
    progress.resume(is_evaluated=True)
    for done in range(1, NUM_STEPS + 1):
        clock.now += SLOW.get(done, 1.0)
        progress.step(done, loss=1.0, lr=0.1, num_examples=2 if done % EVERY == 0 else 8)
        line = progress.line(done, lr=0.1)
        num_evaluations = sum(step % EVERY == 0 or step == NUM_STEPS for step in range(done, NUM_STEPS + 1))
        left = NUM_STEPS - done + num_evaluations * EVALUATION_S
        assert line.endswith(f", {duration(left)} left") if done >= 5 else "left" not in line, line
        assert progress.seconds == SLOW.get(done, 1.0)
        if done % EVERY == 0:
            clock.now += EVALUATION_S
            progress.resume(is_evaluated=True)
        elif done % 7 == 0:
            clock.now += 5.0  # a checkpoint
            progress.resume(is_evaluated=False)


def test_the_time_left_is_estimated_again_with_a_stage_of_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = loop.TrainProgress(visible=False, num_steps=100, every=None)
    for done in range(1, 51):
        clock.now += 20.0 if done > 40 else 1.0
        progress.step(done, loss=1.0, lr=0.1, num_examples=8)
        line = progress.line(done, lr=0.1)
        left = (100 - done) * (20 if done > 40 else 1)
        assert line.endswith(f", {duration(left)} left") if (done - 1) % 40 >= 4 else "left" not in line, line
        if done == 40:
            progress.begin_stage()


def test_without_evaluations_only_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock.now))
    progress = loop.TrainProgress(visible=False, num_steps=1000, every=None)
    progress.resume(is_evaluated=False)
    for done in range(1, 11):
        clock.now += 0.5
        progress.step(done, loss=1.0, lr=0.1, num_examples=8)
    assert progress.line(10, lr=0.1) == "step 10 of 1,000, loss 1.0000, lr 1.00e-01, 16.0 examples/s, 8 min 15 s left"
