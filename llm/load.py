"""From a decoder's state dict to an executor on a device."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from llm.config import DecoderConfig
from llm.engine.engine import MAX_PREFILL_TOKENS
from llm.model.llama import LlamaAdapterDecoder, use_operators
from llm.runtime.backend import EAGER, Backend, OperatorChoice
from llm.runtime.executor import EagerExecutor, Executor
from llm.runtime.native.executor import NativeExecutor, can_run
from llm.runtime.plan import check_memory, plan_memory
from llm.runtime.quantised import SCALE
from llm.runtime.shapes import BucketedShapes, ExactShapes


def decoder_from_state(config: DecoderConfig, state: Mapping[str, Tensor]) -> LlamaAdapterDecoder:
    """Decoder for inference around the tensors of `state`, which are shared, not copied.

    A linear layer with an int8 weight gets its scales as a buffer `weight_scale`; it computes only once a backend has
    prepared it. Raises RuntimeError when keys or shapes are not those of `config`.
    """
    with torch.device("meta"):
        decoder = LlamaAdapterDecoder(config)
    decoder.requires_grad_(False)  # before whole numbers come, which have no gradient
    _expect_scales(decoder, state)
    decoder.load_state_dict(state, assign=True)
    return decoder.eval()


def _expect_scales(decoder: LlamaAdapterDecoder, state: Mapping[str, Tensor]) -> None:
    for name, child in decoder.named_modules():
        weight = state.get(f"{name}.weight")
        if isinstance(child, nn.Linear) and weight is not None and weight.dtype == torch.int8:
            child.register_buffer(SCALE, torch.empty(child.out_features, device="meta"))


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
    has_static_shapes = backend.capabilities.static_shapes
    copies_weights = backend.capabilities.copies_weights
    tensors = [tensor for tensor in state.values() if copies_weights or tensor.device != backend.device]
    dtype = state["embedding.weight"].dtype
    is_widened = not backend.computes_int8(dtype, wanted=operators)

    def itemsize(tensor: Tensor) -> int:
        return dtype.itemsize if is_widened and tensor.dtype == torch.int8 else tensor.itemsize

    plan = plan_memory(
        config,
        dtype=dtype,
        num_slots=num_slots,
        weights=reserved + sum(tensor.numel() * itemsize(tensor) for tensor in tensors),
        max_prefill_tokens=MAX_PREFILL_TOKENS * (2 if has_static_shapes else 1),  # rows are rounded up
    )
    check_memory(plan, config, num_slots=num_slots, free=backend.free_bytes(), device=backend.name)
    decoder = decoder_from_state(config, state).to(backend.device)
    chosen = backend.choose_operators(config, dtype=dtype, wanted=operators, mode=mode)
    backend.prepare(decoder, wanted=operators)
    use_operators(decoder, chosen)
    if mode != EAGER:
        from llm.runtime.graph import GraphExecutor

        return GraphExecutor(decoder, backend=backend, num_slots=num_slots, mode=mode, operators=chosen)
    if (kernels := backend.kernels) is not None and can_run(decoder):
        return NativeExecutor(decoder, backend=backend, num_slots=num_slots, library=kernels)
    shapes = BucketedShapes() if has_static_shapes else ExactShapes()
    return EagerExecutor(decoder, backend=backend, num_slots=num_slots, shapes=shapes, operators=chosen)
