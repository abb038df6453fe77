"""What a decoder will take of a device's memory, counted before any of it is taken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.errors import DeviceError

_FLOAT32_BYTES = 4
SPARE: Final = 0.1  # of what is free, which a number of rows that nobody asked for leaves alone


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `activations` is the largest prefill's, an estimate of what is alive at its peak."""

    weights: int
    slots: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.slots + self.activations


def slot_bytes(config: DecoderConfig, *, dtype: torch.dtype) -> int:
    """Memory of one slot: keys and values of every position, and those of the picture."""
    cached = config.num_layers * config.context + config.num_adapter_layers * config.num_queries
    return 2 * cached * config.dim * dtype.itemsize


def plan_memory(
    config: DecoderConfig, *, dtype: torch.dtype, num_slots: int, weights: int, max_prefill_tokens: int
) -> MemoryPlan:
    """Plan for `num_slots` rows beside weights of that many bytes."""
    num_tokens = min(num_slots * config.context, max(max_prefill_tokens, config.context))
    # The widest moments of a layer: the attention scores in float32 with their mask and their cast copy, or the
    # feed-forward network's two halves and their product.
    attention = num_tokens * config.num_heads * config.context * (2 * _FLOAT32_BYTES + dtype.itemsize)
    feed_forward = num_tokens * 3 * config.ffn_dim * dtype.itemsize
    residual = num_tokens * 4 * config.dim * dtype.itemsize
    logits = 2 * num_slots * config.vocab_size * _FLOAT32_BYTES
    return MemoryPlan(
        weights=weights,
        slots=num_slots * slot_bytes(config, dtype=dtype),
        activations=max(attention, feed_forward, logits) + residual,
    )


def fitting_rows(planned: Callable[[int], MemoryPlan], *, free: int | None, most: int, unknown: int) -> int:
    """The largest power of two, at most `most`, of rows whose plan leaves a tenth of what is free; at least 1.

    Where the free memory is not known, it is at most `unknown`.
    """
    limit = most if free is not None else min(most, unknown)
    num_rows = 1
    while 2 * num_rows <= limit and (free is None or planned(2 * num_rows).total <= free * (1.0 - SPARE)):
        num_rows *= 2
    return num_rows


def check_memory(plan: MemoryPlan, config: DecoderConfig, *, num_slots: int, free: int | None, device: str) -> None:
    """Raise DeviceError when the plan needs more than what is free; an unknown amount is never too little."""
    if free is None or plan.total <= free:
        return
    parts = f"{plan.slots / 1e9:.1f} GB for keys and values and {plan.activations / 1e9:.1f} GB for computing"
    weights = f"{plan.weights / 1e9:.1f} GB for weights, " if plan.weights else ""
    slots = "1 slot" if num_slots == 1 else f"{num_slots} slots"
    smaller = "--batch-size or --context" if num_slots > 1 else "--context"
    raise DeviceError(
        f"{slots} with a context of {config.context} need {plan.total / 1e9:.1f} GB ({weights}{parts}), and "
        f"{free / 1e9:.1f} GB are free on {device}",
        hint=f"try a smaller {smaller}" + (", or a half --dtype" if plan.weights else ""),
    )
