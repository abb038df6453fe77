"""The decoder as MindSpore cells: one step that returns its keys and values, and the adapter prefix.

Importing this module imports MindSpore, so import it inside of functions only. Parameters have the names of the state
dict of `LlamaAdapterDecoder`, and no values.
"""

# R rows, S tokens of the step per row, P cached positions per row, T wanted tokens, N heads, H head size,
# Q adapter queries, D model width, F feed-forward width, V vocabulary

from typing import Any

import mindspore
from mindspore import nn, ops

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.runtime.graphs.mindspore_layers import FLOAT32_MIN, Linear, Scores, parameter

_LARGEST = -FLOAT32_MIN


class RmsNorm(nn.Cell):  # type: ignore[misc]
    """Root mean square norm, computed in float32."""

    def __init__(self, dim: int, dtype: Any, *, eps: float) -> None:
        super().__init__()
        self.weight = parameter((dim,), dtype)
        self.eps, self.dtype = eps, dtype
        self.mean = ops.ReduceMean(keep_dims=True)

    def construct(self, x: Any) -> Any:
        x_float = ops.cast(x, mindspore.float32)
        scale = ops.rsqrt(self.mean(x_float * x_float, -1) + self.eps)
        return ops.cast(x_float * scale * ops.cast(self.weight, mindspore.float32), self.dtype)


class Attention(nn.Cell):  # type: ignore[misc]
    """Causal attention over the cache and the step's own tokens, plus the gated adapter attention.

    One softmax covers the scores of both. The cache is not copied: only the probabilities are divided into two parts.
    """

    def __init__(self, config: DecoderConfig, dtype: Any, *, has_cache: bool, has_prefix: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dim = config.num_heads, config.head_dim, config.dim
        self.dtype, self.has_cache, self.has_prefix = dtype, has_cache, has_prefix
        self.qkv = Linear(3 * config.dim, config.dim, dtype)
        self.out = Linear(config.dim, config.dim, dtype)
        self.scores = Scores(config.head_dim)
        self.multiply = ops.BatchMatMul()
        self.concat_last, self.softmax = ops.Concat(-1), ops.Softmax(-1)

    def construct(self, x: Any, shape: Any, rotary: Any, mask: Any, cache: Any, prefix: Any) -> Any:
        rows, tokens = shape
        packed = ops.reshape(self.qkv(x), (rows, tokens, 3, self.num_heads, self.head_dim))
        q, k, v = ops.transpose(packed, (2, 0, 3, 1, 4))
        q, k = self._rotate(q, rotary), self._rotate(k, rotary)
        scores = self.scores(q, k)
        if self.has_cache:
            scores = self.concat_last((self.scores(q, cache[0]), scores))
        scores = ops.select(mask, scores, ops.full_like(scores, FLOAT32_MIN))
        probabilities = ops.cast(self.softmax(scores), self.dtype)
        if self.has_cache:
            past = ops.shape(cache[0])[2]
            heads = self.multiply(probabilities[:, :, :, :past], cache[1])
            heads = heads + self.multiply(probabilities[:, :, :, past:], v)
        else:
            heads = self.multiply(probabilities, v)
        if self.has_prefix:
            weights = ops.cast(self.softmax(self.scores(q, prefix[0])), self.dtype)
            heads = heads + self.multiply(weights, prefix[1])
        merged = ops.reshape(ops.transpose(heads, (0, 2, 1, 3)), (-1, self.dim))
        return self.out(merged), k, v

    def _rotate(self, x: Any, rotary: Any) -> Any:
        """Half-split pairs (i, i + H/2), in float32."""
        x_float = ops.cast(x, mindspore.float32)
        half = self.head_dim // 2
        turned = self.concat_last((-x_float[:, :, :, half:], x_float[:, :, :, :half]))
        return ops.cast(x_float * rotary[0] + turned * rotary[1], self.dtype)


class FeedForward(nn.Cell):  # type: ignore[misc]
    """down(silu(gate x) * up x); gate and up are one packed projection."""

    def __init__(self, config: DecoderConfig, dtype: Any) -> None:
        super().__init__()
        self.gate_up = Linear(2 * config.ffn_dim, config.dim, dtype)
        self.down = Linear(config.dim, config.ffn_dim, dtype)
        self.width = config.ffn_dim

    def construct(self, x: Any) -> Any:
        gate_up = self.gate_up(x)
        gate = gate_up[:, : self.width]
        return self.down(gate * ops.sigmoid(gate) * gate_up[:, self.width :])


class Layer(nn.Cell):  # type: ignore[misc]
    """x += Attention(norm(x)); x += FeedForward(norm(x))."""

    def __init__(self, index: int, config: DecoderConfig, dtype: Any, *, has_cache: bool) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.dim, dtype, eps=config.norm_eps)
        self.attention = Attention(
            config,
            dtype,
            has_cache=has_cache,
            has_prefix=index >= config.first_adapter_layer,
        )
        self.feed_forward_norm = RmsNorm(config.dim, dtype, eps=config.norm_eps)
        self.feed_forward = FeedForward(config, dtype)

    def construct(self, x: Any, shape: Any, rotary: Any, mask: Any, cache: Any, prefix: Any) -> Any:
        attended, k, v = self.attention(self.attention_norm(x), shape, rotary, mask, cache, prefix)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), k, v


