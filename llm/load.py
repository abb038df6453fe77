"""From a decoder's state dict to a runner on a device."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.memory_plan import MemoryPlan, plan_memory
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, use_operators
from llama_adapter.llm.runners.base import Runner
from llama_adapter.llm.runners.eager import EagerRunner
from llama_adapter.llm.runners.graph import GraphRunner
from llama_adapter.llm.runners.native import NativeRunner, can_run
from llama_adapter.llm.runners.shapes import BUCKETED, EXACT
from llama_adapter.runtime.devices import EAGER, Backend
from llama_adapter.runtime.devices.cpu import is_file_backed
from llama_adapter.runtime.operators import Operators
from llama_adapter.runtime.schemes.layers import load_state
from llama_adapter.runtime.schemes.state import loaded_bytes, precision_of


def decoder_from_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> LlamaAdapterDecoder:
    """Decoder for inference that shares the tensors of `state`.

    Quantised layers compute only after a backend has prepared them. Raises RuntimeError if names or shapes differ from
    those of `config`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config)
    load_state(decoder, state)
    return decoder


def planner(
    config: EngineConfig, state: Mapping[str, Tensor], *, backend: Backend, reserved: int = 0
) -> Callable[[int], MemoryPlan]:
    """Function from a number of rows to the memory plan of a runner with that many.

    `reserved` bytes of the device are for others. Weights that are on the device already need no more of it: preparing
    them releases each one. Weights in a mapped file count where the device copies them.
    """
    is_dequantised = not backend.computes_in(precision_of(state), config.dtype, wanted=config.operators)
    needed = loaded_bytes(state.values(), dtype=config.dtype, is_dequantised=is_dequantised)
    present = [tensor for tensor in state.values() if tensor.device == backend.device]
    if backend.capabilities.copies_weights:
        mapped = is_file_backed(present)
        present = [tensor for tensor, in_file in zip(present, mapped, strict=True) if not in_file]
    weights = reserved + max(needed - sum(tensor.numel() * tensor.itemsize for tensor in present), 0)
    padding = 2 if backend.capabilities.static_shapes else 1  # rows are rounded up to a power of two
    return lambda num_slots: plan_memory(replace(config, num_slots=num_slots), weights=weights, padding=padding)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedDecoder:
    """A decoder on its device, its weights in the layout that computes best. Its runners share the weights."""

    decoder: LlamaAdapterDecoder
    config: EngineConfig
    backend: Backend
    operators: Operators

    def runner(self, num_slots: int) -> Runner:
        """Runner with `num_slots` rows, whose keys and values are its own."""
        config, backend = replace(self.config, num_slots=num_slots), self.backend
        if config.mode != EAGER:
            return GraphRunner(self.decoder, config, backend=backend, operators=self.operators)
        if (kernels := backend.kernels) is not None and can_run(self.decoder):
            return NativeRunner(self.decoder, config, backend=backend, library=kernels)
        shapes = BUCKETED if backend.capabilities.static_shapes else EXACT
        return EagerRunner(self.decoder, config, backend=backend, operators=self.operators, shapes=shapes)


def place_decoder(config: EngineConfig, state: MutableMapping[str, Tensor], *, backend: Backend) -> PlacedDecoder:
    """The decoder of `state` on the backend's device, without rows.

    Empties `state`, so that each weight is released when the device has its own form of it: the peak is one model and
    one layer, not two models. Raises as `decoder_from_state`.
    """
    decoder = decoder_from_state(config.decoder, state)
    state.clear()
    decoder = decoder.to(backend.device)
    operators = backend.choose_operators(config.decoder, dtype=config.dtype, wanted=config.operators, mode=config.mode)
    backend.prepare(decoder, wanted=config.operators)
    use_operators(decoder, operators)
    return PlacedDecoder(decoder=decoder, config=config, backend=backend, operators=operators)
