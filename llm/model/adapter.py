"""The adapter: projects a picture to keys and values of each adapter layer, once per picture."""

# A adapter layers, B pictures, Q queries, N heads, G heads of keys and values, H head size, D model width

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.prefix import Prefix
from llama_adapter.runtime.operators import Linear, random_parameter


class Adapter(nn.Module):
    """Learned queries and folded gates of the adapter layers (LLaMA-Adapter, Zhang et al., 2023).

    `gates` is tanh(gate) * new_gate, (A, N). If LoRA is merged into the token projections, `kv` has the K/V weights
    without LoRA, because LoRA does not apply to the adapter. Its keys and values have the biases and the norm of those
    of tokens, and no rotation. Each query head gets a copy of its head of keys and values, since gates are per query
    head.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        num_layers = config.num_adapter_layers
        self.queries = random_parameter(num_layers, config.num_queries, config.dim, std=0.02)
        self.gates = nn.Parameter(torch.zeros(num_layers, config.num_heads))
        self.kv: nn.ModuleList | None = None
        if config.separate_adapter_kv:
            self.kv = nn.ModuleList(Linear(config.dim, 2 * config.kv_dim, bias=False) for _ in range(num_layers))

    def folded_gates(self) -> Tensor:
        """tanh(gate) * new_gate of each head, (A, N)."""
        return self.gates

    def forward(self, visual_query_BQD: Tensor, attentions: Sequence[Any]) -> Prefix:
        """Project P_j = queries_j + visual query to keys and gated values of each adapter layer j.

        `attentions` are the `Attention` modules of those layers.
        """
        keys, values = [], []
        gates_AN11 = self.folded_gates()[:, :, None, None]
        for layer, attention in enumerate(attentions):
            packed = self.project(self.queries[layer] + visual_query_BQD, layer=layer, attention=attention)
            k_BQGH, v_BQGH = packed.view(*packed.shape[:-1], 2, self.num_kv_heads, self.head_dim).unbind(2)
            keys.append(self._for_queries(attention.k_norm(k_BQGH)))
            values.append(self._for_queries(v_BQGH) * gates_AN11[layer])
        if not keys:
            empty = visual_query_BQD.new_empty(
                0, len(visual_query_BQD), self.num_heads, self.queries.shape[1], self.head_dim
            )
            return Prefix(empty, empty)
        return Prefix(torch.stack(keys), torch.stack(values))

    def project(self, tokens_BQD: Tensor, *, layer: int, attention: Any) -> Tensor:
        """Keys and values of an adapter layer, (B, Q, 2 G H)."""
        width = 2 * self.num_kv_heads * self.head_dim
        if self.kv is None:
            packed: Tensor = attention.qkv(tokens_BQD)[..., -width:]
            return packed
        projected: Tensor = self.kv[layer](tokens_BQD)
        bias: Tensor = attention.qkv.bias[-width:]
        return projected + bias.to(projected.dtype)

    def _for_queries(self, x_BQGH: Tensor) -> Tensor:
        """Each head as often as query heads read it, (B, N, Q, H); a view if they are as many."""
        x_BG1QH = x_BQGH.transpose(1, 2)[:, :, None]
        return x_BG1QH.expand(-1, -1, self.num_heads // self.num_kv_heads, -1, -1).flatten(1, 2)
