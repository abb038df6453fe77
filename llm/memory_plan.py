"""Computes the memory that a decoder needs on a device, before it is allocated."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from llama_adapter.llm.config import EngineConfig
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.errors import TooLittleMemoryError
from llama_adapter.runtime.schemes.scheme import TensorForm, scheme_of
from llama_adapter.runtime.schemes.state import loaded_bytes
from llama_adapter.runtime.text import counted

BLOCK: Final = 128  # places of the cache that a row gets at once; most captions fit with their prompts
_MOST_KEPT: Final = 16
_FLOAT32_BYTES = 4
SPARE: Final = 0.1  # share of the free memory that an automatic number of rows leaves free


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `activations` is an estimate of the peak of the largest prefill, or of encoding pictures.

    `loading` is needed in addition to the weights until all are loaded; `slots` and `activations` are needed
    only after that.
    """

    weights: int
    slots: int
    activations: int
    loading: int = 0
    place: int = 0  # of the slots: keys and values of one token

    @property
    def total(self) -> int:
        return self.weights + max(self.slots + self.activations, self.loading)


def plan_memory(config: EngineConfig, *, weights: int, loading: int = 0, padding: int = 1) -> MemoryPlan:
    """The plan of an engine whose weights take `weights` bytes.

    Padding makes a prefill up to `padding` times larger. If rows share blocks, a layer's keys and values are gathered.
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
    gathered = config.num_slots * context * 2 * sizes.kv_dim * itemsize if config.block else 0
    place = 2 * sizes.num_layers * sizes.kv_dim * itemsize
    return MemoryPlan(
        weights=weights,
        loading=loading,
        slots=(config.num_places + config.kept_places) * place + prefix_bytes(config),
        activations=max(
            max(attention, feed_forward, logits, gathered) + residual, config.num_slots * config.encoding_bytes
        ),
        place=place,
    )


def least_cache(config: EngineConfig) -> EngineConfig:
    """The config with the smallest cache that is worth its rows: a quarter of the context each, and all of it for one.

    Every row gets its whole context if that takes no more.
    """
    context, block = config.decoder.context, BLOCK * (1 + config.past_length // BLOCK)
    most = -(-context // block)
    each = -(-most // 4)
    spare = config.num_slots * (each - 1) + most - each
    return _unless_whole(replace(config, block=block, spare_blocks=spare))


def widest_cache(config: EngineConfig, plan: MemoryPlan, *, free: int | None) -> EngineConfig:
    """The config with all places that leave a tenth of the `free` bytes, if `plan` is that of `config`.

    A quarter of them are for kept beginnings of prompts, if any are kept, up to `_MOST_KEPT` contexts; the others for
    rows. If the free memory is not known, every row gets its whole context.
    """
    if free is None:
        return replace(config, block=0, spare_blocks=0)
    more = max(int(free * (1.0 - SPARE)) - plan.total, 0) // plan.place
    if config.kept_places:
        kept = min(more // 4, (_MOST_KEPT - 1) * config.decoder.context)
        config, more = replace(config, kept_places=config.kept_places + kept), more - kept
    if not config.block:
        return config
    return _unless_whole(replace(config, spare_blocks=config.spare_blocks + more // config.block))


def _unless_whole(config: EngineConfig) -> EngineConfig:
    whole = replace(config, block=0, spare_blocks=0)
    return config if config.num_places < whole.num_places else whole


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
    smaller = "--batch-size or --context" if config.num_slots > 1 else "--context"
    raise TooLittleMemoryError(
        f"{counted(config.num_slots, 'slot')} with a context of {config.decoder.context} need "
        f"{plan.total / 1e9:.1f} GB ({weights}{parts}), and {free / 1e9:.1f} GB are free on {device}",
        hint=f"try a smaller {smaller}" + (", or a half --dtype" if plan.weights else ""),
    )


def planner(
    config: EngineConfig,
    forms: Mapping[str, TensorForm],
    *,
    backend: Backend,
    reserved: int = 0,
) -> Callable[[int], MemoryPlan]:
    """A function from a number of rows to the memory plan of a runner with so many rows and their `least_cache`.

    `forms` are those of the state dict that `place_decoder` receives tensor by tensor. `reserved` bytes of the device
    are counted for other uses.
    """

    def is_dequantised(form: TensorForm) -> bool:
        scheme = scheme_of(form.dtype)
        return scheme is not None and not backend.computes_in(scheme.name, config.dtype, wanted=config.operators)

    sizes = {
        name: loaded_bytes(form, dtype=config.dtype, is_dequantised=is_dequantised(form))
        for name, form in forms.items()
    }
    padding = 2 if backend.capabilities.static_shapes else 1  # rows are rounded up to a power of two
    return planner_of(config, forms, sizes, padding=padding, reserved=reserved)


def planner_of(
    config: EngineConfig,
    forms: Mapping[str, TensorForm],
    sizes: Mapping[str, int],
    *,
    padding: int,
    reserved: int = 0,
) -> Callable[[int], MemoryPlan]:
    """As `planner`, for a device that need not exist here: `sizes` are the bytes of each tensor on the device.

    Padded prefills may be `padding` times larger.
    """
    # While loading: one block in the form of its file in addition to the device's, and the largest matrix in float32,
    # which is rounded.
    largest = max((math.prod(form.shape) for form in forms.values()), default=0)
    blocks = [name for name in sizes if name.startswith("layers.")]
    block_bytes = sum(sizes[name] for name in blocks) // max(config.decoder.num_layers, 1)
    loading = block_bytes + largest * _FLOAT32_BYTES
    weights = reserved + sum(sizes.values())
    return lambda num_slots: plan_memory(
        least_cache(replace(config, num_slots=num_slots)), weights=weights, loading=loading, padding=padding
    )