class Step(nn.Cell):  # type: ignore[misc]
    """One step of the decoder: an increment if `has_cache`, else a prefill.

    `mindir_graphs.py` defines its inputs and outputs.
    """

    def __init__(self, config: DecoderConfig, dtype: Any, *, has_cache: bool, has_sampling: bool) -> None:
        super().__init__()
        self.embedding = parameter((config.vocab_size, config.dim), dtype, name="embedding.weight")
        self.rotary_cos = parameter((config.context, config.head_dim), mindspore.float32, name="rotary_cos")
        self.rotary_sin = parameter((config.context, config.head_dim), mindspore.float32, name="rotary_sin")
        self.layers = nn.CellList(
            [Layer(index, config, dtype, has_cache=has_cache) for index in range(config.num_layers)]
        )
        self.norm = RmsNorm(config.dim, dtype, eps=config.norm_eps)
        self.head = Linear(config.vocab_size, config.dim, dtype, has_bias=False)
        self.choose = Choose(config.vocab_size, has_sampling=has_sampling)
        self.first_prefix = 8 if has_sampling else 4
        self.first_cache = self.first_prefix + 2 * config.num_adapter_layers
        self.first_adapter_layer, self.dim = config.first_adapter_layer, config.dim
        self.has_cache = has_cache
        self.gather = ops.Gather()

    def construct(self, *inputs: Any) -> Any:
        ids, positions, mask, wanted = inputs[0], inputs[1], inputs[2], inputs[3]
        shape = ops.shape(ids)
        x = ops.reshape(self.gather(self.embedding, ids, 0), (-1, self.dim))
        rotary = (
            ops.expand_dims(self.gather(self.rotary_cos, positions, 0), 1),
            ops.expand_dims(self.gather(self.rotary_sin, positions, 0), 1),
        )
        mask = ops.expand_dims(mask, 1)
        new: Any = ()
        for index, layer in enumerate(self.layers):
            cache: Any = ()
            prefix: Any = ()
            if self.has_cache:
                place = self.first_cache + 2 * index
                cache = (inputs[place], inputs[place + 1])
            if index >= self.first_adapter_layer:
                place = self.first_prefix + 2 * (index - self.first_adapter_layer)
                prefix = (inputs[place], inputs[place + 1])
            x, k, v = layer(x, shape, rotary, mask, cache, prefix)
            new = (*new, k, v)
        logits = ops.cast(self.head(self.norm(self.gather(x, wanted, 0))), mindspore.float32)
        return (self.choose(logits, inputs), logits, *new)


