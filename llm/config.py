"""Settings of the language half: the decoder's sizes, and how the engine runs it."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from llama_adapter.llm.past import PastKeyValues
from llama_adapter.runtime.schemes import OperatorChoice

_MAY_BE_ZERO = ("num_adapter_layers", "num_queries")  # zero in a LLaMA without adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes of a LLaMA decoder with zero-init gated adapter attention in its last `num_adapter_layers` layers."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float = 10000.0
    context: int = 512  # tokens of one sequence: past, prompt and answer together
    num_adapter_layers: int = 0
    num_queries: int = 0
    # True if LoRA is merged into the token projections: the adapter then has K/V weights of its own, without LoRA.
    separate_adapter_kv: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(f"dim {self.dim} must be num_heads {self.num_heads} times an even number")
        if self.num_adapter_layers > self.num_layers:
            raise ValueError(f"num_adapter_layers {self.num_adapter_layers} must lie in 0..{self.num_layers}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def first_adapter_layer(self) -> int:
        """Index of the first layer that attends to the picture."""
        return self.num_layers - self.num_adapter_layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored in a bundle's manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """Inverse of `to_dict`. Raises TypeError for unknown or missing fields, ValueError for bad values."""
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a decoder runs. The loader, the memory plan, the runner and the engine read the same one."""

    decoder: DecoderConfig
    dtype: Any  # torch's or numpy's, of weights, keys, values and activations; int8 weights keep their own
    num_slots: int = 1  # most rows that run at once
    mode: str = "eager"  # or a graph mode of the device, as `resolve_mode` returns it
    operators: OperatorChoice = "auto"
    max_prefill_tokens: int = 8192  # of one padded prefill, unless a single prompt is longer
    past: PastKeyValues | None = field(default=None, compare=False, repr=False)  # in front of every prompt

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {self.num_slots}")

    @property
    def context(self) -> int:
        """Tokens of one sequence, prompt and answer together."""
        return self.decoder.context - self.past_length

    @property
    def past_length(self) -> int:
        """Tokens in front of every prompt. Position 0 of a plan is this position of the decoder."""
        return 0 if self.past is None else len(self.past)


def _check_numbers(config: DecoderConfig) -> None:
    """Raise ValueError unless every field has its type, integers are at least 1 and floats finite and above 0."""
    for one in fields(config):
        kind: Any = one.type
        value = getattr(config, one.name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{one.name} must be of type {kind.__name__}, got {value!r}")
        least = 0 if one.name in _MAY_BE_ZERO else 1
        if kind is int and value < least:
            raise ValueError(f"{one.name} must be at least {least}, got {value}")
        if kind is float and not 0 < value <= sys.float_info.max:
            raise ValueError(f"{one.name} must be above 0 and finite, got {value}")
