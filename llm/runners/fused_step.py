"""A decode step by fused operators: five calls for each layer. For devices on which each operator costs time."""

# R rows, D model width

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from llama_adapter.llm.model.kv import LayerViews
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, linears_of
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.sampler import predict
from llama_adapter.runtime.operators import StepOperators
from llama_adapter.runtime.ranks import ALONE


class FusedDecoder:
    """The weights of a decoder as the operators read them. They are shared with the decoder."""

    def __init__(self, decoder: LlamaAdapterDecoder, step: StepOperators) -> None:
        self.decoder, self.step = decoder, step
        self.layers: Sequence[tuple[Any, ...]] = [
            tuple(map(step.weights, linears_of(layer)))  # type: ignore[arg-type]
            for layer in decoder.layers
        ]
        self.head = step.weights(decoder.head)

    @property
    def can_run(self) -> bool:
        """Whether the operators can read all layers, and the decoder is whole."""
        weights = (*itertools.chain.from_iterable(self.layers), self.head)
        return all(each is not None for each in weights) and self.decoder.ranks is ALONE

    def run(self, tokens_R: Tensor, positions_R: Tensor, cache: LayerViews, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """One token of each row at its position -> the parts of a Prediction."""
        decoder, step, config = self.decoder, self.step, self.decoder.config
        table = decoder.rotary_cos, decoder.rotary_sin
        hidden = step.embed(tokens_R, decoder.embedding.weight)
        for index, (layer, weights) in enumerate(zip(decoder.layers, self.layers, strict=True)):
            qkv, out, gate_up, down = weights
            j = index - config.first_adapter_layer
            norm, next_norm = layer.attention_norm, layer.feed_forward_norm
            projected = step.project(hidden, qkv, norm=norm.weight, eps=norm.eps)  # type: ignore[arg-type, union-attr]
            own_prefix = (prefix.k[j], prefix.v[j]) if j >= 0 else None
            heads = step.attend(projected, table, cache[index], positions_R, own_prefix)
            hidden = step.add(hidden.x, heads, out)
            units = step.project(hidden, gate_up, norm=next_norm.weight, eps=next_norm.eps, with_swiglu=True)  # type: ignore[arg-type, union-attr]
            hidden = step.add(hidden.x, units, down)
        norm = decoder.norm
        dtype = decoder.rotary_cos.dtype  # float32
        logits_RV = step.project(hidden, self.head, norm=norm.weight, eps=norm.eps, dtype=dtype)
        prediction = predict(logits_RV)
        return prediction.logits_RV, prediction.best_R