class Choose(nn.Cell):  # type: ignore[misc]
    """The next token of each row of logits, as in `llm/runners/sampler.py`; -1 for rows that are not finite."""

    def __init__(self, vocab_size: int, *, has_sampling: bool) -> None:
        super().__init__()
        self.vocab_size, self.has_sampling = vocab_size, has_sampling
        self.best, self.highest = ops.Argmax(axis=-1, output_type=mindspore.int32), ops.ReduceMax(keep_dims=False)
        self.total, self.total_kept = ops.ReduceSum(keep_dims=False), ops.ReduceSum(keep_dims=True)
        self.softmax, self.sort = ops.Softmax(-1), ops.TopK(sorted=True)

    def construct(self, logits: Any, inputs: Any) -> Any:
        best = self.best(logits)
        num_nan = self.total(ops.cast(logits != logits, mindspore.float32), -1)
        is_finite = ops.logical_and(ops.abs(self.highest(logits, -1)) <= _LARGEST, num_nan == 0)
        chosen = best
        if self.has_sampling:
            temperature = inputs[4]
            drawn = self._draw(logits, temperature, inputs[5], inputs[6], inputs[7])
            chosen = ops.select(temperature > 0, drawn, best)
        return ops.select(is_finite, chosen, ops.full_like(chosen, -1))

    def _draw(self, logits: Any, temperature: Any, top_p: Any, top_k: Any, uniform: Any) -> Any:
        divisor = ops.select(temperature > 0, temperature, ops.ones_like(temperature))
        probabilities = self.softmax(logits / ops.expand_dims(divisor, -1))
        ranked, order = self.sort(probabilities, self.vocab_size)
        zeros = ops.zeros_like(ranked)
        # Top-k is applied first. Top-p uses the renormalised probabilities.
        top_k = ops.expand_dims(top_k, -1)
        places = ops.arange(0, self.vocab_size, 1)
        limited = ops.select(ops.expand_dims(places, 0) >= top_k, zeros, ranked)
        limited = limited / self.total_kept(limited, -1)
        ranked = ops.select(ops.broadcast_to(top_k > 0, ops.shape(ranked)), limited, ranked)
        before = ops.cumsum(ranked, -1) - ranked
        kept = ops.select(before > ops.expand_dims(top_p, -1), zeros, ranked)
        cumulative = ops.cumsum(kept, -1)
        target = ops.expand_dims(uniform, -1) * cumulative[:, -1:]
        place = self.total_kept(ops.cast(cumulative <= target, mindspore.float32), -1)
        # Rounding may place the target beyond the end. The last kept token is then used.
        last = self.total_kept(ops.cast(kept > 0, mindspore.float32), -1) - 1
        place = ops.cast(ops.minimum(place, last), mindspore.int32)
        return ops.cast(ops.gather_elements(order, 1, place), mindspore.int32)[:, 0]


class PrefixProjection(nn.Cell):  # type: ignore[misc]
    """Visual query (R, Q, D) -> keys and gated values (R, N, Q, H) of every adapter layer."""

    def __init__(self, config: DecoderConfig, dtype: Any) -> None:
        super().__init__()
        shape = (config.num_adapter_layers, config.num_queries, config.dim)
        self.queries = parameter(shape, dtype, name="adapter.queries")
        self.gates = parameter((config.num_adapter_layers, config.num_heads), dtype, name="adapter.gates")
        self.projections = nn.CellList(
            [Linear(2 * config.dim, config.dim, dtype, has_bias=False) for index in range(config.num_adapter_layers)]
        )
        self.heads = (-1, config.num_queries, config.num_heads, config.head_dim)
        self.dim = config.dim

    def construct(self, visual_query: Any) -> Any:
        outputs: Any = ()
        for index, projection in enumerate(self.projections):
            tokens = ops.reshape(self.queries[index] + visual_query, (-1, self.dim))
            packed = projection(tokens)
            k = ops.transpose(ops.reshape(packed[:, : self.dim], self.heads), (0, 2, 1, 3))
            v = ops.transpose(ops.reshape(packed[:, self.dim :], self.heads), (0, 2, 1, 3))
            gate = ops.reshape(self.gates[index], (1, -1, 1, 1))
            outputs = (*outputs, k, v * gate)
        return outputs
