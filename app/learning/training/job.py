"""The description of a training run as plain values. All defaults are defined here."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.given import require_least
from llama_adapter.vision.config import QueryConfig

ParameterSet = Literal["bias", "lora", "adapter", "visual", "vision", "head"]

# Set -> the kinds of parameters in it.
KINDS: dict[ParameterSet, tuple[str, ...]] = {
    "bias": ("queries", "gates", "norms", "biases", "visual blocks"),  # everything that a released BIAS adapter has
    "lora": ("LoRA factors",),
    "adapter": ("queries", "gates"),
    "visual": ("visual blocks",),
    "vision": ("visual blocks", "picture tower"),
    "head": ("output head",),
}
_MOST_RANK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingChoice:
    """The sets that are trained, and the sizes of new parameters.

    `clip` and the sizes from `num_queries` on apply to a LLaMA without adapter. An existing adapter has its own sizes.
    Raises UsageError for values out of range.
    """

    sets: tuple[ParameterSet, ...] | None = None  # None: a run chooses by model and data, see `with_sets`
    lora_rank: int = 16  # rank of new factors; factors of a file keep their rank
    clip: str | None = None  # path; if None, a LLaMA without adapter gets one for texts, as in LLaMA-Adapter V1
    num_queries: int = 10  # per adapter layer
    adapter_layers: int | None = None  # the last ones; None: all but the first
    visual_width: int = 768
    visual_depth: int = 8
    visual_heads: int = 16

    def __post_init__(self) -> None:
        unknown = [name for name in self.sets or () if name not in get_args(ParameterSet)]
        if unknown or self.sets == ():
            known, found = ", ".join(get_args(ParameterSet)), ", ".join(unknown) or "none"
            raise UsageError(f"What is trained must be some of {known}, got {found}")
        for name in ("lora_rank", "num_queries", "visual_width", "visual_depth", "visual_heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lora_rank > _MOST_RANK:
            raise UsageError(f"lora_rank must be at most {_MOST_RANK}, got {self.lora_rank}")
        if self.visual_width % self.visual_heads:
            raise UsageError(f"visual_width {self.visual_width} must be a multiple of visual_heads {self.visual_heads}")

    def num_adapter_layers(self, num_layers: int) -> int:
        """Adapter layers of a new adapter for a LLaMA of `num_layers` layers."""
        return num_layers - 1 if self.adapter_layers is None else self.adapter_layers

    def query_config(self, *, output_dim: int) -> QueryConfig:
        """The sizes of new visual blocks."""
        return QueryConfig(
            num_queries=self.num_queries,
            width=self.visual_width,
            depth=self.visual_depth,
            num_heads=self.visual_heads,
            mlp_dim=4 * self.visual_width,
            output_dim=output_dim,
        )

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of parameters that are trained."""
        return frozenset(kind for name in self.known_sets for kind in KINDS[name])

    @property
    def known_sets(self) -> tuple[ParameterSet, ...]:
        """The sets, which the run has chosen if they were not given: `bias` before that."""
        return ("bias",) if self.sets is None else self.sets


Parallel = Literal["ddp", "fsdp"]  # how ranks share the work
ScoredBy = Literal["auto", "answers", "loss"]

