"""Builds the graph of a picture encoder as ONNX, part by part as in `encoder.py` and `block.py`.

Its operators are the same in opsets 17 and 18, and ATC supports them. Only the batch is dynamic, so that the graph
computes no shapes.
"""

# B pictures, S side in pixels, P patches, T tokens, K kept tokens, W width, N heads, H head size, Q queries, D outputs

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from llama_adapter.runtime.graphs.onnx_builder import OnnxBuilder
from llama_adapter.vision.block import ACTIVATIONS, QUICK_GELU_FACTOR
from llama_adapter.vision.card import GRAPH_NAME, INPUT, OUTPUT
from llama_adapter.vision.encoder import Connector, PictureEncoder, VisualQueryBlocks

if TYPE_CHECKING:
    import onnx_ir as ir


class EncoderGraph(OnnxBuilder):
    """Builds the graph of an encoder, which is on the CPU and has weights in float32 or float16."""

    def __init__(self, encoder: PictureEncoder, *, opset: int) -> None:
        super().__init__(str(encoder.dtype).removeprefix("torch."), opsets={"": opset})
        self._encoder, self._clip = encoder, encoder.clip.config
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in encoder.named_parameters()}

    def model(self) -> "ir.Model":
        """The graph from RGB pixels 0..255 (B, S, S, 3) to the visual query (B, Q, D), both in the weights' type."""
        side, query = self._clip.image_size, self._encoder.query
        self._begin()
        pixels_BSS3 = self._input(INPUT, self._float_dtype, ["batch", side, side, 3])
        x_BTW = self._features(self._patches(pixels_BSS3))
        made_BQD = self._connected(x_BTW, query) if isinstance(query, Connector) else self._queried(x_BTW, query)
        shape = ["batch", self._encoder.config.query.num_queries, self._encoder.config.query.output_dim]
        return self._model(GRAPH_NAME, [(OUTPUT, made_BQD, self._float_dtype, shape)])

    def _patches(self, pixels_BSS3: "ir.Value") -> "ir.Value":
        """Normalised and embedded patches, (B, P, W)."""
        encoder, convolution, size = self._encoder, self._encoder.clip.patch_embedding, self._clip.patch_size
        # For models of BGR, the weights are flipped instead of the pixels, because ATC may refuse a Slice by -1.
        step = -1 if encoder.config.channel_order == "bgr" else 1
        x_B3SS = self._cast(self._op("Transpose", pixels_BSS3, perm=[0, 3, 1, 2]), "float32")
        x_B3SS = self._op("Div", x_B3SS, self._scalar(255.0, "float32"))
        x_B3SS = self._op("Sub", x_B3SS, self._array("mean", encoder.mean.numpy()[::step]))
        x_B3SS = self._op("Div", x_B3SS, self._array("std", encoder.std.numpy()[::step]))
        kernel = self._array(self._names[convolution.weight], convolution.weight.detach().numpy()[:, ::step])
        bias = [] if convolution.bias is None else [self._tensor(convolution.bias)]
        sizes = {"kernel_shape": [size] * 2, "strides": [size] * 2, "pads": [0] * 4, "dilations": [1] * 2, "group": 1}
        embedded = self._op("Conv", self._cast(x_B3SS, self._float_dtype), kernel, *bias, **sizes)
        rows_BWP = self._op("Reshape", embedded, self._ints(-1, self._clip.width, self._clip.num_patches))
        return self._op("Transpose", rows_BWP, perm=[0, 2, 1])

    def _features(self, x_BTW: "ir.Value") -> "ir.Value":
        """What the tower makes of embedded patches."""
        tower, num_class_tokens, num_tokens = self._encoder.clip, self._clip.num_class_tokens, self._clip.num_tokens
        if num_class_tokens:
            x_BTW = self._prepend(tower.class_embedding, x_BTW)
        x_BTW = self._norm(self._op("Add", x_BTW, self._tensor(tower.position_embedding)), tower.pre_norm)
        for block in tower.blocks:
            x_BTW = self._block(x_BTW, block, num_tokens)
        if self._clip.drops_class and num_class_tokens:
            x_BTW = self._slice(x_BTW, num_class_tokens, num_tokens)
        return self._linear(self._norm(x_BTW, tower.post_norm), tower.projection)

    def _queried(self, features_BTW: "ir.Value", query: VisualQueryBlocks) -> "ir.Value":
        """What visual-query blocks make of features."""
        x_BTW = self._norm(self._linear(features_BTW, query.input_projection), query.input_norm)
        x_BTW = self._prepend(query.queries, x_BTW)
        num_queries, num_tokens = query.num_queries, query.num_queries + self._clip.num_features
        for block in query.blocks[:-1]:
            x_BTW = self._block(x_BTW, block, num_tokens)
        if query.blocks:
            x_BQW = self._block(x_BTW, query.blocks[-1], num_tokens, num_kept=num_queries)
        else:
            x_BQW = self._slice(x_BTW, 0, num_queries)
        return self._norm(self._linear(x_BQW, query.output_projection), query.output_norm)

    def _connected(self, x_BPW: "ir.Value", connector: Connector) -> "ir.Value":
        """What a connector makes of features."""
        each, width = connector.shuffle, self._clip.output_dim
        if each > 1:
            side = math.isqrt(self._clip.num_features) // each
            rows = self._op("Reshape", x_BPW, self._ints(-1, side, each, side, each, width))
            rows = self._op("Transpose", rows, perm=[0, 1, 3, 2, 4, 5])
            x_BPW = self._op("Reshape", rows, self._ints(-1, side * side, each * each * width))
        if not isinstance(connector.up, nn.Identity):
            x_BPW = self._activated(self._linear(x_BPW, connector.up), connector.activation)
        return self._linear(x_BPW, connector.down)

    def _block(self, x_BTW: "ir.Value", block: Any, num_tokens: int, *, num_kept: int | None = None) -> "ir.Value":
        """A `Block`. With `num_kept`, only the first tokens are computed."""
        kept_BKW = x_BTW if num_kept is None else self._slice(x_BTW, 0, num_kept)
        attended_BKW = self._attention(self._norm(x_BTW, block.norm1), block.attention, num_tokens, num_kept=num_kept)
        x_BKW = self._op("Add", kept_BKW, attended_BKW)
        hidden = self._activated(self._linear(self._norm(x_BKW, block.norm2), block.mlp.up), block.mlp.activation)
        return self._op("Add", x_BKW, self._linear(hidden, block.mlp.down))

    def _attention(self, x_BTW: "ir.Value", layer: Any, num_tokens: int, *, num_kept: int | None) -> "ir.Value":
        width, num_heads = layer.out.in_features, layer.num_heads
        parts = self._split(self._linear(x_BTW, layer.qkv), axis=2, sizes=[width] * 3)
        shape = self._ints(-1, num_tokens, num_heads, width // num_heads)
        q_BNTH, k_BNHT, v_BNTH = (
            self._op("Transpose", self._op("Reshape", part, shape), perm=perm)
            for part, perm in zip(parts, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        q_BNKH = q_BNTH if num_kept is None else self._slice(q_BNTH, 0, num_kept, axis=2)
        # q is scaled rather than the scores, which are larger and could leave the range of float16.
        scores_BNKT = self._op("MatMul", self._op("Mul", q_BNKH, self._scalar((width // num_heads) ** -0.5)), k_BNHT)
        heads_BNKH = self._op("MatMul", self._op("Softmax", scores_BNKT, axis=-1), v_BNTH)
        heads_BKNH = self._op("Transpose", heads_BNKH, perm=[0, 2, 1, 3])
        return self._linear(self._op("Reshape", heads_BKNH, self._ints(-1, num_kept or num_tokens, width)), layer.out)

    def _activated(self, x: "ir.Value", activation: Callable[[Tensor], Tensor]) -> "ir.Value":
        if activation is ACTIVATIONS["quick_gelu"]:
            return self._op("Mul", x, self._op("Sigmoid", self._op("Mul", x, self._scalar(QUICK_GELU_FACTOR))))
        if activation is ACTIVATIONS["exact_gelu"]:
            curve = self._op("Erf", self._op("Div", x, self._scalar(2**0.5)))
        else:
            cubic = self._op("Mul", self._scalar(0.044715), self._op("Pow", x, self._scalar(3.0)))
            curve = self._op("Tanh", self._op("Mul", self._scalar((2 / np.pi) ** 0.5), self._op("Add", x, cubic)))
        # In this order of the factors, onnxruntime recognises GELU.
        return self._op("Mul", x, self._op("Mul", self._scalar(0.5), self._op("Add", curve, self._scalar(1.0))))

    def _prepend(self, tokens: Tensor, x_BTW: "ir.Value") -> "ir.Value":
        """[tokens ; x] for every picture. Broadcasting adds the batch dimension."""
        zeros_B1W = self._op("Mul", self._slice(x_BTW, 0, 1), self._scalar(0.0))
        tokens_1SW = self._array(self._names[tokens], tokens.detach().numpy().reshape(1, -1, tokens.shape[-1]))
        return self._op("Concat", self._op("Add", zeros_B1W, tokens_1SW), x_BTW, axis=1)

    def _slice(self, x: "ir.Value", start: int, end: int, *, axis: int = 1) -> "ir.Value":
        return self._op("Slice", x, self._ints(start), self._ints(end), self._ints(axis), self._ints(1))

    def _norm(self, x: "ir.Value", layer: nn.LayerNorm | nn.Identity) -> "ir.Value":
        if isinstance(layer, nn.Identity):
            return x
        weights = self._tensor(layer.weight), self._tensor(layer.bias)
        return self._op("LayerNormalization", x, *weights, axis=-1, epsilon=layer.eps, stash_type=1)

    def _linear(self, x: "ir.Value", layer: nn.Linear | nn.Identity) -> "ir.Value":
        if isinstance(layer, nn.Identity):
            return x
        transposed = self._array(f"{self._names[layer.weight]}_transposed", layer.weight.detach().numpy().T)
        product = self._op("MatMul", x, transposed)
        return product if layer.bias is None else self._op("Add", product, self._tensor(layer.bias))

    def _tensor(self, parameter: Tensor) -> "ir.Value":
        return self._array(self._names[parameter], parameter.detach().numpy())
