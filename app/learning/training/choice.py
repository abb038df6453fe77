"""Which parameters are trained: named sets of kinds of parameters. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from llama_adapter.runtime.errors import UsageError

ParameterSet = Literal["bias", "lora", "adapter", "visual"]

# Set -> the kinds of parameters in it.
KINDS: dict[ParameterSet, tuple[str, ...]] = {
    "bias": ("queries", "gates", "norms", "biases", "visual blocks"),  # everything that a released BIAS adapter has
    "lora": ("LoRA factors",),
    "adapter": ("queries", "gates"),
    "visual": ("visual blocks",),
}
_MOST_RANK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingChoice:
    """The sets that are trained, and the sizes of new parameters.

    `clip` and the sizes from `num_queries` on apply to a LLaMA without adapter. An existing adapter has its own sizes.
    Raises UsageError for values out of range.
    """

    sets: tuple[ParameterSet, ...] = ("bias",)
    lora_rank: int = 16  # rank of new factors; factors of a file keep their rank
    clip: str | None = None  # path; if None, a LLaMA without adapter gets one for texts, as in LLaMA-Adapter V1
    num_queries: int = 10  # per adapter layer
    adapter_layers: int | None = None  # the last ones; None: all but the first
    visual_width: int = 768
    visual_depth: int = 8
    visual_heads: int = 16

    def __post_init__(self) -> None:
        unknown = [name for name in self.sets if name not in get_args(ParameterSet)]
        if unknown or not self.sets:
            known, found = ", ".join(get_args(ParameterSet)), ", ".join(unknown) or "none"
            raise UsageError(f"What is trained must be some of {known}, got {found}")
        for name in ("lora_rank", "num_queries", "visual_width", "visual_depth", "visual_heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.lora_rank > _MOST_RANK:
            raise UsageError(f"lora_rank must be at most {_MOST_RANK}, got {self.lora_rank}")
        if self.visual_width % self.visual_heads:
            raise UsageError(f"visual_width {self.visual_width} must be a multiple of visual_heads {self.visual_heads}")

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of parameters that are trained."""
        return frozenset(kind for name in self.sets for kind in KINDS[name])
