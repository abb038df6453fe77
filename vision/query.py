"""The visual-query blocks: learned queries gather a picture's features into the few tokens that LLaMA reads."""

# B pictures, T picture tokens, Q queries, W width, D width of the language model

from torch import Tensor, nn

from llama_adapter.runtime.operators import random_parameter
from llama_adapter.vision.block import LAYER_NORM_EPS, Block, exact_gelu, prepend
from llama_adapter.vision.config import QueryConfig


class VisualQueryBlocks(nn.Module):
    """Projection, transformer blocks over [queries ; features], projection (LLaMA-Adapter V2, Gao et al., 2023)."""

    def __init__(self, config: QueryConfig, *, input_dim: int) -> None:
        super().__init__()
        self.num_queries = config.num_queries
        self.input_projection = nn.Linear(input_dim, config.width)
        self.input_norm = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        self.queries = random_parameter(config.num_queries, config.width, std=1.0)
        self.blocks = nn.ModuleList(
            Block(config.width, num_heads=config.num_heads, hidden_dim=config.mlp_dim, activation=exact_gelu)
            for _ in range(config.depth)
        )
        self.output_projection = nn.Linear(config.width, config.output_dim)
        self.output_norm = nn.LayerNorm(config.output_dim, eps=LAYER_NORM_EPS)

    def forward(self, features_BTC: Tensor) -> Tensor:
        """Features (B, T, C) -> visual query (B, Q, D)."""
        x_BTW = self.input_norm(self.input_projection(features_BTC))
        x_BTW = prepend(self.queries[None], x_BTW)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        visual_query_BQD: Tensor = self.output_norm(self.output_projection(x_BTW[:, : self.num_queries]))
        return visual_query_BQD