# The peak learning rate for each kind of parameters, for a LLaMA of width 4096. Narrower models use higher rates.
LEARNING_RATES: Final[Mapping[str, float]] = {
    "queries": 1.5e-3,
    "gates": 1.5e-3,
    "norms": 1.5e-3,
    "biases": 1.5e-3,
    "LoRA factors": 3e-4,
    "visual blocks": 1.5e-4,
    "picture tower": 5e-5,
    "output head": 5e-4,
}
_WIDTH = 4096
_FEWEST_EPOCHS, _MOST_EPOCHS = 3, 200
_STEPS_OVER_TRAINED_EYE = 240  # its visual queries are clear, so the decoder needs fewer steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimisation:
    """Parameters of the optimisation. None means a default that depends on the sets of parameters or on the data."""

    epochs: float | None = None  # passes over the training examples
    least_steps: int = 300  # if `epochs` is None
    batch_size: int = 16  # examples per step, over all ranks
    rows: int | None = None  # examples that a device computes at once; None: the batch divided by the number of ranks
    lr: float | None = None  # peak learning rate
    warmup: float = 0.05  # share of the steps in which the rate rises from 0 to its peak
    final_lr: float = 0.0  # rate at the last step, as a share of the peak
    tower_epochs: int | None = None  # passes in which a small picture tower learns; None: by the number of pictures
    weight_decay: float = 0.02
    max_norm: float = 1.0  # gradients with a larger norm are clipped to it; 0: no clipping
    skip: int = 10  # the run fails after more than this many steps whose loss or gradient is not finite

    def __post_init__(self) -> None:
        require_least(self, "batch_size", "rows")
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
        """The peak learning rate for these kinds of parameters in a LLaMA of this width."""
        if self.lr is not None:
            return self.lr
        return float(f"{max(LEARNING_RATES[kind] for kind in kinds) * _WIDTH / width:.2g}")

    def step_size(self, num_examples: int) -> int:
        """Examples per step, if there are `num_examples` to learn."""
        return min(self.batch_size, num_examples)

    def num_steps(self, num_examples: int) -> int:
        """Steps of the whole run. By default 3 epochs, or more if these are fewer than `least_steps`."""
        each = math.ceil(num_examples / self.batch_size)
        if self.epochs is not None:
            return max(1, round(self.epochs * each))
        return each * min(max(math.ceil(self.least_steps / each), _FEWEST_EPOCHS), _MOST_EPOCHS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """Data, model, trained parameters and output files of a run. Raises ValueError for values out of range."""

    data: tuple[str, ...]
    out: str  # the .pth file
    spec: CaptionerSpec = field(default_factory=CaptionerSpec)
    choice: TrainingChoice = field(default_factory=TrainingChoice)
    question: str | None = None  # the question for examples that have none
    pictures: str | None = None  # folder of the pictures that tables and known sets name
    sample_fields: tuple[str, ...] | None = None  # of archives: the field of the picture, and that of the text
    validation: float = 0.1  # share of the pictures used for early stopping
    test: float = 0.1  # share of the pictures used for the final scores
    most_unreadable: float = 0.1  # share of the pictures that may be unreadable
    optimisation: Optimisation = field(default_factory=Optimisation)
    seed: int = 0
    checkpointing: bool = False  # compute activations again in the backward pass, layer by layer
    evaluate_every: int | None = None  # steps; None: once per epoch, and at most 20 times in a run
    keeps_last: bool = False  # the last weights are the results, and are evaluated once; a run sets it
    patience: int = 5  # evaluations without improvement before the run ends; 0: it never ends early
    save_every_s: float = 300.0
    cache: str | None = None  # folder of encoded pictures; None: the user's cache folder
    score: ScoredBy = "auto"  # measure for early stopping; auto: answers, unless the model is large
    parallel: Parallel = "ddp"  # with several ranks: each has the whole model (ddp), or a part of each parameter (fsdp)
    timeout_s: float = 1800.0  # how long a rank waits for the others
    resume: bool = False
    force: bool = False
    bundle: bool = False  # write a bundle too; if the base model is a bundle, one is always written
    quiet: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # as in a settings file, for `settings.yaml`

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("data must name at least one table, folder or archive")
        if not self.out.endswith(".pth") or self.out == ".pth":
            raise ValueError(f"out must be the name of a .pth file, got {self.out!r}")
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise ValueError(
                f"validation and test are shares that leave some to learn, got {self.validation} and {self.test}"
            )
        if not 0 <= self.most_unreadable <= 1:
            raise ValueError(f"most_unreadable must lie in 0..1, got {self.most_unreadable}")
        require_least(self, "evaluate_every")
        require_least(self, "seed", "patience", least=0)
        if self.seed >= 2**32:  # a generator's seed has the number of the step in its lower half
            raise ValueError(f"seed must be below 2 ** 32, got {self.seed}")
        if not (self.save_every_s > 0 and self.timeout_s > 0):
            raise ValueError("save_every_s and timeout_s must be seconds above 0")
        if self.resume and self.force:
            raise ValueError("resume and force exclude each other: go on with an earlier run, or replace it")

    @property
    def folder(self) -> Path:
        """The run's folder, next to `out`."""
        return Path(self.out).with_suffix(".training")

    @property
    def lr(self) -> float:
        """The peak learning rate; the run sets it with `with_rate`."""
        assert self.optimisation.lr is not None, "the width of the model is known"
        return self.optimisation.lr

    def rate_at(self, step: int, *, num_steps: int) -> float:
        """The learning rate of a step from 0: a linear rise, then a cosine (Loshchilov and Hutter, 2017)."""
        optimisation = self.optimisation
        num_warm = round(optimisation.warmup * num_steps)
        if step < num_warm:
            return self.lr * (step + 1) / num_warm
        share = min((step - num_warm) / max(num_steps - num_warm, 1), 1.0)
        return self.lr * (optimisation.final_lr + (1 - optimisation.final_lr) * 0.5 * (1 + math.cos(math.pi * share)))

    def rate_factor(self, kind: str) -> float:
        """Factor on the learning rate for a kind of parameters: 1 for the kind with the highest rate."""
        return LEARNING_RATES[kind] / max(LEARNING_RATES[one] for one in self.choice.kinds)

    def with_sets(self, *, learns_tower: bool) -> "TrainJob":
        """The job with its sets chosen if they were not given: `bias`, and `vision` and `head` if the tower learns."""
        if self.choice.sets is not None:
            return self
        sets: tuple[ParameterSet, ...] = ("bias", "vision", "head") if learns_tower else ("bias",)
        return replace(self, choice=replace(self.choice, sets=sets))

    def with_trained_eye(self) -> "TrainJob":
        """The job if an encoder of classes is trained before the other parameters.

        These then need fewer steps. They learn from the encoder and not from the few right answers, so they get no
        worse by learning, and scores of few validation examples say less than that: the last weights are kept.
        """
        optimisation = replace(self.optimisation, least_steps=_STEPS_OVER_TRAINED_EYE)
        return replace(self, optimisation=optimisation, keeps_last=self.evaluate_every is None)

    def with_rate(self, *, width: int) -> "TrainJob":
        """The job with its learning rate set, for a LLaMA of this width."""
        rate = self.optimisation.rate(self.choice.kinds, width=width)
        return replace(self, optimisation=replace(self.optimisation, lr=rate))
