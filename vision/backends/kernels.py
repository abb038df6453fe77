"""The encoder run by the C kernels on numpy arrays. Imports no torch."""

# B pictures, P patches, F numbers of a patch, T tokens, W width, C width of features, Q queries,
# D width of the language model

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from llama_adapter.runtime.kernels.arrays import ArrayLinear, Arrays, Blocks, LayerNorm, rounded, shaped, stored
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.vision.backends.batches import best_batch_size, even_batches, last_cache_bytes
from llama_adapter.vision.config import (
    LAYER_NORM_EPS,
    Activation,
    ClipConfig,
    ConnectorConfig,
    QueryConfig,
    VisionConfig,
)
from llama_adapter.vision.pixels import folded, patches_of, zero_picture


def can_run(config: ClipConfig) -> bool:
    """Whether the kernels compute the patch embedding of a tower: a linear layer with a multiple of 4 inputs."""
    return 3 * config.patch_size**2 % 4 == 0


class KernelTower:
    """The normalisation and the `ClipVisionTower` of a `PictureEncoder`."""

    def __init__(self, whole: VisionConfig, arrays: Arrays, *, dtype: str, library: Library) -> None:
        """`arrays` are those of a prepared `PictureEncoder`, or its state dict.

        Raises KeyError and ValueError if they do not fit.
        """
        self._dtype, self._config = dtype, whole.clip
        config = whole.clip
        linear = partial(ArrayLinear, arrays, num_out=config.width, dtype=dtype, library=library)
        norm = partial(LayerNorm, arrays, width=config.width, eps=config.norm_eps, dtype=dtype)
        side, shape = config.patch_size, (config.num_class_tokens, config.width)
        weight_WCPP = shaped(arrays, "clip.patch_embedding.weight", config.width, 3, side, side)
        bias_W = shaped(arrays, "clip.patch_embedding.bias", config.width) if config.has_patch_bias else None
        weight_WF, shift_W = folded(weight_WCPP, bias_W, rule=config, channel_order=whole.channel_order)
        self._class_CW = np.zeros(shape, np.float32)
        if shape[0]:  # one class token is a vector
            self._class_CW[:] = shaped(arrays, "clip.class_embedding", *shape[shape[0] == 1 :])
        self._positions_TW = shaped(arrays, "clip.position_embedding", config.num_tokens, config.width)
        self._blocks = Blocks(
            arrays,
            "clip.blocks",
            count=config.num_layers,
            width=config.width,
            hidden_dim=config.hidden_dim,
            num_heads=config.num_heads,
            activation=config.activation,
            eps=config.norm_eps,
            dtype=dtype,
            library=library,
        )
        # Pixels minus the rounded mean: errors of rounded weights do not add up, and bfloat16 holds whole pixels.
        self._mean_F = np.tile(np.rint(zero_picture(config, channel_order=whole.channel_order)[0, 0]), side**2)
        is_narrow = self._blocks.has_few_bits and library.multiplies_bfloat16
        shift_W = shift_W + weight_WF @ self._mean_F
        weight_WF = stored(weight_WF, "bfloat16" if is_narrow else "float32")
        patches = {"weight": weight_WF, "bias": shift_W}
        self._patches = ArrayLinear(patches, "", num_in=3 * side**2, num_out=config.width, library=library)
        self._pre_norm = norm("clip.pre_norm") if config.has_pre_norm else _same
        self._post_norm = norm("clip.post_norm") if config.has_post_norm else _same
        self._projection: Callable[[np.ndarray], np.ndarray] = _same
        if config.has_projection:
            self._projection = linear("clip.projection", num_in=config.width, num_out=config.output_dim)

    def __call__(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """Pixels uint8 or float32 (B, S, S, 3) RGB -> features (B, F, output_dim), float32."""
        config = self._config
        patches_BPF = patches_of(pixels_BHWC, patch=config.patch_size)
        x_BPW = rounded(self._patches(np.subtract(patches_BPF, self._mean_F, dtype=np.float32)), self._dtype)
        x_BTW = rounded(_behind(self._class_CW, x_BPW) + self._positions_TW, self._dtype)
        x_BTW = self._blocks(self._pre_norm(x_BTW))
        x_BTW = x_BTW[:, config.num_class_tokens :] if config.drops_class else x_BTW
        return self._projection(self._post_norm(x_BTW))


class KernelQueries:
    """The `VisualQueryBlocks` of a `PictureEncoder`."""

    def __init__(self, config: QueryConfig, arrays: Arrays, *, input_dim: int, dtype: str, library: Library) -> None:
        """As `KernelTower`."""
        linear = partial(ArrayLinear, arrays, dtype=dtype, library=library)
        norm = partial(LayerNorm, arrays, eps=LAYER_NORM_EPS, dtype=dtype)
        self._input = linear("query.input_projection", num_in=input_dim, num_out=config.width)
        self._input_norm = norm("query.input_norm", width=config.width)
        self._queries_QW = shaped(arrays, "query.queries", config.num_queries, config.width)
        self._blocks = None
        if config.depth:
            self._blocks = Blocks(
                arrays,
                "query.blocks",
                count=config.depth,
                width=config.width,
                hidden_dim=config.mlp_dim,
                num_heads=config.num_heads,
                activation="exact_gelu",
                eps=LAYER_NORM_EPS,
                dtype=dtype,
                library=library,
            )
        self._output = linear("query.output_projection", num_in=config.width, num_out=config.output_dim)
        self._output_norm = norm("query.output_norm", width=config.output_dim)

    def __call__(self, features_BTC: np.ndarray) -> np.ndarray:
        """Features (B, T, C) -> visual query (B, Q, D), float32."""
        x_BTW, num_queries = self._input_norm(self._input(features_BTC)), len(self._queries_QW)
        x_BTW = _behind(self._queries_QW, x_BTW)
        x_BQW = x_BTW[:, :num_queries] if self._blocks is None else self._blocks(x_BTW, num_queries)
        return self._output_norm(self._output(x_BQW))


class KernelConnector:
    """The `Connector` of a `PictureEncoder`."""

    def __init__(
        self, config: ConnectorConfig, arrays: Arrays, *, input_dim: int, dtype: str, library: Library
    ) -> None:
        """As `KernelTower`."""
        linear = partial(ArrayLinear, arrays, dtype=dtype, library=library)
        self._shuffle, self._dtype, joined_dim = config.shuffle, dtype, input_dim * config.shuffle**2
        self._activate = _ACTIVATIONS[config.activation]
        self._up = linear("query.up", num_in=joined_dim, num_out=config.mlp_dim) if config.mlp_dim else None
        self._down = linear("query.down", num_in=config.mlp_dim or joined_dim, num_out=config.output_dim)

    def __call__(self, features_BPC: np.ndarray) -> np.ndarray:
        """Features (B, P, C) -> tokens (B, P / shuffle^2, D), row by row, float32."""
        (num_pictures, num_patches, width), each = features_BPC.shape, self._shuffle
        side = math.isqrt(num_patches) // each
        if each > 1:
            rows = features_BPC.reshape(num_pictures, side, each, side, each, width).swapaxes(2, 3)
            features_BPC = rows.reshape(num_pictures, side * side, each * each * width)
        if self._up is None:
            return self._down(features_BPC)
        return self._down(rounded(self._activate(self._up(features_BPC)), self._dtype))


class KernelEncoder:
    """A `VisionBackend` that computes what a `PictureEncoder` does, without torch."""

    name = "torch"  # as its weights are called in reports: the model's own

    def __init__(self, config: VisionConfig, arrays: Arrays, *, dtype: str, library: Library) -> None:
        """As `KernelTower`."""
        self.pixels, self.arrays = config.clip.pixels, arrays
        self._tower = KernelTower(config, arrays, dtype=dtype, library=library)
        sizes: dict[str, Any] = {"input_dim": config.clip.output_dim, "dtype": dtype, "library": library}
        self._queries = (
            KernelConnector(config.query, arrays, **sizes)
            if isinstance(config.query, ConnectorConfig)
            else KernelQueries(config.query, arrays, **sizes)
        )
        itemsize = 4 if dtype == "float32" else 2
        self._largest = best_batch_size(config, itemsize=itemsize, cache_bytes=last_cache_bytes())

    def encode(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """See `VisionBackend.encode`; float32."""
        ends = np.cumsum(even_batches(len(pixels_BHWC), largest=self._largest))[:-1]
        return np.concatenate([self._queries(self._tower(part_BHWC)) for part_BHWC in np.split(pixels_BHWC, ends)])

    def close(self) -> None:
        """See `VisionBackend.close`."""


def _exact_gelu(x: np.ndarray) -> np.ndarray:
    """x * (1 + erf(x / sqrt(2))) / 2; erf within 1.5e-7, by formula 7.1.26 of Abramowitz and Stegun."""
    z = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * z)
    p = np.float32(1.061405429)
    for term in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        p = p * t + np.float32(term)
    half = p * t * np.exp(-z * z) / 2
    x = x * np.where(x < 0, half, 1 - half)
    return x


def _sigmoid_gelu(x: np.ndarray, times: np.ndarray | np.float32) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = x / (1 + np.exp(-x * times))
    return x


_ACTIVATIONS: Mapping[Activation, Callable[[np.ndarray], np.ndarray]] = {
    "quick_gelu": lambda x: _sigmoid_gelu(x, np.float32(1.702)),
    "exact_gelu": _exact_gelu,
    # (1 + tanh(y)) / 2 is sigmoid(2 y)
    "gelu_tanh": lambda x: _sigmoid_gelu(x, np.float32(math.sqrt(8 / math.pi)) * (1 + np.float32(0.044715) * x * x)),
}


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _behind(tokens_SW: np.ndarray, x_BTW: np.ndarray) -> np.ndarray:
    """[tokens ; x] for every picture, (B, S + T, W)."""
    return np.concatenate([np.broadcast_to(tokens_SW, (len(x_BTW), *tokens_SW.shape)), x_BTW], axis=1)
