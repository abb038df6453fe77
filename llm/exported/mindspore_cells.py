"""The decoder as MindSpore cells: one step that returns its keys and values, and the adapter prefix.

Importing this module imports MindSpore, so import it inside of functions only. Parameters have the names of the state
dict of `LlamaAdapterDecoder`, and no values.
"""

# R rows, S tokens of the step per row, P cached positions per row, T wanted tokens, N heads, G heads of keys and
# values, H head size, M queries that read one head of keys: those of N / G heads, S tokens each, Q adapter queries,
# D model width, F feed-forward width, V vocabulary

import math
from typing import Any

import mindspore
from mindspore import nn, ops

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.step import SAMPLING, num_prefix_layers
from llama_adapter.runtime.graphs.mindspore_layers import FLOAT32_MIN, Linear, Scores, capped, parameter

_LARGEST = -FLOAT32_MIN
_SLOPE = math.sqrt(8 / math.pi)  # of GELU's approximation by tanh


class RmsNorm(nn.Cell):  # type: ignore[misc]
    """Root mean square norm of each of `parts` equal parts of x (tokens, parts * dim), computed in float32."""

    def __init__(self, dim: int, dtype: Any, *, eps: float, parts: int = 1) -> None:
        super().__init__()
        self.weight = parameter((dim,), dtype)
        self.eps, self.dtype, self.dim, self.parts = eps, dtype, dim, parts
        self.mean = ops.ReduceMean(keep_dims=True)

    def construct(self, x: Any) -> Any:
        if self.parts > 1:
            x = ops.reshape(x, (-1, self.dim))
        x_float = ops.cast(x, mindspore.float32)
        scale = ops.rsqrt(self.mean(x_float * x_float, -1) + self.eps)
        normed = ops.cast(x_float * scale * ops.cast(self.weight, mindspore.float32), self.dtype)
        if self.parts > 1:
            normed = ops.reshape(normed, (-1, self.parts * self.dim))
        return normed


