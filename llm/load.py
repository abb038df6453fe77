"""Loads a decoder from its state dict, plans its memory, and creates runners on a device."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.memory_plan import MemoryPlan, least_cache, plan_memory
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, use_operators, use_ranks
from llama_adapter.llm.runners.base import Runner
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.graph import GraphRunner
from llama_adapter.llm.runners.kernels import KernelRunner, can_run
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT
from llama_adapter.runtime.devices import EAGER, Backend
from llama_adapter.runtime.devices.cpu_linear import kernel_arrays
from llama_adapter.runtime.operators import Operators
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.schemes.layers import load_state, load_stream
from llama_adapter.runtime.schemes.scheme import TensorForm, dtype_name
from llama_adapter.runtime.schemes.state import loaded_bytes


def decoder_from_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> LlamaAdapterDecoder:
    """A decoder for inference that shares the tensors of `state`.

    Quantised layers can compute only after a backend has prepared them. Raises RuntimeError if names or shapes differ
    from those of `config`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config)
    load_state(decoder, state)
    return decoder


def planner(
    config: EngineConfig,
    forms: Mapping[str, TensorForm],
    *,
    backend: Backend,
    precision: Precision = FLOAT,
    reserved: int = 0,
) -> Callable[[int], MemoryPlan]:
    """A function from a number of rows to the memory plan of a runner with so many rows and their `least_cache`.

    `forms` are those of the state dict in `precision`, which `place_decoder` receives tensor by tensor. `reserved`
    bytes of the device are counted for other uses.
    """
    is_dequantised = not backend.computes_in(precision, config.dtype, wanted=config.operators)
    sizes = {
        name: loaded_bytes(form, dtype=config.dtype, is_dequantised=is_dequantised) for name, form in forms.items()
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
    loading = block_bytes + largest * torch.float32.itemsize
    weights = reserved + sum(sizes.values())
    return lambda num_slots: plan_memory(
        least_cache(replace(config, num_slots=num_slots)), weights=weights, loading=loading, padding=padding
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedDecoder:
    """A decoder on its device, with weights in the device's layout. Its runners share the weights."""

    decoder: LlamaAdapterDecoder
    config: EngineConfig
    backend: Backend
    operators: Operators

    def runner(self, num_slots: int, **cache: int) -> Runner:
        """A new runner with `num_slots` rows. It has its own keys and values.

        `cache` may have other values of `block` and `spare_blocks` than the config.
        """
        config, backend = replace(self.config, num_slots=num_slots, **cache), self.backend  # type: ignore[arg-type]
        if config.mode != EAGER:
            return GraphRunner(self.decoder, config, backend=backend, operators=self.operators)
        if (library := backend.kernels) is not None and can_run(config.decoder):
            arrays, dtype = kernel_arrays(self.decoder), dtype_name(config.dtype)
            ranks = None if self.decoder.ranks is ALONE else self.decoder.ranks
            if arrays is not None:
                return KernelRunner(config, arrays, dtype=dtype, library=library, ranks=ranks)
        shapes = BUCKETED if backend.capabilities.static_shapes else EXACT
        return EagerRunner(self.decoder, config, backend=backend, operators=self.operators, shapes=shapes)


def place_decoder(
    config: EngineConfig, tensors: Iterable[tuple[str, Tensor]], *, backend: Backend, ranks: Alone = ALONE
) -> PlacedDecoder:
    """Place the decoder with these tensors on the backend's device, without rows.

    With `ranks`, sizes and tensors are the share of one rank (llm/split.py). A layer is converted to the device's
    layout when all its tensors have arrived, and its original tensors are then released. The peak memory is therefore
    one model and one layer, if `tensors` keeps no references. Raises as `decoder_from_state`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config.decoder)
    operators = backend.choose_operators(config.decoder, dtype=config.dtype, wanted=config.operators, mode=config.mode)
    load_stream(decoder, tensors, device=backend.device, finish=partial(backend.prepare, wanted=config.operators))
    decoder = decoder.to(backend.device)
    use_operators(decoder, operators)
    use_ranks(decoder, ranks)
    backend.empty_caches()
    return PlacedDecoder(decoder=decoder, config=config, backend=backend, operators=operators)
