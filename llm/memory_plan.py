"""Computes the memory that a decoder needs on a device, before it is allocated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from llama_adapter.llm.config import EngineConfig
from llama_adapter.runtime.errors import TooLittleMemoryError

_FLOAT32_BYTES = 4
SPARE: Final = 0.1  # share of the free memory that an automatic number of rows leaves free


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `activations` is an estimate of the peak of the largest prefill.

    `loading` is needed in addition to the weights until all are loaded; `slots` and `activations` are needed
    only after that.
    """

    weights: int
    slots: int
    activations: int
    loading: int = 0

    @property
    def total(self) -> int:
        return self.weights + max(self.slots + self.activations, self.loading)


def plan_memory(config: EngineConfig, *, weights: int, loading: int = 0, padding: int = 1) -> MemoryPlan:
    """The plan of an engine whose weights take `weights` bytes.

    Padding makes a prefill up to `padding` times larger.
    """
    sizes, itemsize = config.decoder, config.dtype.itemsize
    context = sizes.context
    num_tokens = min(config.num_slots * context, max(padding * config.max_prefill_tokens, context))
    # The peaks of a layer: attention scores in float32 with their mask and their cast copy, or the two halves of the
    # feed-forward network and their product.
    attention = num_tokens * sizes.num_heads * context * (2 * _FLOAT32_BYTES + itemsize)
    feed_forward = num_tokens * 3 * sizes.ffn_dim * itemsize
    residual = num_tokens * 4 * sizes.dim * itemsize
    logits = 2 * config.num_slots * sizes.vocab_size * _FLOAT32_BYTES
    # A slot has keys and values of every position, and those of the picture.
    positions = config.num_slots * 2 * sizes.num_layers * context * sizes.kv_dim * itemsize
    return MemoryPlan(
        weights=weights,
        loading=loading,
        slots=positions + prefix_bytes(config),
        activations=max(attention, feed_forward, logits) + residual,
    )


def prefix_bytes(config: EngineConfig) -> int:
    """Bytes of the pictures' keys and values in all slots."""
    sizes = config.decoder
    queries = sizes.num_adapter_layers * sizes.num_queries
    return int(config.num_slots * 2 * queries * sizes.attention_dim * config.dtype.itemsize)


def fitting_rows(planned: Callable[[int], MemoryPlan], *, free: int | None, most: int, unknown: int) -> int:
    """The largest power of two of rows, from 1 to `most`, whose plan leaves a tenth of the `free` bytes.

    If the free memory is not known (None), at most `unknown` rows.
    """
    limit = most if free is not None else min(most, unknown)
    num_rows = 1
    while 2 * num_rows <= limit and (free is None or planned(2 * num_rows).total <= free * (1.0 - SPARE)):
        num_rows *= 2
    return num_rows


def check_memory(plan: MemoryPlan, config: EngineConfig, *, free: int | None, device: str) -> None:
    """Raise TooLittleMemoryError if the plan needs more than `free` bytes; None means that free memory is not known."""
    if free is None or plan.total <= free:
        return
    parts = f"{plan.slots / 1e9:.1f} GB for keys and values and {plan.activations / 1e9:.1f} GB for computing"
    if plan.loading > plan.slots + plan.activations:
        parts = f"{plan.loading / 1e9:.1f} GB to load them"
    weights = f"{plan.weights / 1e9:.1f} GB for weights, " if plan.weights else ""
    slots = "1 slot" if config.num_slots == 1 else f"{config.num_slots} slots"
    smaller = "--batch-size or --context" if config.num_slots > 1 else "--context"
    raise TooLittleMemoryError(
        f"{slots} with a context of {config.decoder.context} need {plan.total / 1e9:.1f} GB ({weights}{parts}), and "
        f"{free / 1e9:.1f} GB are free on {device}",
        hint=f"try a smaller {smaller}" + (", or a half --dtype" if plan.weights else ""),
    )
