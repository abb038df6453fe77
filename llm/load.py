"""From a decoder's state dict to an executor on a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.engine.engine import MAX_PREFILL_TOKENS
from llama_adapter.llm.memory_plan import MemoryPlan, check_memory, plan_memory
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, use_operators
from llama_adapter.llm.runners.eager import EagerExecutor, Executor
from llama_adapter.llm.runners.native import NativeExecutor, can_run
from llama_adapter.llm.runners.shapes import BucketedShapes, ExactShapes
from llama_adapter.runtime.devices import EAGER, Backend, OperatorChoice
from llama_adapter.runtime.operators import Operators
from llama_adapter.runtime.schemes.layers import load_state
from llama_adapter.runtime.schemes.state import loaded_bytes, precision_of


def decoder_from_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> LlamaAdapterDecoder:
    """Decoder for inference around the tensors of `state`, which are shared, not copied.

    Quantised layers compute only after a backend has prepared them. Raises RuntimeError if names or shapes differ from
    those of `config`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config)
    load_state(decoder, state)
    return decoder


def open_executor(
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    *,
    backend: Backend,
    num_slots: int,
    mode: str = EAGER,
    operators: OperatorChoice = "auto",
    reserved: int = 0,
) -> Executor:
    """Executor with `num_slots` rows around the tensors of `state`, moved to the backend's device.

    `mode` is as `resolve_mode` gives it; `reserved` bytes of the device are for others. Raises DeviceError, before
    anything large is made, when weights and slots would not fit into the device's memory.
    """
    planned = planner(config, state, backend=backend, operators=operators, reserved=reserved)
    check_memory(planned(num_slots), config, num_slots=num_slots, free=backend.free_bytes(), device=backend.name)
    return place_decoder(config, state, backend=backend, mode=mode, operators=operators).executor(num_slots)


def planner(
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    *,
    backend: Backend,
    operators: OperatorChoice = "auto",
    reserved: int = 0,
) -> Callable[[int], MemoryPlan]:
    """From a number of rows to what an executor with as many would take of the device; arguments as `open_executor`."""
    has_static_shapes = backend.capabilities.static_shapes
    copies_weights = backend.capabilities.copies_weights
    tensors = [tensor for tensor in state.values() if copies_weights or tensor.device != backend.device]
    dtype = state["embedding.weight"].dtype
    is_dequantised = not backend.computes_in(precision_of(state), dtype, wanted=operators)
    weights = reserved + loaded_bytes(tensors, dtype=dtype, is_dequantised=is_dequantised)

    def planned(num_slots: int) -> MemoryPlan:
        return plan_memory(
            config,
            dtype=dtype,
            num_slots=num_slots,
            weights=weights,
            max_prefill_tokens=MAX_PREFILL_TOKENS * (2 if has_static_shapes else 1),  # rows are rounded up
        )

    return planned


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedDecoder:
    """A decoder on its device, laid out as it computes best; executors around it share its weights."""

    decoder: LlamaAdapterDecoder
    backend: Backend
    mode: str
    operators: Operators

    def executor(self, num_slots: int) -> Executor:
        """One with so many rows; what it takes is theirs alone."""
        decoder, backend = self.decoder, self.backend
        if self.mode != EAGER:
            from llama_adapter.llm.runners.graph import GraphExecutor

            return GraphExecutor(
                decoder, backend=backend, num_slots=num_slots, mode=self.mode, operators=self.operators
            )
        if (kernels := backend.kernels) is not None and can_run(decoder):
            return NativeExecutor(decoder, backend=backend, num_slots=num_slots, library=kernels)
        shapes = BucketedShapes() if backend.capabilities.static_shapes else ExactShapes()
        return EagerExecutor(decoder, backend=backend, num_slots=num_slots, shapes=shapes, operators=self.operators)


def place_decoder(
    config: DecoderConfig,
    state: Mapping[str, Tensor],
    *,
    backend: Backend,
    mode: str = EAGER,
    operators: OperatorChoice = "auto",
) -> PlacedDecoder:
    """The decoder of `state` on the backend's device, without rows; arguments as `open_executor`."""
    decoder = decoder_from_state(config, state).to(backend.device)
    chosen = backend.choose_operators(config, dtype=state["embedding.weight"].dtype, wanted=operators, mode=mode)
    backend.prepare(decoder, wanted=operators)
    use_operators(decoder, chosen)
    return PlacedDecoder(decoder=decoder, backend=backend, mode=mode, operators=chosen)
