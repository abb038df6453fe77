"""What a training run is asked to do, as plain values: the one place of the defaults."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.training.choice import TrainingChoice

Parallel = Literal["ddp", "fsdp"]
ScoredBy = Literal["auto", "answers", "loss"]

# The highest learning rate of each kind of parameters, for a LLaMA of 4096 wide; a narrower one has higher ones.
LEARNING_RATES: Final[Mapping[str, float]] = {
    "queries": 1.5e-3,
    "gates": 1.5e-3,
    "norms": 1.5e-3,
    "biases": 1.5e-3,
    "LoRA factors": 3e-4,
    "visual blocks": 1.5e-4,
}
_WIDTH = 4096
_LEAST_STEPS, _FEWEST_EPOCHS, _MOST_EPOCHS = 300, 3, 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimisation:
    """How weights are changed. None stands for a default that depends on the sets of parameters or on the data."""

    epochs: float | None = None  # passes over the examples to learn
    batch_size: int = 16  # examples of one step, of all ranks together
    rows: int | None = None  # examples that a device computes at once; None: the batch, divided by the ranks
    lr: float | None = None  # the highest one
    warmup: float = 0.05  # share of the steps over which the rate rises from 0
    final_lr: float = 0.0  # share of the highest rate at the last step
    weight_decay: float = 0.02
    max_norm: float = 1.0  # largest norm of the gradient; 0: any
    skip: int = 10  # steps with a loss or gradient that is not finite before the run stops

    def __post_init__(self) -> None:
        for name in ("batch_size", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("epochs", "lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, got {value}")
        for name in ("weight_decay", "max_norm", "skip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("warmup", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {getattr(self, name)}")

    def rate(self, kinds: Collection[str], *, width: int) -> float:
        """The highest learning rate of these kinds of parameters in a LLaMA of a width."""
        if self.lr is not None:
            return self.lr
        return float(f"{max(LEARNING_RATES[kind] for kind in kinds) * _WIDTH / width:.2g}")

    def step_size(self, num_examples: int) -> int:
        """Examples of a step, of so many to learn."""
        return min(self.batch_size, num_examples)

    def num_steps(self, num_examples: int) -> int:
        """Steps of the whole run; by default of 3 epochs, or of more if these are fewer than 300 steps."""
        each = math.ceil(num_examples / self.batch_size)
        if self.epochs is not None:
            return max(1, round(self.epochs * each))
        return each * min(max(math.ceil(_LEAST_STEPS / each), _FEWEST_EPOCHS), _MOST_EPOCHS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """Data, model, what is trained and where results go. Raises ValueError for values out of range."""

    data: tuple[str, ...]
    out: str  # the .pth file
    spec: CaptionerSpec = field(default_factory=CaptionerSpec)
    choice: TrainingChoice = field(default_factory=TrainingChoice)
    question: str | None = None  # of examples without one
    pictures: str | None = None  # folder of the pictures of known sets
    validation: float = 0.1  # share of the pictures that early stopping looks at
    test: float = 0.1  # share of the pictures that the scores of the results are about
    most_unreadable: float = 0.1  # share of the pictures that may be unreadable
    optimisation: Optimisation = field(default_factory=Optimisation)
    seed: int = 0
    checkpointing: bool = False  # compute activations again in the backward pass, layer by layer
    evaluate_every: int | None = None  # steps; None: an epoch, and at most 20 times in a run
    patience: int = 5  # evaluations without improvement before the run ends; 0: it never ends early
    save_every_s: float = 300.0
    cache: str | None = None  # folder of encoded pictures; None: the user's cache folder
    score: ScoredBy = "auto"  # what early stopping looks at; auto: answers, unless the model is large
    parallel: Parallel = "ddp"  # of several ranks: each has the whole model, or a part of each parameter
    timeout_s: float = 1800.0  # that a rank waits for the others
    resume: bool = False
    force: bool = False
    bundle: bool = False  # write a bundle too; where the base was a bundle one is written anyway
    quiet: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # as a file has them, for `settings.yaml`

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data must name at least one table, folder or archive")
        if not self.out.endswith(".pth") or self.out == ".pth":
            raise ValueError(f"out must be the name of a .pth file, got {self.out!r}")
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise ValueError(
                f"validation and test are shares of the pictures, and leave some to learn: got {self.validation} and "
                f"{self.test}"
            )
        if not 0 <= self.most_unreadable <= 1:
            raise ValueError(f"most_unreadable must lie in 0..1, got {self.most_unreadable}")
        if self.evaluate_every is not None and self.evaluate_every < 1:
            raise ValueError(f"evaluate_every must be at least 1, got {self.evaluate_every}")
        for name in ("seed", "patience"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not (self.save_every_s > 0 and self.timeout_s > 0):
            raise ValueError("save_every_s and timeout_s must be seconds above 0")
        if self.resume and self.force:
            raise ValueError("resume and force exclude each other: go on with an earlier run, or replace it")

    @property
    def lr(self) -> float:
        """The highest learning rate; the run fills it in where none is given."""
        assert self.optimisation.lr is not None, "the width of the model is known"
        return self.optimisation.lr

    def rate_factor(self, kind: str) -> float:
        """Factor on the learning rate of a kind of parameters: 1 for the kind with the highest one."""
        return LEARNING_RATES[kind] / max(LEARNING_RATES[one] for one in self.choice.kinds)

    def with_rate(self, *, width: int) -> "TrainJob":
        """The job with its learning rate, for a LLaMA of a width."""
        rate = self.optimisation.rate(self.choice.kinds, width=width)
        return replace(self, optimisation=replace(self.optimisation, lr=rate))