def heads_norm(config: DecoderConfig, dtype: Any, *, num_heads: int) -> RmsNorm:
    """The norm of queries or keys, (tokens, heads * H), of each head or of all heads together."""
    parts = num_heads if config.qk_norm == "head" else 1
    return RmsNorm(num_heads * config.head_dim // parts, dtype, eps=config.norm_eps, parts=parts)


class RotaryTable(nn.Cell):  # type: ignore[misc]
    """cos and sin of positions (R, S), (R, 1, S, H) each."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.cos = parameter((config.context, config.head_dim), mindspore.float32)
        self.sin = parameter((config.context, config.head_dim), mindspore.float32)
        self.gather = ops.Gather()

    def construct(self, positions: Any) -> Any:
        return (
            ops.expand_dims(self.gather(self.cos, positions, 0), 1),
            ops.expand_dims(self.gather(self.sin, positions, 0), 1),
        )


class Attention(nn.Cell):  # type: ignore[misc]
    """Causal attention over the cache and the step's own tokens, plus the gated adapter attention.

    One softmax covers the scores of both. The cache is not copied: only the probabilities are divided into two parts.
    Queries that read one head of keys are together, so that no key is copied either.
    """

    def __init__(self, index: int, config: DecoderConfig, dtype: Any, *, has_cache: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.group = config.num_heads, config.num_kv_heads, config.group
        self.head_dim, self.width, self.kv_width = config.head_dim, config.attention_dim, config.kv_dim
        self.dtype, self.has_cache = dtype, has_cache
        self.has_prefix = index >= config.num_layers - num_prefix_layers(config)
        self.has_norms = config.qk_norm != "none"
        table = config.layer_tables[index]
        self.table_index = -1 if table is None else table
        self.mask_index = (0, *config.windows).index(config.window_of(index))
        self.qkv = Linear(config.attention_dim + 2 * config.kv_dim, config.dim, dtype)
        if self.has_norms:
            self.q_norm = heads_norm(config, dtype, num_heads=config.num_heads)
            self.k_norm = heads_norm(config, dtype, num_heads=config.num_kv_heads)
        self.out = Linear(config.dim, config.attention_dim, dtype)
        self.scores = Scores(config.head_dim, cap=config.score_cap)
        self.multiply = ops.BatchMatMul()
        self.concat_last, self.softmax = ops.Concat(-1), ops.Softmax(-1)

    def construct(self, x: Any, shape: Any, tables: Any, masks: Any, cache: Any, prefix: Any) -> Any:
        """Attention of x (tokens, D), and the keys and values of the tokens, (R, G, S, H) each."""
        rows, tokens = shape
        packed = self.qkv(x)
        if self.has_norms:
            q, k = packed[:, : self.width], packed[:, self.width : self.width + self.kv_width]
            packed = self.concat_last((self.q_norm(q), self.k_norm(k), packed[:, self.width + self.kv_width :]))
        packed = ops.reshape(packed, (rows, tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim))
        packed = ops.transpose(packed, (0, 2, 1, 3))
        num_rotated = self.num_heads + self.num_kv_heads
        qk, v = packed[:, :num_rotated], packed[:, num_rotated:]
        if self.table_index >= 0:
            qk = self._rotate(qk, tables[self.table_index])
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        grouped = self._by_key_heads(q, rows)
        scores = self.scores(grouped, k)
        if self.has_cache:
            scores = self.concat_last((self.scores(grouped, cache[0]), scores))
        scores = self._by_queries(scores, shape)
        scores = ops.select(masks[self.mask_index], scores, ops.full_like(scores, FLOAT32_MIN))
        probabilities = self._by_key_heads(ops.cast(self.softmax(scores), self.dtype), rows)
        if self.has_cache:
            past = ops.shape(cache[0])[2]
            heads = self.multiply(probabilities[:, :, :, :past], cache[1])
            heads = heads + self.multiply(probabilities[:, :, :, past:], v)
        else:
            heads = self.multiply(probabilities, v)
        heads = self._by_queries(heads, shape)
        if self.has_prefix:
            weights = ops.cast(self.softmax(self.scores(q, prefix[0])), self.dtype)
            heads = heads + self.multiply(weights, prefix[1])
        merged = ops.reshape(ops.transpose(heads, (0, 2, 1, 3)), (-1, self.width))
        return self.out(merged), k, v

    def _by_key_heads(self, x: Any, rows: Any) -> Any:
        """(R, N, S, ...) as (R, G, M, ...)."""
        if self.group == 1:
            return x
        return ops.reshape(x, (rows, self.num_kv_heads, -1, ops.shape(x)[3]))

    def _by_queries(self, x: Any, shape: Any) -> Any:
        """(R, G, M, ...) as (R, N, S, ...)."""
        if self.group == 1:
            return x
        return ops.reshape(x, (shape[0], self.num_heads, shape[1], -1))

    def _rotate(self, x: Any, rotary: Any) -> Any:
        """Half-split pairs (i, i + H/2), in float32."""
        x_float = ops.cast(x, mindspore.float32)
        half = self.head_dim // 2
        turned = self.concat_last((-x_float[:, :, :, half:], x_float[:, :, :, :half]))
        return ops.cast(x_float * rotary[0] + turned * rotary[1], self.dtype)


class FeedForward(nn.Cell):  # type: ignore[misc]
    """down(activation(gate x) * up x); gate and up are one packed projection. The activation is silu or GELU."""

    def __init__(self, config: DecoderConfig, dtype: Any) -> None:
        super().__init__()
        self.gate_up = Linear(2 * config.ffn_dim, config.dim, dtype)
        self.down = Linear(config.dim, config.ffn_dim, dtype)
        self.width, self.has_gelu = config.ffn_dim, config.activation == "gelu_tanh"

    def construct(self, x: Any) -> Any:
        gate_up = self.gate_up(x)
        gate = gate_up[:, : self.width]
        steepened = gate
        if self.has_gelu:  # x (1 + tanh y) / 2 is x sigmoid(2 y)
            steepened = gate * (_SLOPE + 0.044715 * _SLOPE * (gate * gate))
        return self.down(gate * ops.sigmoid(steepened) * gate_up[:, self.width :])


class Layer(nn.Cell):  # type: ignore[misc]
    """x += norm(Attention(norm(x))); x += norm(FeedForward(norm(x))), with the norms that the decoder has."""

    def __init__(self, index: int, config: DecoderConfig, dtype: Any, *, has_cache: bool) -> None:
        super().__init__()

        def norm(*where: str) -> Any:
            return RmsNorm(config.dim, dtype, eps=config.norm_eps) if config.norms in where else nn.Identity()

        self.attention_norm = norm("before", "both")
        self.attention = Attention(index, config, dtype, has_cache=has_cache)
        self.attention_out_norm = norm("after", "both")
        self.feed_forward_norm = norm("before", "both")
        self.feed_forward = FeedForward(config, dtype)
        self.feed_forward_out_norm = norm("after", "both")

    def construct(self, x: Any, shape: Any, tables: Any, masks: Any, cache: Any, prefix: Any) -> Any:
        attended, k, v = self.attention(self.attention_norm(x), shape, tables, masks, cache, prefix)
        x = x + self.attention_out_norm(attended)
        return x + self.feed_forward_out_norm(self.feed_forward(self.feed_forward_norm(x))), k, v


class Step(nn.Cell):  # type: ignore[misc]
    """One step of the decoder: an increment if `has_cache`, else a prefill.

    `mindir_graphs.py` defines its inputs and outputs.
    """

    def __init__(
        self, config: DecoderConfig, dtype: Any, *, has_cache: bool, has_sampling: bool, has_embeddings: bool
    ) -> None:
        super().__init__()
        self.embedding = parameter((config.vocab_size, config.dim), dtype, name="embedding.weight")
        self.rotaries = nn.CellList([RotaryTable(config) for _ in config.distinct_rotaries])
        self.windows = config.windows
        self.layers = nn.CellList(
            [Layer(index, config, dtype, has_cache=has_cache) for index in range(config.num_layers)]
        )
        self.norm = RmsNorm(config.dim, dtype, eps=config.norm_eps)
        self.head = Linear(config.vocab_size, config.dim, dtype, has_bias=False)
        self.logit_cap = config.logit_cap
        self.choose = Choose(config.vocab_size, has_sampling=has_sampling)
        self.embeddings = 4 + (len(SAMPLING) if has_sampling else 0)
        self.first_prefix = self.embeddings + int(has_embeddings)
        self.first_cache = self.first_prefix + 2 * num_prefix_layers(config)
        self.first_adapter_layer, self.dim = config.num_layers - num_prefix_layers(config), config.dim
        self.has_cache, self.has_embeddings = has_cache, has_embeddings
        self.gather = ops.Gather()

    def construct(self, *inputs: Any) -> Any:
        ids, positions, mask, wanted = inputs[0], inputs[1], inputs[2], inputs[3]
        shape = ops.shape(ids)
        if self.has_embeddings:  # given in place of ids below 0
            own = self.gather(self.embedding, ops.maximum(ids, 0), 0)
            x = ops.select(ops.broadcast_to(ops.expand_dims(ids < 0, 2), ops.shape(own)), inputs[self.embeddings], own)
        else:
            x = self.gather(self.embedding, ids, 0)
        x = ops.reshape(x, (-1, self.dim))
        tables: Any = ()
        for rotary in self.rotaries:
            tables = (*tables, rotary(positions))
        masks = self._masks(mask, positions)
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
            x, k, v = layer(x, shape, tables, masks, cache, prefix)
            new = (*new, k, v)
        logits = ops.cast(self.head(self.norm(self.gather(x, wanted, 0))), mindspore.float32)
        logits = capped(logits, self.logit_cap)
        return (self.choose(logits, inputs), logits, *new)

    def _masks(self, mask: Any, positions: Any) -> Any:
        """The mask (R, S, P + S), and that of each window, (R, 1, S, P + S). Cached keys are at their positions."""
        masks: Any = (ops.expand_dims(mask, 1),)
        keys = positions
        if self.windows and self.has_cache:
            rows, num_tokens = ops.shape(positions)
            num_cached = ops.shape(mask)[2] - num_tokens
            cached = ops.broadcast_to(ops.expand_dims(ops.arange(num_cached), 0), (rows, num_cached))
            keys = ops.concat((ops.cast(cached, mindspore.int32), positions), 1)
        distance = ops.expand_dims(positions, 2) - ops.expand_dims(keys, 1)
        for window in self.windows:
            masks = (*masks, ops.logical_and(masks[0], ops.expand_dims(distance < window, 1)))
        return masks


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


class KeysValues(nn.Cell):  # type: ignore[misc]
    """Tokens (R * Q, D) of an adapter layer -> keys and values, (R, G, Q, H) each, without rotation."""

    def __init__(self, config: DecoderConfig, dtype: Any) -> None:
        super().__init__()
        self.projection = Linear(2 * config.kv_dim, config.dim, dtype)
        self.has_norm, self.width = config.qk_norm != "none", config.kv_dim
        if self.has_norm:
            self.norm = heads_norm(config, dtype, num_heads=config.num_kv_heads)
        self.shape = (-1, config.num_queries, config.num_kv_heads, config.head_dim)

    def construct(self, tokens: Any) -> Any:
        packed = self.projection(tokens)
        k, v = packed[:, : self.width], packed[:, self.width :]
        if self.has_norm:
            k = self.norm(k)
        return (
            ops.transpose(ops.reshape(k, self.shape), (0, 2, 1, 3)),
            ops.transpose(ops.reshape(v, self.shape), (0, 2, 1, 3)),
        )


class PrefixProjection(nn.Cell):  # type: ignore[misc]
    """Visual query (R, Q, D) -> keys and gated values (R, N, Q, H) of every adapter layer."""

    def __init__(self, config: DecoderConfig, dtype: Any) -> None:
        super().__init__()
        shape = (config.num_adapter_layers, config.num_queries, config.dim)
        self.queries = parameter(shape, dtype, name="adapter.queries")
        self.gates = parameter((config.num_adapter_layers, config.num_heads), dtype, name="adapter.gates")
        self.layers = nn.CellList([KeysValues(config, dtype) for _ in range(config.num_adapter_layers)])
        self.dim, self.num_kv_heads, self.group = config.dim, config.num_kv_heads, config.group
        self.shape = (-1, config.num_heads, config.num_queries, config.head_dim)

    def construct(self, visual_query: Any) -> Any:
        outputs: Any = ()
        for index, layer in enumerate(self.layers):
            k, v = layer(ops.reshape(self.queries[index] + visual_query, (-1, self.dim)))
            # Each query head gets a copy of its head of keys and values, since gates are per query head.
            gate = ops.reshape(self.gates[index], (self.num_kv_heads, self.group, 1, 1))
            v = ops.expand_dims(v, 2) * gate
            if self.group > 1:
                k = ops.expand_dims(k, 2) * ops.ones_like(gate)
            outputs = (*outputs, ops.reshape(k, self.shape), ops.reshape(v, self.shape))
        return outputs
