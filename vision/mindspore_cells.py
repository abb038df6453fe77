"""The picture encoder as MindSpore cells.

Importing this module imports MindSpore, so import it inside of functions only. Parameters have no values, and the names
of the state dict of `PictureEncoder`. The exception is `patches`: the patch embedding with the normalisation folded
into it, as in `vision/pixels.py`.
"""

# B pictures, P patches row by row, T tokens (class tokens first, then patches), F tokens of the features, W width,
# N heads, H head size, D output width. Tokens of all pictures are one matrix (B * T, W).

import functools
import math
from typing import Any

import mindspore
from mindspore import nn, ops

from llama_adapter.runtime.graphs.mindspore_layers import LayerNorm, Linear, Scores, parameter
from llama_adapter.vision.config import Activation, ClipConfig, ConnectorConfig, QueryConfig, VisionConfig

_EPS = 1e-5  # of the layer norms of visual blocks


class SelfAttention(nn.Cell):  # type: ignore[misc]
    """Multi-head attention without a mask."""

    def __init__(self, width: int, dtype: Any, *, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.out = Linear(3 * width, width, dtype), Linear(width, width, dtype)
        self.num_heads, self.width, self.dtype = num_heads, width, dtype
        self.scores, self.softmax, self.multiply = Scores(width // num_heads), ops.Softmax(-1), ops.BatchMatMul()

    def construct(self, x: Any, num_tokens: int) -> Any:
        shape = (-1, num_tokens, 3, self.num_heads, self.width // self.num_heads)
        q, k, v = ops.transpose(ops.reshape(self.qkv(x), shape), (2, 0, 3, 1, 4))
        probabilities = ops.cast(self.softmax(self.scores(q, k)), self.dtype)
        heads = ops.transpose(self.multiply(probabilities, v), (0, 2, 1, 3))
        return self.out(ops.reshape(heads, (-1, self.width)))


class Mlp(nn.Cell):  # type: ignore[misc]
    """Two linear layers around CLIP's quick GELU, the exact GELU or its approximation by tanh."""

    def __init__(self, width: int, hidden: int, dtype: Any, *, activation: Activation) -> None:
        super().__init__()
        self.up, self.down = Linear(hidden, width, dtype), Linear(width, hidden, dtype)
        self.activation, self.dtype = activation, dtype

    def construct(self, x: Any) -> Any:
        return self.down(activated(self.up(x), self.activation, self.dtype))


class Block(nn.Cell):  # type: ignore[misc]
    """x += Attention(LN(x)); x += MLP(LN(x))."""

    def __init__(
        self, width: int, hidden: int, dtype: Any, *, num_heads: int, activation: Activation, eps: float = _EPS
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(width, dtype, eps=eps), LayerNorm(width, dtype, eps=eps)
        self.attention = SelfAttention(width, dtype, num_heads=num_heads)
        self.mlp = Mlp(width, hidden, dtype, activation=activation)

    def construct(self, x: Any, num_tokens: int) -> Any:
        x = x + self.attention(self.norm1(x), num_tokens)
        return x + self.mlp(self.norm2(x))


class ClipTower(nn.Cell):  # type: ignore[misc]
    """Embedded patches (B, P, W) -> features (B * F, D)."""

    def __init__(self, config: ClipConfig, dtype: Any) -> None:
        super().__init__()
        width, num_classes, eps = config.width, config.num_class_tokens, config.norm_eps
        self.num_tokens, self.num_classes, self.width = config.num_tokens, num_classes, width
        self.drops_class = config.drops_class and num_classes > 0
        if num_classes:
            self.class_embedding = parameter((width,) if num_classes == 1 else (num_classes, width), dtype)
        self.position_embedding = parameter((self.num_tokens, width), dtype)
        self.pre_norm = LayerNorm(width, dtype, eps=eps) if config.has_pre_norm else nn.Identity()
        self.post_norm = LayerNorm(width, dtype, eps=eps) if config.has_post_norm else nn.Identity()
        block = functools.partial(Block, num_heads=config.num_heads, activation=config.activation, eps=eps)
        self.blocks = nn.CellList([block(width, config.hidden_dim, dtype) for _ in range(config.num_layers)])
        has_projection = config.has_projection
        self.projection = Linear(config.output_dim, width, dtype, has_bias=False) if has_projection else nn.Identity()

    def construct(self, patches: Any) -> Any:
        x = prepend(self.class_embedding, patches) if self.num_classes else patches
        x = self.pre_norm(ops.reshape(x + self.position_embedding, (-1, self.width)))
        for block in self.blocks:
            x = block(x, self.num_tokens)
        if self.drops_class:
            x = ops.reshape(x, (-1, self.num_tokens, self.width))[:, self.num_classes :]
            x = ops.reshape(x, (-1, self.width))
        return self.projection(self.post_norm(x))


class VisualQueryBlocks(nn.Cell):  # type: ignore[misc]
    """Features (B * F, C) -> visual query (B, Q, D)."""

    def __init__(self, config: QueryConfig, dtype: Any, *, input_dim: int, num_features: int) -> None:
        super().__init__()
        width = config.width
        self.num_features, self.num_queries, self.width = num_features, config.num_queries, width
        self.output_dim = config.output_dim
        self.input_projection = Linear(width, input_dim, dtype)
        self.input_norm = LayerNorm(width, dtype, eps=_EPS)
        self.queries = parameter((config.num_queries, width), dtype)
        self.blocks = nn.CellList(
            [
                Block(width, config.mlp_dim, dtype, num_heads=config.num_heads, activation="exact_gelu")
                for _ in range(config.depth)
            ]
        )
        self.output_projection = Linear(config.output_dim, width, dtype)
        self.output_norm = LayerNorm(config.output_dim, dtype, eps=_EPS)

    def construct(self, features: Any) -> Any:
        num_tokens = self.num_queries + self.num_features
        x = self.input_norm(self.input_projection(features))
        x = prepend(self.queries, ops.reshape(x, (-1, self.num_features, self.width)))
        x = ops.reshape(x, (-1, self.width))
        for block in self.blocks:
            x = block(x, num_tokens)
        x = ops.reshape(x, (-1, num_tokens, self.width))[:, : self.num_queries]
        x = self.output_norm(self.output_projection(ops.reshape(x, (-1, self.width))))
        return ops.reshape(x, (-1, self.num_queries, self.output_dim))


class Connector(nn.Cell):  # type: ignore[misc]
    """Features (B * F, C) -> tokens of the language model (B, Q, D), row by row."""

    def __init__(self, config: ConnectorConfig, dtype: Any, *, input_dim: int, num_features: int) -> None:
        super().__init__()
        joined_dim = input_dim * config.shuffle**2
        self.activation, self.dtype, self.has_up = config.activation, dtype, config.mlp_dim > 0
        if self.has_up:
            self.up = Linear(config.mlp_dim, joined_dim, dtype, has_bias=config.has_bias)
        self.down = Linear(config.output_dim, config.mlp_dim or joined_dim, dtype, has_bias=config.has_bias)
        each, side = config.shuffle, math.isqrt(num_features) // config.shuffle
        self.is_joined, self.cut, self.joined = each > 1, (-1, side, each, side, each, input_dim), (-1, joined_dim)
        self.shape = (-1, config.num_queries, config.output_dim)

    def construct(self, features: Any) -> Any:
        if self.is_joined:
            rows = ops.transpose(ops.reshape(features, self.cut), (0, 1, 3, 2, 4, 5))
            features = ops.reshape(rows, self.joined)
        if self.has_up:
            features = activated(self.up(features), self.activation, self.dtype)
        return ops.reshape(self.down(features), self.shape)


class Encoder(nn.Cell):  # type: ignore[misc]
    """Pixels (B, S, S, 3) RGB, 0..255, in the type of the weights -> visual query or picture tokens (B, Q, D)."""

    def __init__(self, config: VisionConfig, dtype: Any) -> None:
        super().__init__()
        self.patch, self.width = config.clip.patch_size, config.clip.width
        self.side, self.dtype = config.clip.patches_per_side, dtype
        self.is_cut = self.side * self.patch < config.clip.image_size
        self.patches = Linear(self.width, 3 * self.patch**2, mindspore.float32)
        self.clip = ClipTower(config.clip, dtype)
        sizes = {"input_dim": config.clip.output_dim, "num_features": config.clip.num_features}
        if isinstance(config.query, ConnectorConfig):
            self.query = Connector(config.query, dtype, **sizes)
        else:
            self.query = VisualQueryBlocks(config.query, dtype, **sizes)

    def construct(self, pixels: Any) -> Any:
        side, patch = self.side, self.patch
        if self.is_cut:  # pixels beyond the last whole patch are not read
            pixels = pixels[:, : side * patch, : side * patch]
        cut = ops.reshape(ops.cast(pixels, mindspore.float32), (-1, side, patch, side, patch, 3))
        cut = ops.reshape(ops.transpose(cut, (0, 1, 3, 2, 4, 5)), (-1, 3 * patch * patch))
        embedded = ops.reshape(ops.cast(self.patches(cut), self.dtype), (-1, side * side, self.width))
        return self.query(self.clip(embedded))


def activated(x: Any, activation: Activation, dtype: Any) -> Any:
    """CLIP's quick GELU of x, the exact GELU or its approximation by tanh; the latter two in float32, cast to dtype."""
    if activation == "quick_gelu":
        return x * ops.sigmoid(1.702 * x)
    x_float = ops.cast(x, mindspore.float32)
    if activation == "exact_gelu":
        x_float = 0.5 * x_float * (1.0 + ops.erf(x_float * 0.5**0.5))
    else:  # x (1 + tanh y) / 2 is x sigmoid(2 y)
        x_float = x_float * ops.sigmoid(x_float * (1.5957691216 + 0.0713548163 * x_float * x_float))
    return ops.cast(x_float, dtype)


def prepend(tokens: Any, x: Any) -> Any:
    """[tokens ; x] for every picture. Broadcasting adds the batch dimension."""
    return ops.concat((x[:, :1] * 0 + tokens, x), 1)
