"""The training loop: steps, evaluations, checkpoints and early stopping.

A run that was interrupted and resumed gives bit-identical results.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from llama_adapter.app.jobs.interruption import Interruption
from llama_adapter.app.jobs.progress import StatusLine, duration
from llama_adapter.app.learning.training import checkpoint
from llama_adapter.app.learning.training.batches import Feeder
from llama_adapter.app.learning.training.checkpoint import BEST, LAST, LoopState, TrainingError
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.ranks import Distributed, OneRank
from llama_adapter.app.learning.training.run_log import RunLog
from llama_adapter.app.learning.training.scoring import Validation
from llama_adapter.app.learning.training.stepping import STEP, NamedAdamW, Step, Stepper
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_name

_TERMINAL_S, _ELSEWHERE_S = 0.5, 30.0
_WINDOW: Final = 50  # the rate and the time left are measured over this many steps
_SLOW: Final = 2  # the first steps, which take longer than others
_LEAST_STEPS: Final = 5  # before the time left is shown
_SMOOTH: Final = 0.95
_MOST_NAMED: Final = 5


class TrainProgress(StatusLine):
    """Shows step, loss, learning rate, examples per second and the time left."""

    def __init__(self, *, visible: bool, num_steps: int, every: int | None) -> None:
        """`every` is the number of steps between evaluations; None: there are none."""
        super().__init__(visible=visible, terminal_s=_TERMINAL_S, elsewhere_s=_ELSEWHERE_S)
        self._num_steps, self._every = num_steps, every
        self._took: deque[tuple[float, int]] = deque(maxlen=_WINDOW)  # seconds and examples of the last steps
        self._began, self._count, self._evaluation_s, self._loss = self._shown_at, 0, 0.0, float("nan")

    @property
    def rate(self) -> float:
        """Examples per second over the last steps, without other work."""
        seconds = sum(one for one, _ in self._took)
        return sum(count for _, count in self._took) / seconds if seconds > 0 else 0.0

    @property
    def seconds(self) -> float:
        """Duration of the last step."""
        return self._took[-1][0] if self._took else 0.0

    def begin_stage(self) -> None:
        """Forget the duration of the steps so far, because those to come take another time."""
        self._count = 0

    def resume(self, *, is_evaluated: bool) -> None:
        """Begin the next step after other work, which was an evaluation or not. Its time does not count for steps."""
        now = time.monotonic()
        if is_evaluated:
            self._evaluation_s = now - self._began
        self._began = now

    def step(self, done: int, *, loss: float, lr: float, num_examples: int) -> None:
        """Count a step; prints the line from time to time."""
        now = time.monotonic()
        if self._count <= _SLOW:  # only the last one of these counts
            self._took.clear()
        self._took.append((now - self._began, num_examples))
        self._began, self._count = now, self._count + 1
        if loss == loss:
            self._loss = loss if self._loss != self._loss else _SMOOTH * self._loss + (1 - _SMOOTH) * loss
        if self._is_due(now):
            self._put(self.line(done, lr=lr))

    def line(self, done: int, *, lr: float) -> str:
        """The line after a step."""
        parts = [f"step {done:,} of {self._num_steps:,}", f"loss {self._loss:.4f}", f"lr {lr:.2e}"]
        if self.rate > 0:
            parts.append(f"{self.rate:.1f} examples/s")
        if self._count >= _LEAST_STEPS:
            parts.append(f"{duration(self._left(done))} left")
        return ", ".join(parts)

    def _left(self, done: int) -> float:
        """Seconds for the steps after `done`, and for the evaluations from `done` on."""
        left = (self._num_steps - done) * statistics.median(seconds for seconds, _ in self._took)
        if self._every is None:
            return left
        num_evaluations = -(-self._num_steps // self._every) - (done - 1) // self._every
        return left + num_evaluations * self._evaluation_s

    def say(self, line: str) -> None:
        """Print a line that is not replaced."""
        self.clear()
        if self._is_visible:
            say(line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended."""

    state: LoopState
    why: str  # "", "early": the score did not improve, or "interrupted"


