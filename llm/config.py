"""Settings of the language half: the decoder's sizes, and how the engine runs it."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from llama_adapter.llm.past import PastKeyValues
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.schemes import OperatorChoice

_MAY_BE_ZERO = ("num_adapter_layers", "num_queries", "rank", "all_heads")  # the first two: a LLaMA without adapter
_SPLIT = ("rank", "num_ranks", "all_heads", "ffn_block")
# Sizes of the blocks of units that stay on one rank; the first size that divides the width is used. 128: inputs whose
# activations share a scale for 8-bit and 4-bit weights (WIDE_GROUP in tiles.h). 64: outputs that the kernels compute
# together.
_FFN_BLOCKS = (128, 64, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes of a LLaMA decoder with zero-init gated adapter attention in its last `num_adapter_layers` layers.

    If the decoder is split over several ranks, `num_heads` and `ffn_dim` are those of one rank's share; see `share`.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm_eps: float
    rope_theta: float = 10000.0
    context: int = 512  # most tokens of one sequence: past, prompt and answer together
    num_adapter_layers: int = 0
    num_queries: int = 0
    # True if LoRA is merged into the token projections. The adapter then has separate K/V weights without LoRA.
    separate_adapter_kv: bool = False
    rank: int = 0
    num_ranks: int = 1
    all_heads: int = 0  # number of heads of all ranks together; 0 if the decoder is not split
    ffn_block: int = _FFN_BLOCKS[0]  # largest block of units that stay on one rank; smaller in some files of ranks

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} must lie in 0..{self.num_ranks - 1}")
        num_heads = self.all_heads or self.num_heads
        if self.dim % num_heads or (self.dim // num_heads) % 2:
            raise ValueError(f"dim {self.dim} must be num_heads {num_heads} times an even number")
        if self.num_adapter_layers > self.num_layers:
            raise ValueError(f"num_adapter_layers {self.num_adapter_layers} must lie in 0..{self.num_layers}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // (self.all_heads or self.num_heads)

    @property
    def attention_dim(self) -> int:
        """Width of all heads of this rank together; `dim`, unless the decoder is split."""
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> range:
        """Indices of this rank's heads among the heads of all ranks."""
        return _divided(self.all_heads or self.num_heads, self.rank, self.num_ranks)

    @property
    def vocab_rows(self) -> range:
        """Tokens whose embeddings and logits this rank has; all of `vocab_size`, unless the decoder is split."""
        each = -(-self.vocab_size // self.num_ranks)
        return range(min(self.rank * each, self.vocab_size), min((self.rank + 1) * each, self.vocab_size))

    def share(self, rank: int, num_ranks: int) -> "DecoderConfig":
        """The share of one rank if the decoder is split over `num_ranks`, as in Megatron-LM (Shoeybi et al., 2019).

        Heads are divided as evenly as possible, and so are feed-forward units, in blocks (see `ffn_range`). The
        vocabulary is divided evenly; only the last ranks may have fewer tokens. Raises ValueError if there are more
        ranks than heads, or if the decoder is already split.
        """
        if self.num_ranks > 1:
            raise ValueError(f"this is rank {self.rank} of {self.num_ranks} already")
        if num_ranks == 1:
            return self
        if num_ranks > self.num_heads:
            raise ValueError(f"it has {self.num_heads} heads, so {self.num_heads} ranks are the most")
        if num_ranks > min(self.ffn_dim, self.vocab_size):
            raise ValueError(f"a feed-forward width of {self.ffn_dim} is too small")
        return replace(
            self,
            num_heads=len(_divided(self.num_heads, rank, num_ranks)),
            ffn_dim=len(self.ffn_range(rank, num_ranks)),
            rank=rank,
            num_ranks=num_ranks,
            all_heads=self.num_heads,
        )

    def ffn_range(self, rank: int, num_ranks: int) -> range:
        """Feed-forward units of a rank, divided in blocks of 128, else of 64, else singly.

        A block size is used if it divides the width and there is at least one block for each rank. With blocks of 128,
        ranks round activations for 4-bit weights as one process does. With blocks of 64, the kernels compute whole
        blocks of outputs. `ffn_block` is the largest allowed size.
        """
        whole_blocks = (block for block in _FFN_BLOCKS if block <= self.ffn_block and self.ffn_dim % block == 0)
        block = next((block for block in whole_blocks if self.ffn_dim // block >= num_ranks), 1)
        blocks = _divided(self.ffn_dim // block, rank, num_ranks)
        return range(block * blocks.start, block * blocks.stop)

    @property
    def first_adapter_layer(self) -> int:
        """Index of the first layer that attends to the picture."""
        return self.num_layers - self.num_adapter_layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a bundle's manifest. Fields about ranks are included only if the decoder is split."""
        values = asdict(self)
        return values if self.num_ranks > 1 else {name: values[name] for name in values if name not in _SPLIT}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """Inverse of `to_dict`. Raises TypeError for unknown or missing fields, ValueError for bad values."""
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a decoder runs. The loader, the memory plan, the runner and the engine share one EngineConfig."""

    decoder: DecoderConfig
    dtype: Any  # of torch or numpy, for weights, keys, values and activations; quantised weights keep their own dtype
    num_slots: int = 1  # most rows that run at once
    mode: str = "eager"  # or a graph mode of the device, as returned by `resolve_mode`
    operators: OperatorChoice = "auto"
    max_prefill_tokens: int = 8192  # most tokens of one padded prefill, unless a single prompt is longer
    past: PastKeyValues | None = field(default=None, compare=False, repr=False)  # precedes every prompt

    def __post_init__(self) -> None:
        require_least(self, "num_slots")

    @property
    def context(self) -> int:
        """Most tokens of one sequence, prompt and answer together, without the past."""
        return self.decoder.context - self.past_length

    @property
    def past_length(self) -> int:
        """Number of past tokens before every prompt. Position 0 of a plan is this position of the decoder."""
        return 0 if self.past is None else len(self.past)


def _divided(count: int, rank: int, num_ranks: int) -> range:
    """A rank's part of `count` items, divided evenly. The first rank has at least as many as any other."""
    return range(-(-count * rank // num_ranks), -(-count * (rank + 1) // num_ranks))


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
