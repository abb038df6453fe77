"""Settings of the language half: the decoder's sizes, and how the engine runs it."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import GenericAlias
from typing import Any, Final, Literal, get_args

from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.rotary import Rotary
from llama_adapter.runtime.given import require_least
from llama_adapter.runtime.schemes import OperatorChoice

# The first two: a LLaMA without adapter. Of the caps, 0 means none.
_MAY_BE_ZERO = ("num_adapter_layers", "num_queries", "rank", "all_heads", "all_kv_heads", "score_cap", "logit_cap")
_SPLIT = ("rank", "num_ranks", "all_heads", "all_kv_heads", "ffn_block")
# Fields of decoders that differ from the first LLaMA, left out of files where they have their default.
_SWITCHES: Final = (
    *("qk_norm", "norms", "activation", "score_cap", "logit_cap"),
    *("rotaries", "layer_rotaries", "layer_windows"),
)
QkNorm = Literal["none", "head", "all"]
Norms = Literal["before", "both", "after"]
Activation = Literal["silu", "gelu_tanh"]
# Linear weights with 8 bits where the others have 4; see `runtime.schemes.finer`.
FINER_WEIGHTS: Final = ("head.weight",)
# Sizes of the blocks of units that stay on one rank; the first size that divides the width is used. 128: inputs whose
# activations share a scale for 8-bit and 4-bit weights (WIDE_GROUP in tiles.h). 64: outputs that the kernels compute
# together.
_FFN_BLOCKS = (128, 64, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A LLaMA-like decoder with zero-init gated adapter attention in its last `num_adapter_layers` layers.

    What differs among families of decoders is data here; multipliers and offsets of norms are folded into the weights
    at load (`llm/weights/families.py`). Query head n reads key/value head n // (num_heads / num_kv_heads). If the
    decoder is split over several ranks, `num_heads`, `num_kv_heads` and `ffn_dim` are those of one rank's share; see
    `share`.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    norm_eps: float
    num_kv_heads: int = 0  # heads of keys and values; 0: `num_heads`
    head_dim: int = 0  # width of one attention head; 0: `dim` / `num_heads`
    qk_norm: QkNorm = "none"  # RMS norm of q and k before their rotation: of each head, or of all heads together
    norms: Norms = "before"  # RMS norms before attention and feed-forward network, behind them, or both
    activation: Activation = "silu"  # of the feed-forward network's gate
    score_cap: float = 0.0  # c: scores of attention become c tanh(score / c), before the mask; 0: they are not capped
    logit_cap: float = 0.0  # likewise of the logits
    rope_theta: float = 10000.0
    rotaries: tuple[Rotary, ...] = ()  # empty: one, with `rope_theta`
    layer_rotaries: tuple[int, ...] = ()  # index in `rotaries` of each layer, -1: it does not rotate; empty: all 0
    layer_windows: tuple[int, ...] = ()  # most positions that a layer's token sees, its own included; 0: all before it
    context: int = 512  # most tokens of one sequence: past, prompt and answer together
    num_adapter_layers: int = 0
    num_queries: int = 0
    # True if LoRA is merged into the token projections. The adapter then has separate K/V weights without LoRA.
    separate_adapter_kv: bool = False
    rank: int = 0
    num_ranks: int = 1
    all_heads: int = 0  # number of heads of all ranks together; 0 if the decoder is not split
    all_kv_heads: int = 0  # likewise of keys and values; 0: as many as `all_heads`
    ffn_block: int = _FFN_BLOCKS[0]  # largest block of units that stay on one rank; smaller in some files of ranks

    def __post_init__(self) -> None:
        num_heads = self.all_heads or self.num_heads
        if not self.all_kv_heads:
            object.__setattr__(self, "all_kv_heads", self.all_heads)
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim and type(self.dim) is type(num_heads) is int and num_heads > 0:
            if self.dim % num_heads:
                raise ValueError(f"dim {self.dim} must be num_heads {num_heads} times an even number")
            object.__setattr__(self, "head_dim", self.dim // num_heads)
        _check_numbers(self)
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} must lie in 0..{self.num_ranks - 1}")
        if self.head_dim % 2:
            raise ValueError(f"dim {self.dim} must be num_heads {num_heads} times an even number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.num_adapter_layers > self.num_layers:
            raise ValueError(f"num_adapter_layers {self.num_adapter_layers} must lie in 0..{self.num_layers}")
        _check_layers(self)

    @property
    def attention_dim(self) -> int:
        """Width of all heads of this rank together; `dim`, unless the decoder is split."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys, or all values, of one token on this rank."""
        return self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Number of query heads that read one head of keys and values."""
        return self.num_heads // self.num_kv_heads

    def rotary_of(self, layer: int) -> Rotary | None:
        """How a layer rotates queries and keys; None if it does not."""
        index = self.layer_rotaries[layer] if self.layer_rotaries else 0
        if index < 0:
            return None
        return self.rotaries[index] if self.rotaries else Rotary(theta=self.rope_theta)

    def window_of(self, layer: int) -> int:
        """Most positions that a token of this layer sees; 0 if it sees all, also because none is further away."""
        window = self.layer_windows[layer] if self.layer_windows else 0
        return window if window < self.context else 0

    @property
    def distinct_rotaries(self) -> tuple[Rotary, ...]:
        """The rotary embeddings of the layers, each once."""
        found = dict.fromkeys(map(self.rotary_of, range(self.num_layers)))
        return tuple(rotary for rotary in found if rotary is not None)

    @property
    def layer_tables(self) -> tuple[int | None, ...]:
        """Index in `distinct_rotaries` of the rotary embedding of each layer; None if it does not rotate."""
        distinct, rotaries = self.distinct_rotaries, map(self.rotary_of, range(self.num_layers))
        return tuple(None if rotary is None else distinct.index(rotary) for rotary in rotaries)

    @property
    def windows(self) -> tuple[int, ...]:
        """The windows of the layers, each once, in ascending order; empty if all layers see everything."""
        return tuple(sorted({*map(self.window_of, range(self.num_layers))} - {0}))

    @property
    def is_first_llama(self) -> bool:
        """Whether it computes what the first LLaMA does, for programs that compute nothing else."""
        rotaries = {*map(self.rotary_of, range(self.num_layers))}
        return (
            self.group == 1
            and self.dim == (self.all_heads or self.num_heads) * self.head_dim
            and (self.qk_norm, self.norms, self.activation) == ("none", "before", "silu")
            and not (self.score_cap or self.logit_cap or self.windows)
            and len(rotaries) == 1
            and all(rotary is not None and rotary.is_plain for rotary in rotaries)
        )

    @property
    def heads(self) -> range:
        """Indices of this rank's heads among the heads of all ranks."""
        return self._heads_of(self.rank, self.num_ranks)[0]

    @property
    def kv_heads(self) -> range:
        """Indices of this rank's heads of keys and values among those of all ranks."""
        return self._heads_of(self.rank, self.num_ranks)[1]

    def _heads_of(self, rank: int, num_ranks: int) -> tuple[range, range]:
        """A rank's query heads, and its heads of keys and values, which several ranks may share."""
        num_heads, num_kv_heads = self.all_heads or self.num_heads, self.all_kv_heads or self.num_kv_heads
        group = num_heads // num_kv_heads
        if num_ranks <= num_kv_heads:
            kv_heads = _divided(num_kv_heads, rank, num_ranks)
            return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
        each = num_ranks // num_kv_heads  # ranks that share a head
        own, kv_head = _divided(group, rank % each, each), rank // each
        return range(kv_head * group + own.start, kv_head * group + own.stop), range(kv_head, kv_head + 1)

    @property
    def vocab_rows(self) -> range:
        """Tokens whose embeddings and logits this rank has; all of `vocab_size`, unless the decoder is split."""
        each = -(-self.vocab_size // self.num_ranks)
        return range(min(self.rank * each, self.vocab_size), min((self.rank + 1) * each, self.vocab_size))

    def share(self, rank: int, num_ranks: int) -> "DecoderConfig":
        """The share of one rank if the decoder is split over `num_ranks`, as in Megatron-LM (Shoeybi et al., 2019).

        Heads are divided as evenly as possible, and so are feed-forward units, in blocks (see `ffn_range`). Query heads
        stay beside the keys that they read. With more ranks than heads of keys and values, a multiple of their number,
        several ranks have the same one. The vocabulary is divided evenly; only the last ranks may have fewer tokens.
        Raises ValueError for other numbers of ranks, for a norm over all heads, or if the decoder is already split.
        """
        if self.num_ranks > 1:
            raise ValueError(f"this is rank {self.rank} of {self.num_ranks} already")
        if num_ranks == 1:
            return self
        if num_ranks > self.num_heads:
            raise ValueError(f"it has {self.num_heads} heads, so {self.num_heads} ranks are the most")
        if num_ranks > self.num_kv_heads and num_ranks % self.num_kv_heads:
            raise ValueError(
                f"it has {self.num_kv_heads} heads of keys and values; take at most {self.num_kv_heads} ranks, or a "
                "multiple of that"
            )
        if self.qk_norm == "all":
            raise ValueError("its norm of queries and keys is over all heads")
        if num_ranks > min(self.ffn_dim, self.vocab_size):
            raise ValueError(f"a feed-forward width of {self.ffn_dim} is too small")
        heads, kv_heads = self._heads_of(rank, num_ranks)
        return replace(
            self,
            num_heads=len(heads),
            num_kv_heads=len(kv_heads),
            all_kv_heads=self.num_kv_heads,
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

    def prefix_shape(self, num_pictures: int) -> tuple[int, ...]:
        """(A, B, N, Q, H): the shape of the keys, or the values, of pictures in the adapter layers."""
        return (self.num_adapter_layers, num_pictures, self.num_heads, self.num_queries, self.head_dim)

    @property
    def first_adapter_layer(self) -> int:
        """Index of the first layer that attends to the picture."""
        return self.num_layers - self.num_adapter_layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a bundle's manifest. Fields about ranks are included only if the decoder is split, and other
        fields that the first LLaMA does not have only if they differ from it.
        """
        values = asdict(self) | {"rotaries": [rotary.to_dict() for rotary in self.rotaries]}
        values |= {name: list(values[name]) for name in ("layer_rotaries", "layer_windows")}
        switches = (one for one in fields(self) if one.name in _SWITCHES)
        left_out = {one.name for one in switches if getattr(self, one.name) == one.default}
        if self.num_kv_heads == self.num_heads and self.all_kv_heads == self.all_heads:
            left_out |= {"num_kv_heads", "all_kv_heads"}
        if self.dim == self.head_dim * (self.all_heads or self.num_heads):
            left_out.add("head_dim")
        if self.num_ranks == 1:
            left_out.update(_SPLIT)
        return {name: value for name, value in values.items() if name not in left_out}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DecoderConfig":
        """Inverse of `to_dict`. Raises TypeError for unknown or missing fields, ValueError for bad values."""
        lists = {name: tuple(values[name]) for name in ("layer_rotaries", "layer_windows") if name in values}
        if "rotaries" in values:
            lists["rotaries"] = tuple(Rotary(**rotary) for rotary in values["rotaries"])
        return cls(**{**values, **lists})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a decoder runs. The loader, the memory plan, the runner and the engine share one EngineConfig."""

    decoder: DecoderConfig
    dtype: Any  # of torch or numpy, for weights, keys, values and activations; quantised weights keep their own dtype
    num_slots: int = 1  # most rows that run at once
    mode: str = "eager"  # or a graph mode of the device, as returned by `settle_mode`
    operators: OperatorChoice = "auto"
    max_prefill_tokens: int = 8192  # most tokens of one padded prefill, unless a single prompt is longer
    past: PastKeyValues | None = field(default=None, compare=False, repr=False)  # precedes every prompt
    # The cache of keys and values. Every slot has one block of this many places; 0: its whole context.
    block: int = 0
    spare_blocks: int = 0  # for rows that have filled the block of their slot
    kept_places: int = 0  # places, beside the cache, for beginnings of prompts that are used again; see KeptPrompts
    encoding_bytes: int = 0  # memory of each row while pictures are encoded as tokens of prompts

    def __post_init__(self) -> None:
        require_least(self, "num_slots")
        if self.block:
            require_least(self, "block", least=self.past_length + 1)
            require_least(self, "spare_blocks", least=self.most_blocks - 1)  # for one row that fills the context

    @property
    def context(self) -> int:
        """Most tokens of one sequence, prompt and answer together, without the past."""
        return self.decoder.context - self.past_length

    @property
    def past_length(self) -> int:
        """Number of past tokens before every prompt. Position 0 of a plan is this position of the decoder."""
        return 0 if self.past is None else len(self.past)

    @property
    def most_blocks(self) -> int:
        """Blocks of a row that fills the context."""
        return -(-self.decoder.context // self.block) if self.block else 1

    @property
    def num_places(self) -> int:
        """Places of all blocks. A place holds the keys and values of one token."""
        return (self.num_slots + self.spare_blocks) * (self.block or self.decoder.context)

    def extra_blocks(self, num_tokens: int) -> int:
        """Spare blocks that a row of so many tokens needs."""
        return -(-(self.past_length + num_tokens) // self.block) - 1 if self.block else 0


def _divided(count: int, rank: int, num_ranks: int) -> range:
    """A rank's part of `count` items, divided evenly. The first rank has at least as many as any other."""
    return range(-(-count * rank // num_ranks), -(-count * (rank + 1) // num_ranks))


def _check_numbers(config: DecoderConfig) -> None:
    """Raise ValueError unless every field has its type, integers are at least 1 and floats finite and above 0."""
    for one in fields(config):
        kind: Any = one.type
        value = getattr(config, one.name)
        if isinstance(kind, GenericAlias):
            continue  # see `_check_layers`
        if names := get_args(kind):
            if value not in names:
                raise ValueError(f"{one.name} must be one of {', '.join(names)}, got {value!r}")
            continue
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{one.name} must be of type {kind.__name__}, got {value!r}")
        least = 0 if one.name in _MAY_BE_ZERO else 1
        if kind is int and value < least:
            raise ValueError(f"{one.name} must be at least {least}, got {value}")
        if kind is float and not (0 < value <= sys.float_info.max or (value == 0 and least == 0)):
            raise ValueError(f"{one.name} must be above 0 and finite, got {value}")


def _check_layers(config: DecoderConfig) -> None:
    """Raise ValueError unless the values of each layer are whole numbers in their range, one for each layer."""
    ranges = {"layer_rotaries": range(-1, max(1, len(config.rotaries))), "layer_windows": range(1 << 62)}
    for name, allowed in ranges.items():
        values = getattr(config, name)
        if not all(type(value) is int and value in allowed for value in values):
            raise ValueError(f"{name} must be whole numbers in {allowed.start}..{allowed.stop - 1}")
        if len(values) not in (0, config.num_layers):
            raise ValueError(f"{name} must have {config.num_layers} values, got {len(values)}")
