"""Sizes of the language half of the model. Plain values only."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_MAY_BE_ZERO = ("num_adapter_layers", "num_queries")  # a LLaMA without adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A LLaMA decoder with zero-init gated adapter attention in its last `num_adapter_layers` layers."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float = 10000.0
    context: int = 512  # positions of one sequence, prompt and answer together
    num_adapter_layers: int = 0
    num_queries: int = 0
    # True when LoRA was merged into the token projections: the adapter then keeps its own bare K/V weights.
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
        """Index of the first layer that reads the picture."""
        return self.num_layers - self.num_adapter_layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as stored in a bundle's manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """Inverse of `to_dict`; raises TypeError when a field is unknown or missing, ValueError for a bad value."""
        return cls(**values)


def _check_numbers(config: DecoderConfig) -> None:
    """Raise ValueError unless every field has its type, whole numbers are 1 or more, and others finite and above 0."""
    for field in fields(config):
        kind: Any = field.type
        value = getattr(config, field.name)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{field.name} must be of type {kind.__name__}, got {value!r}")
        least = 0 if field.name in _MAY_BE_ZERO else 1
        if kind is int and value < least:
            raise ValueError(f"{field.name} must be at least {least}, got {value}")
        if kind is float and not 0 < value <= sys.float_info.max:
            raise ValueError(f"{field.name} must be above 0 and finite, got {value}")
