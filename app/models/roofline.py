"""The roofline model: FLOPs and memory traffic of a model, computed from its sizes.

A FLOP is one multiplication or addition. FLOPs of matrix products and attention (the used half of a causal mask) are
counted, and bytes of weights, read once per pass, and of keys and values. Norms, activations and data in caches are not
counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.schemes import OperatorChoice, Precision, finer
from llama_adapter.runtime.schemes.scheme import find_scheme
from llama_adapter.vision.config import ClipConfig, VisionConfig

Cause = Literal["memory", "arithmetic", "overhead", "reading"]


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs, and bytes moved from or to memory."""

    flops: int = 0
    bytes: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True, slots=True)
class NumberSizes:
    """Bytes per number: of weight matrices, of everything else, and of the head if it has its own precision."""

    weight: float
    other: int
    head: float | None = None


def number_sizes(
    backend: Backend, *, dtype: torch.dtype, precision: Precision, wanted: OperatorChoice = "auto"
) -> NumberSizes:
    """Bytes per number in computations. Quantised weights that the device widens have the size of other numbers."""

    def size(precision: Precision) -> float:
        stored = find_scheme(precision)
        if stored.weight_dtype is None or not backend.computes_in(precision, dtype, wanted=wanted):
            return float(dtype.itemsize)
        return stored.weight_dtype.itemsize / stored.weights_per_item

    return NumberSizes(weight=size(precision), other=dtype.itemsize, head=size(finer(precision)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """Measured limits of a device: bytes and FLOP per second."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: Work) -> tuple[float, Cause]:
        """The shortest possible time of `work`, and its bottleneck."""
        memory, arithmetic = work.bytes / self.bytes_per_s, work.flops / self.flops_per_s
        return (memory, "memory") if memory > arithmetic else (arithmetic, "arithmetic")


def encoder_work(config: VisionConfig, *, num_pictures: int, sizes: NumberSizes) -> Work:
    """The work of one pass of the picture encoder: CLIP and the visual blocks."""
    query, num_tokens = config.query, config.clip.num_features + config.query.num_queries
    pairs = max(query.depth - 1, 0) * num_tokens**2 + (num_tokens * query.num_queries if query.depth else 0)
    products = sum(2 * num_tokens * num_weights for num_tokens, num_weights in _query_matrices(config))
    flops = tower_flops(config.clip) + products + _attention_flops(pairs, query.width)
    return Work(num_pictures * flops, encoder_weights(config) * sizes.weight)


def tower_flops(clip: ClipConfig) -> int:
    """FLOPs of the picture tower for one picture."""
    products = sum(2 * num_tokens * num_weights for num_tokens, num_weights in _tower_matrices(clip))
    return products + clip.num_layers * _attention_flops(clip.num_tokens**2, clip.width)


def prefix_work(config: DecoderConfig, *, num_pictures: int, sizes: NumberSizes) -> Work:
    """The work of projecting the adapter layers' keys and values of pictures, done once per picture."""
    weights = config.num_adapter_layers * 2 * config.dim * config.kv_dim
    written = num_pictures * _prefix_numbers(config)
    return Work(2 * num_pictures * config.num_queries * weights, weights * sizes.weight + written * sizes.other)


def prefill_work(
    config: DecoderConfig, *, lengths: Sequence[int], num_logits: int, sizes: NumberSizes, equal_rows: bool = False
) -> Work:
    """The work of prompts of these lengths in the decoder, and of `num_logits` positions in the head.

    If prompts are equal, the part before the first adapter attention is computed once. In the last layer, everything
    after attention is computed only for these positions.
    """
    num_tokens = sum(lengths)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    flops = 2 * num_tokens * layer_weights(config) + 2 * num_logits * _head_weights(config)
    left_out = max(num_tokens - num_logits, 0)
    if equal_rows and not config.num_adapter_layers:
        left_out //= len(lengths)
    flops -= 2 * left_out * config.dim * (config.attention_dim + 3 * config.ffn_dim)
    flops += config.num_layers * _attention_flops(pairs, config.attention_dim)
    flops += config.num_adapter_layers * _attention_flops(num_tokens * config.num_queries, config.attention_dim)
    if equal_rows:
        first, copies = config.first_adapter_layer, 1 - 1 / len(lengths)
        shared = first * layer_weights(config) // config.num_layers + (
            config.dim * (config.attention_dim + 2 * config.kv_dim) if config.num_adapter_layers else 0
        )
        flops -= int(copies * (2 * num_tokens * shared + first * _attention_flops(pairs, config.attention_dim)))
    cached = 2 * config.num_layers * config.kv_dim * num_tokens
    cached += len(lengths) * _prefix_numbers(config)
    return Work(flops, weight_bytes(config, sizes=sizes) + cached * sizes.other)


def step_work(config: DecoderConfig, *, positions: Sequence[int], sizes: NumberSizes) -> Work:
    """The work of one decode step: a token for each row, at these positions, attends to earlier ones and itself."""
    num_rows, attended = len(positions), sum(position + 1 for position in positions)
    flops = 2 * num_rows * (layer_weights(config) + _head_weights(config))
    flops += config.num_layers * _attention_flops(attended, config.attention_dim)
    flops += config.num_adapter_layers * _attention_flops(num_rows * config.num_queries, config.attention_dim)
    cached = 2 * config.num_layers * config.kv_dim * attended + num_rows * _prefix_numbers(config)
    return Work(flops, weight_bytes(config, sizes=sizes) + cached * sizes.other)


def weight_bytes(config: DecoderConfig, *, sizes: NumberSizes) -> float:
    """Bytes of the decoder's weights, which each pass reads once."""
    head = sizes.weight if sizes.head is None else sizes.head
    return layer_weights(config) * sizes.weight + _head_weights(config) * head


def encoder_weights(config: VisionConfig) -> int:
    """Numbers in the encoder's matrices."""
    return sum(num_weights for _, num_weights in (*_tower_matrices(config.clip), *_query_matrices(config)))


def decoder_weights(config: DecoderConfig) -> int:
    """Numbers in the decoder's matrices, including embedding and head."""
    return layer_weights(config) + 2 * _head_weights(config)


def layer_weights(config: DecoderConfig) -> int:
    """Numbers in the matrices of all layers, without embedding and head."""
    return config.num_layers * sum(inputs * outputs for inputs, outputs in decoder_shapes(config))


def decoder_shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers in one layer of the decoder."""
    dim, heads, ffn_dim = config.dim, config.attention_dim, config.ffn_dim
    return [(dim, heads + 2 * config.kv_dim), (heads, dim), (dim, 2 * ffn_dim), (ffn_dim, dim)]


def encoder_shapes(config: VisionConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers in one block of CLIP, which is most of the encoder."""
    width, hidden_dim = config.clip.width, config.clip.hidden_dim
    return [(width, 3 * width), (width, width), (width, hidden_dim), (hidden_dim, width)]


def explain(computed: Iterable[tuple[float, float, Cause]], *, read_s: float, wall_s: float) -> dict[Cause, float]:
    """Shares of `wall_s` by cause. `computed` has, for each call, seconds taken, least possible seconds and bottleneck.

    Time that neither reading nor a ceiling explains is overhead of the engine, and of programs that do not reach their
    ceiling.
    """
    seconds: dict[Cause, float] = {"memory": 0.0, "arithmetic": 0.0, "reading": read_s, "overhead": 0.0}
    for taken, least, cause in computed:
        seconds[cause] += min(taken, least)
    seconds["overhead"] = max(wall_s - sum(seconds.values()), 0.0)
    total = sum(seconds.values())
    return {cause: value / total if total else 0.0 for cause, value in seconds.items()}


def _tower_matrices(clip: ClipConfig) -> list[tuple[int, int]]:
    """(tokens that a matrix is applied to, numbers in it) for the tower's matrices, from the pixels on."""
    block = 2 * clip.width * (2 * clip.width + clip.hidden_dim)
    return [
        (clip.num_patches, 3 * clip.patch_size**2 * clip.width),
        (clip.num_tokens, clip.num_layers * block),
        (clip.num_features, clip.width * clip.output_dim * clip.has_projection),
    ]


def _query_matrices(config: VisionConfig) -> list[tuple[int, int]]:
    """As `_tower_matrices`, for the visual-query blocks."""
    clip, query = config.clip, config.query
    block = 2 * query.width * (2 * query.width + query.mlp_dim)
    end = query.width * (query.width + 2 * query.mlp_dim) if query.depth else 0
    return [
        (clip.num_features, clip.output_dim * query.width),
        (clip.num_features + query.num_queries, query.depth * block - end),
        (query.num_queries, end),  # last block: only queries are computed, as other tokens are not used
        (query.num_queries, query.width * query.output_dim),
    ]


def _attention_flops(num_pairs: int, width: int) -> int:
    """FLOPs of scores and weighted sum: two products of `width` for every pair of query and key."""
    return 4 * num_pairs * width


def _head_weights(config: DecoderConfig) -> int:
    return config.dim * len(config.vocab_rows)


def _prefix_numbers(config: DecoderConfig) -> int:
    """Numbers in the adapter's keys and values of one picture."""
    return 2 * config.num_adapter_layers * config.num_queries * config.attention_dim