class Loop:
    """The training loop of this rank. Only the first rank writes files."""

    def __init__(
        self,
        distributed: Distributed,
        *,
        job: TrainJob,
        run: str,
        feeder: Feeder,
        validate: Callable[[], Validation] | None,
        ranks: OneRank,
        interruption: Interruption,
    ) -> None:
        """`run` is the digest of everything the steps depend on.

        If the job keeps the last weights, or there is no `validate`, they count as the best.
        """
        self._distributed, self._job, self._folder, self._feeder = distributed, job, job.folder, feeder
        self._validate, self._ranks, self._interruption = validate, ranks, interruption
        self._keeps_last = validate is None or job.keeps_last
        self._every = job.evaluate_every or max(feeder.steps_per_epoch, -(-feeder.num_steps // 20))
        if job.keeps_last:
            self._every = feeder.num_steps
        self._progress = TrainProgress(
            visible=ranks.is_first and not job.quiet,
            num_steps=feeder.num_steps,
            every=None if validate is None else self._every,
        )
        model = distributed.model
        self._optimiser = NamedAdamW(
            model.trained(),
            no_decay=model.no_decay(),
            weight_decay=job.optimisation.weight_decay,
            factor_of=lambda name: job.rate_factor(model.kind_of(name)),
        )
        self._stepper = Stepper(distributed, self._optimiser, ranks=ranks, clip=job.optimisation.max_norm)
        self._state = LoopState(num_steps=feeder.num_steps, run=run)

    def resume(self) -> None:
        """Continue from the last checkpoint. The best one is checked too, since the results are written from it.

        Raises CheckpointError, and UsageError if a checkpoint is from a run with other settings or data.
        """
        weights = checkpoint.weight_shapes(self._distributed.model.trained())
        checkpoint.check_tensors(self._read(BEST)[0], weights, path=self._folder / BEST)
        tensors, state = self._read(LAST)
        has_moments = any(name.startswith(STEP) for name in tensors)  # none if no step changed the weights
        moments = self._optimiser.shapes() if has_moments else {}
        checkpoint.check_tensors(tensors, weights | moments, path=self._folder / LAST)
        self._distributed.load(checkpoint.weights_of(tensors))
        if has_moments:
            self._optimiser.load_state(tensors)
        if state.scaler:
            self._stepper.scaler.load_state_dict(state.scaler)
        self._state = state
        path = shown_name(str(self._folder / LAST))
        self._progress.say(f"goes on after step {state.step:,} of {state.num_steps:,}, from `{path}`")

    def _read(self, name: str) -> tuple[dict[str, torch.Tensor], LoopState]:
        """A checkpoint of this run; its tensors are not checked. Raises the errors of `resume`."""
        tensors, state = checkpoint.read_checkpoint(self._folder / name)
        if state.run != self._state.run or state.num_steps != self._state.num_steps:
            raise checkpoint.other_run(self._folder)
        return tensors, state

    def run(self) -> Ended:
        """Train to the end. Raises TrainingError if too many steps are not finite, and OSError."""
        state, log = self._state, None
        if self._ranks.is_first:
            log = RunLog(self._folder, from_step=state.step)
        started, before_s, saved_at = time.monotonic(), state.elapsed_s, time.monotonic()
        patience = self._job.patience
        why = "early" if patience and state.num_worse >= patience else ""  # the resumed run had ended
        try:
            self._progress.resume(is_evaluated=False)
            if state.step == 0 and self._validate is not None and not self._keeps_last:
                self._log(log, validation=self._evaluate())
                self._progress.resume(is_evaluated=True)
            while state.step < state.num_steps and not why:
                done = self._step(log)
                state.elapsed_s = before_s + time.monotonic() - started
                is_end = state.step == state.num_steps
                is_evaluated = False
                if done.asked_to_end:
                    why = "interrupted"
                elif self._validate is not None and (state.step % self._every == 0 or is_end):
                    self._log(log, validation=self._evaluate())
                    is_evaluated = True
                    if patience and state.num_worse >= patience:
                        why = "early"
                is_due = time.monotonic() - saved_at > self._job.save_every_s
                if self._agree(is_due) or is_evaluated or is_end or why:
                    self._save()
                    saved_at = time.monotonic()
                    self._progress.resume(is_evaluated=is_evaluated)
        finally:
            self._progress.clear()
            if log is not None:
                log.close()
        return Ended(state=state, why=why)

    def _agree(self, wanted: bool) -> bool:
        """The first rank's decision on all ranks. Ranks save together, because parameters may be divided among them."""
        if self._ranks.size == 1:
            return wanted
        return bool(self._ranks.sum(torch.tensor([float(wanted and self._ranks.is_first)])).item())

    def _step(self, log: RunLog | None) -> Step:
        state = self._state
        lr = self._job.rate_at(state.step, num_steps=state.num_steps)
        torch.manual_seed((self._job.seed << 32) + state.step)
        parts = self._feeder.at(state.step)
        num_labels, num_tokens, num_examples = self._feeder.counts(state.step)
        with self._ranks.failing():
            done = self._stepper.step(parts, num_labels=num_labels, lr=lr, ask_to_end=self._interruption.is_asked)
        state.step += 1
        state.num_examples += num_examples
        if not done.is_done and not done.is_overflow:
            self._skipped(done)
        self._progress.step(state.step, loss=done.loss, lr=lr, num_examples=num_examples)
        if log is not None:
            log.add(
                state.step,
                {
                    "epoch": state.step / self._feeder.steps_per_epoch,
                    "loss": done.loss if done.is_done else None,
                    "lr": lr,
                    "gradient_norm": done.gradient_norm,
                    "examples_per_s": self._progress.rate,
                    "tokens": num_tokens,
                    "seconds": self._progress.seconds,
                },
            )
        return done

    def _skipped(self, done: Step) -> None:
        state = self._state
        state.skipped.append(state.step)
        named = ", ".join(done.odd[:_MOST_NAMED]) + (", ..." if len(done.odd) > _MOST_NAMED else "")
        what = f"the loss of {named} is not finite" if done.odd else "the loss or a gradient is not finite"
        self._progress.clear()
        if done.odd or self._ranks.is_first:
            say(f"step {state.step:,} is skipped: {what}")
        if len(state.skipped) > self._job.optimisation.skip:
            self._save()
            raise TrainingError(
                f"{len(state.skipped):,} steps had a loss or gradient that is not finite; in the last one {what}",
                hint="try a smaller --lr, or --dtype float32 or bfloat16; look at the examples that are named",
            )

    def _evaluate(self) -> Validation:
        assert self._validate is not None, "there is something to validate with"
        found = self._validate()
        if self._state.judge(found.key, found.loss):
            self._write(BEST, self._weights())
        return found

    def _log(self, log: RunLog | None, *, validation: Validation) -> None:
        state = self._state
        if log is not None:
            log.add(state.step, {"validation_loss": validation.loss, "validation_score": validation.score})
        shown = "" if validation.score is None else f", {validation.measure} {validation.score:.4f}"
        loss = float("nan") if validation.loss is None else validation.loss
        best = "" if state.best_step != state.step else " (best so far)"
        self._progress.say(f"after step {state.step:,}: validation loss {loss:.4f}{shown}{best}")

    def _weights(self) -> dict[str, torch.Tensor]:
        whole = self._distributed.whole(self._distributed.model.trained())
        return {f"{checkpoint.WEIGHT}{name}": tensor for name, tensor in whole.items()}

    def _save(self) -> None:
        moments = self._distributed.whole(self._optimiser.state())
        self._state.scaler = self._stepper.scaler.state_dict()
        weights = self._weights()
        if self._keeps_last:
            self._state.best_step = self._state.step
            self._write(BEST, weights)  # first: a run resumes only if it has both
        self._write(LAST, {**weights, **moments})

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        if not self._ranks.is_first:
            return
        try:
            checkpoint.write_checkpoint(self._folder / name, tensors, self._state)
        except OSError as error:
            kept = (self._folder / LAST).is_file()
            raise TrainingError(
                f"The checkpoint `{shown_name(str(self._folder / name))}` cannot be written: {error.strerror or error}",
                hint="make room on the disk, and go on from the checkpoint before it with --resume"
                if kept
                else "make room on the disk, or name another --out",
            ) from error
