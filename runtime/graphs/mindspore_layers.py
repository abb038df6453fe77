"""Layers as MindSpore cells. Importing this module imports MindSpore, so import it inside of functions only.

The parameters have no values: a graph is traced from shapes, and `mindir.py` refers to the file of its weights.
"""

# R rows, T tokens, N heads, H head size; x of linear layers is (tokens, features)

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import nn, ops
from mindspore.common.initializer import initializer

FLOAT32_MIN = -3.4028234663852886e38  # finite, because some chips saturate and have no infinity


def parameter(shape: Sequence[int], dtype: Any, *, name: str | None = None) -> Any:
    """A parameter without values.

    By default, its name is its path in the enclosing cells, as in torch's state dicts.
    """
    return mindspore.Parameter(initializer("zeros", tuple(shape), dtype), name=name, requires_grad=False)


class Linear(nn.Cell):  # type: ignore[misc]
    """y = W x + b for W (rows, columns)."""

    def __init__(self, rows: int, columns: int, dtype: Any, *, has_bias: bool = True) -> None:
        super().__init__()
        self.weight = parameter((rows, columns), dtype)
        self.bias = parameter((rows,), dtype) if has_bias else None
        self.has_bias = has_bias
        self.multiply = ops.MatMul(transpose_b=True)
        self.add = ops.BiasAdd()

    def construct(self, x: Any) -> Any:
        """x (T, columns) -> (T, rows)."""
        y = self.multiply(x, self.weight)
        if self.has_bias:
            y = self.add(y, self.bias)
        return y


class LayerNorm(nn.Cell):  # type: ignore[misc]
    """Layer norm over the last dimension."""

    def __init__(self, width: int, dtype: Any, *, eps: float) -> None:
        super().__init__()
        self.weight = parameter((width,), dtype)
        self.bias = parameter((width,), dtype)
        self.normalise = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=eps)

    def construct(self, x: Any) -> Any:
        return self.normalise(x, self.weight, self.bias)[0]


class Scores(nn.Cell):  # type: ignore[misc]
    """q k^T / sqrt(H) in float32, capped; see `capped`. q is divided first, so that float16 holds the product."""

    def __init__(self, head_dim: int, *, cap: float = 0.0) -> None:
        super().__init__()
        self.multiply = ops.BatchMatMul(transpose_b=True)
        self.scale, self.cap = head_dim**-0.5, cap

    def construct(self, q: Any, k: Any) -> Any:
        """q (R, N, S, H), k (R, N, P, H) -> (R, N, S, P)."""
        return capped(ops.cast(self.multiply(q * self.scale, k), mindspore.float32), self.cap)


def capped(x: Any, cap: float) -> Any:
    """cap * tanh(x / cap); x itself if `cap` is 0."""
    return cap * ops.tanh(x / cap) if cap else x
