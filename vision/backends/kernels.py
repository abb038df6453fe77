"""The encoder run by the C kernels on numpy arrays. Imports no torch."""

# B pictures, P patches, F numbers of a patch, T tokens, W width, Q queries, D width of the language model

from functools import partial

import numpy as np

from llama_adapter.runtime.kernels.arrays import ArrayLinear, Arrays, Blocks, LayerNorm, numbers, rounded
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.vision.backends.batches import best_batch_size, even_batches, last_cache_bytes
from llama_adapter.vision.config import VisionConfig

_QUERY_EPS = 1e-5  # of the norms of visual blocks, `block.LAYER_NORM_EPS`


class KernelEncoder:
    """A `VisionBackend` that computes what `vision.inference.HostEncoder` does."""

    name = "torch"  # as its weights are called in reports: the model's own

    def __init__(self, config: VisionConfig, arrays: Arrays, *, dtype: str, library: Library) -> None:
        """`arrays` are those of a prepared `HostEncoder`. Raises KeyError and ValueError if they do not fit."""
        clip, query = config.clip, config.query
        self._config, self._dtype, self.pixels = config, dtype, clip.pixels
        linear = partial(ArrayLinear, arrays, dtype=dtype, library=library)
        blocks = partial(Blocks, arrays, dtype=dtype, library=library)
        norm = partial(LayerNorm, arrays, dtype=dtype)
        self._patches = linear("patches.linear", num_in=3 * clip.patch_size**2, num_out=clip.width)
        count = clip.num_class_tokens
        shape = (count, clip.width)
        self._class_CW = numbers(arrays["clip.class_embedding"]).reshape(shape) if count else np.zeros(shape, "f4")
        self._positions_TW = numbers(arrays["clip.position_embedding"])
        self._pre_norm = norm("clip.pre_norm", eps=clip.norm_eps) if clip.has_pre_norm else None
        self._tower = blocks(
            "clip.blocks",
            count=clip.num_layers,
            width=clip.width,
            hidden_dim=clip.hidden_dim,
            num_heads=clip.num_heads,
            activation=clip.activation,
            eps=clip.norm_eps,
        )
        self._post_norm = norm("clip.post_norm", eps=clip.norm_eps) if clip.has_post_norm else None
        self._projection = None
        if clip.has_projection:
            self._projection = linear("clip.projection", num_in=clip.width, num_out=clip.output_dim)
        self._input = linear("query.input_projection", num_in=clip.output_dim, num_out=query.width)
        self._input_norm = norm("query.input_norm", eps=_QUERY_EPS)
        self._queries_QW = numbers(arrays["query.queries"])
        self._blocks = blocks(
            "query.blocks",
            count=query.depth,
            width=query.width,
            hidden_dim=query.mlp_dim,
            num_heads=query.num_heads,
            activation="exact_gelu",
            eps=_QUERY_EPS,
        )
        self._output = linear("query.output_projection", num_in=query.width, num_out=query.output_dim)
        self._output_norm = norm("query.output_norm", eps=_QUERY_EPS)
        itemsize = 4 if dtype == "float32" else 2
        self._largest = best_batch_size(config, itemsize=itemsize, cache_bytes=last_cache_bytes())

    def encode(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """See `VisionBackend.encode`; float32."""
        ends = np.cumsum(even_batches(len(pixels_BHWC), largest=self._largest))[:-1]
        return np.concatenate([self._encode(batch_BHWC) for batch_BHWC in np.split(pixels_BHWC, ends)])

    def _encode(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        clip, num_pictures = self._config.clip, len(pixels_BHWC)
        side, patch = clip.patches_per_side, clip.patch_size
        patches_BPF = (
            pixels_BHWC[:, : side * patch, : side * patch]
            .reshape(num_pictures, side, patch, side, patch, 3)
            .swapaxes(2, 3)  # done while they are bytes
            .reshape(num_pictures, side * side, -1)
        )
        x_BPW = rounded(self._patches(patches_BPF.astype(np.float32)), self._dtype)
        x_BTW = rounded(_behind(self._class_CW, x_BPW) + self._positions_TW, self._dtype)
        x_BTW = self._tower(x_BTW if self._pre_norm is None else self._pre_norm(x_BTW))
        x_BTW = x_BTW[:, clip.num_class_tokens :] if clip.drops_class else x_BTW
        x_BTW = x_BTW if self._post_norm is None else self._post_norm(x_BTW)
        x_BTW = x_BTW if self._projection is None else self._projection(x_BTW)
        x_BTW = _behind(self._queries_QW, self._input_norm(self._input(x_BTW)))
        num_queries = len(self._queries_QW)
        x_BQW = self._blocks(x_BTW, num_queries) if self._config.query.depth else x_BTW[:, :num_queries]
        return self._output_norm(self._output(x_BQW))

    def close(self) -> None:
        """See `VisionBackend.close`."""


def _behind(tokens_SW: np.ndarray, x_BTW: np.ndarray) -> np.ndarray:
    """[tokens ; x] for every picture, (B, S + T, W)."""
    return np.concatenate([np.broadcast_to(tokens_SW, (len(x_BTW), *tokens_SW.shape)), x_BTW], axis=1)
