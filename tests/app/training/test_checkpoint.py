"""What a run remembers about its evaluations: the best one, and when to stop early."""

import math

from llama_adapter.app.training.checkpoint import LoopState


def judged(state: LoopState, *evaluations: tuple[float, float]) -> list[tuple[bool, int]]:
    """For each evaluation (score, loss): whether it is the best so far, and the number of worse ones in a row."""
    found = []
    for score, loss in evaluations:
        state.step += 10
        found.append((state.judge([score, -loss], loss), state.num_worse))
    return found


def test_a_run_goes_on_while_score_or_loss_improves() -> None:
    state = LoopState()
    # The model first gives one answer to everything, which is right less often than chance; only the loss falls.
    falling = judged(state, (0.14, 12.0), (0.10, 3.0), (0.10, 2.5), (0.10, 2.0))
    assert falling == [(True, 0), (False, 0), (False, 0), (False, 0)]
    assert state.best_step == 10
    assert judged(state, (0.10, 2.1), (0.12, math.nan)) == [(False, 1), (False, 2)]
    assert judged(state, (0.60, 2.2), (0.55, 2.3)) == [(True, 0), (False, 1)]
    assert (state.best, state.best_step, state.least_loss) == ([0.60, -2.2], 70, 2.0)
