"""The adapter: projects a picture to keys and values of each adapter layer, once per picture."""

# A adapter layers, B pictures, Q queries, N heads, H head size, D model width

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.prefix import Prefix
from llama_adapter.runtime.operators import Linear, random_parameter


class Adapter(nn.Module):
    """Learned queries and folded gates of the adapter layers (LLaMA-Adapter, Zhang et al., 2023).

    `gates` is tanh(gate) * new_gate, (A, N). If LoRA is merged into the token projections, `kv` has the K/V weights
    without LoRA, because LoRA does not apply to the adapter.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.width = config.num_heads, config.head_dim, config.attention_dim
        num_layers = config.num_adapter_layers
        self.queries = random_parameter(num_layers, config.num_queries, config.dim, std=0.02)
        self.gates = nn.Parameter(torch.zeros(num_layers, config.num_heads))
        self.kv: nn.ModuleList | None = None
        if config.separate_adapter_kv:
            self.kv = nn.ModuleList(Linear(config.dim, 2 * config.attention_dim, bias=False) for _ in range(num_layers))

    def folded_gates(self) -> Tensor:
        """tanh(gate) * new_gate of each head, (A, N)."""
        return self.gates

    def forward(self, visual_query_BQD: Tensor, token_projections: Sequence[Callable[[Tensor], Tensor]]) -> Prefix:
        """Project P_j = queries_j + visual query through wk and wv of each adapter layer j.

        `token_projections` are the packed q, k, v projections of those layers, which are used if `kv` is None. The bias
        of their k and v parts is zero, so these two parts of the result are products without bias.
        """
        keys, values = [], []
        gates_AN11 = self.folded_gates()[:, :, None, None]
        projections: Iterable[Callable[[Tensor], Tensor]] = token_projections if self.kv is None else self.kv
        for layer, projection in enumerate(projections):
            tokens_BQD = self.queries[layer] + visual_query_BQD
            packed = projection(tokens_BQD)
            k_BQD, v_BQD = packed[..., -2 * self.width :].chunk(2, dim=-1)
            keys.append(self._heads(k_BQD))
            values.append(self._heads(v_BQD) * gates_AN11[layer])
        if not keys:
            empty = visual_query_BQD.new_empty(
                0, len(visual_query_BQD), self.num_heads, self.queries.shape[1], self.head_dim
            )
            return Prefix(empty, empty)
        return Prefix(torch.stack(keys), torch.stack(values))

    def _heads(self, x_BQD: Tensor) -> Tensor:
        return x_BQD.view(*x_BQD.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
