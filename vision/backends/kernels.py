"""The encoder run by the C kernels on numpy arrays. Imports no torch."""

# B pictures, P patches, F numbers of a patch, T tokens, W width, Q queries, D width of the language model

from collections.abc import Callable
from functools import partial

import numpy as np

from llama_adapter.runtime.kernels.arrays import ArrayLinear, Arrays, Blocks, LayerNorm, numbers, rounded
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.vision.backends.batches import best_batch_size, even_batches, last_cache_bytes
from llama_adapter.vision.config import LAYER_NORM_EPS, ClipConfig, ConnectorConfig, QueryConfig, VisionConfig
from llama_adapter.vision.pixels import patches_of


class KernelTower:
    """`FoldedPatches` and `ClipVisionTower` of a `HostEncoder`."""

    def __init__(self, config: ClipConfig, arrays: Arrays, *, dtype: str, library: Library) -> None:
        """`arrays` are those of a prepared `HostEncoder`. Raises KeyError and ValueError if they do not fit."""
        self._config, self._dtype = config, dtype
        linear = partial(ArrayLinear, arrays, num_out=config.width, dtype=dtype, library=library)
        norm = partial(LayerNorm, arrays, eps=config.norm_eps, dtype=dtype)
        self._patches = linear("patches.linear", num_in=3 * config.patch_size**2)
        shape = (config.num_class_tokens, config.width)
        self._class_CW = numbers(arrays["clip.class_embedding"]).reshape(shape) if shape[0] else np.zeros(shape, "f4")
        self._positions_TW = numbers(arrays["clip.position_embedding"])
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
        self._pre_norm = norm("clip.pre_norm") if config.has_pre_norm else _same
        self._post_norm = norm("clip.post_norm") if config.has_post_norm else _same
        self._projection: Callable[[np.ndarray], np.ndarray] = _same
        if config.has_projection:
            self._projection = linear("clip.projection", num_in=config.width, num_out=config.output_dim)

    def __call__(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """Pixels uint8 or float32 (B, S, S, 3) RGB -> features (B, F, output_dim), float32."""
        config = self._config
        patches_BPF = patches_of(pixels_BHWC, patch=config.patch_size)
        x_BPW = rounded(self._patches(patches_BPF.astype(np.float32)), self._dtype)
        x_BTW = rounded(_behind(self._class_CW, x_BPW) + self._positions_TW, self._dtype)
        x_BTW = self._blocks(self._pre_norm(x_BTW))
        x_BTW = x_BTW[:, config.num_class_tokens :] if config.drops_class else x_BTW
        return self._projection(self._post_norm(x_BTW))


class KernelQueries:
    """`VisualQueryBlocks` of a `HostEncoder`."""

    def __init__(self, config: QueryConfig, arrays: Arrays, *, input_dim: int, dtype: str, library: Library) -> None:
        """As `KernelTower`."""
        linear = partial(ArrayLinear, arrays, dtype=dtype, library=library)
        norm = partial(LayerNorm, arrays, eps=LAYER_NORM_EPS, dtype=dtype)
        self._input = linear("query.input_projection", num_in=input_dim, num_out=config.width)
        self._input_norm = norm("query.input_norm")
        self._queries_QW = numbers(arrays["query.queries"])
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
        self._output_norm = norm("query.output_norm")

    def __call__(self, features_BTC: np.ndarray) -> np.ndarray:
        """Features (B, T, C) -> visual query (B, Q, D), float32."""
        x_BTW, num_queries = self._input_norm(self._input(features_BTC)), len(self._queries_QW)
        x_BTW = _behind(self._queries_QW, x_BTW)
        x_BQW = x_BTW[:, :num_queries] if self._blocks is None else self._blocks(x_BTW, num_queries)
        return self._output_norm(self._output(x_BQW))


class KernelEncoder:
    """A `VisionBackend` that computes what `NativeEncoder` does, without torch. Not for connectors."""

    name = "torch"  # as its weights are called in reports: the model's own

    def __init__(self, config: VisionConfig, arrays: Arrays, *, dtype: str, library: Library) -> None:
        """As `KernelTower`."""
        assert not isinstance(config.query, ConnectorConfig), "models with a connector are not known"
        self.pixels = config.clip.pixels
        self._tower = KernelTower(config.clip, arrays, dtype=dtype, library=library)
        dim = config.clip.output_dim
        self._queries = KernelQueries(config.query, arrays, input_dim=dim, dtype=dtype, library=library)
        itemsize = 4 if dtype == "float32" else 2
        self._largest = best_batch_size(config, itemsize=itemsize, cache_bytes=last_cache_bytes())

    def encode(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """See `VisionBackend.encode`; float32."""
        ends = np.cumsum(even_batches(len(pixels_BHWC), largest=self._largest))[:-1]
        return np.concatenate([self._queries(self._tower(part_BHWC)) for part_BHWC in np.split(pixels_BHWC, ends)])

    def close(self) -> None:
        """See `VisionBackend.close`."""


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _behind(tokens_SW: np.ndarray, x_BTW: np.ndarray) -> np.ndarray:
    """[tokens ; x] for every picture, (B, S + T, W)."""
    return np.concatenate([np.broadcast_to(tokens_SW, (len(x_BTW), *tokens_SW.shape)), x_BTW], axis=1)
