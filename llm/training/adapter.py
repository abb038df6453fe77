"""The adapter in training: gates in the form of its file, and keys and values without LoRA."""

# A adapter layers, B pictures, Q queries, N heads, D model width, G gates of a layer: N, or one for all heads

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.adapter import Adapter
from llama_adapter.llm.prefix import Prefix


class TrainableAdapter(Adapter):
    """`Adapter` that computes the factors of its values.

    They are tanh(gate) * new_gate, or the gate itself for adapters of LLaMA-Adapter V1.
    """

    def __init__(
        self, config: DecoderConfig, *, queries_AQD: Tensor, gate_AG: Tensor, new_gate_A: Tensor | None, has_tanh: bool
    ) -> None:
        """Tensors are float32. No parameter is trained until `requires_grad_` is called."""
        super().__init__(dataclasses.replace(config, separate_adapter_kv=False))
        del self.gates
        self.queries = nn.Parameter(queries_AQD, requires_grad=False)
        self.gate = nn.Parameter(gate_AG, requires_grad=False)
        self.new_gate = None if new_gate_A is None else nn.Parameter(new_gate_A, requires_grad=False)
        self.has_tanh = has_tanh

    def folded_gates(self) -> Tensor:
        """The factors, (A, G) float32. With a single query, the reference does not apply new_gate."""
        gates = self.gate.tanh() if self.has_tanh else self.gate
        if self.new_gate is not None and self.queries.shape[1] > 1:
            gates = gates * self.new_gate[:, None]
        return gates

    def forward(self, visual_query_BQD: Tensor, attentions: Sequence[Any]) -> Prefix:
        """As `Adapter`. Sums and gates are computed in float32, and the result has the type of the visual query."""
        keys, values = super().forward(visual_query_BQD, attentions)
        return Prefix(keys.to(visual_query_BQD.dtype), values.to(visual_query_BQD.dtype))

    def project(self, tokens_BQD: Tensor, *, layer: int, attention: Any) -> Tensor:
        projected: Tensor = attention.qkv.bare(tokens_BQD)
        return projected
