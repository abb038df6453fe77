"""Builds the decoder's graphs as ONNX from its sizes and its weight file. No tensor is loaded.

The operators are those of ONNX opset 17, which ATC supports, except `MatMulNBits` of onnxruntime for quantised weights
and the branch for sampling.
"""

# R rows, S step tokens, P cached positions, T wanted tokens, N heads, G heads of keys and values, H head size, D width,
# Q queries, M queries that read one head of keys: those of N / G heads, S tokens each

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.step import (
    EMBEDDINGS,
    IDS,
    LOGITS,
    MASK,
    PLACES,
    POSITIONS,
    SAMPLING,
    SOURCE,
    TARGET,
    TOKENS,
    VISUAL_QUERY,
    WANTED,
    layer_ports,
    num_prefix_layers,
    stacked_ports,
)
from llama_adapter.llm.exported.weights_file import Linear, Stored, WeightsFile, external
from llama_adapter.llm.rotary import Rotary
from llama_adapter.runtime.graphs.onnx_builder import OnnxBuilder

if TYPE_CHECKING:
    import onnx_ir as ir

# How a step's keys and values are stored: in place in the cache, or returned by the graph, so that the host stores
# them. `stacked` also returns them, but has one input and one output for the keys of all layers, and the same for the
# values: (R, layers * G, P, H).
Storing = Literal["in_place", "returned", "stacked"]

_MASKED: Final = -30000.0  # a score that float16 can represent and softmax turns into 0
_CONTRIB: Final = "com.microsoft"


class GraphBuilder(OnnxBuilder):
    """Builds the graphs of a decoder that read their weights from `folder / location`."""

    def __init__(
        self, config: DecoderConfig, weights: WeightsFile, *, folder: Path, location: str, storing: Storing
    ) -> None:
        super().__init__(weights.float_dtype, opsets={"": 17, _CONTRIB: 1})
        self._config, self._weights, self._storing = config, weights, storing
        self._folder, self._location = folder, location

    def step(self, *, sampling: Literal["branch", "always", "never"], embeddings: bool = False) -> "ir.Model":
        """The graph of a step.

        Unless `sampling` is `never`, it has the ports SAMPLING. With `branch`, it does not compute sampling if all
        rows are greedy. With `embeddings`, it has the port EMBEDDINGS.
        """
        config, dtype = self._config, self._weights.float_dtype
        self._begin()
        ids_RS, positions_RS = self._input(IDS, "int32", "RS"), self._input(POSITIONS, "int32", "RS")
        places_RS = self._input(PLACES, "int32", "RS") if self._storing == "in_place" else None
        mask_RSP = self._input(MASK, "bool", ["R", "S", "P" if places_RS is not None else "P_plus_S"])
        wanted_T = self._input(WANTED, "int32", "T")
        settings = []
        if sampling != "never":
            settings = [self._input(name, "int32" if name == "top_k" else "float32", "T") for name in SAMPLING]
        given_RSD = self._input(EMBEDDINGS, dtype, ["R", "S", config.dim]) if embeddings else None
        prefix = self._layers("prefix", num_prefix_layers(config), heads=config.num_heads, places=config.num_queries)
        cache = self._layers("cache", config.num_layers, heads=config.num_kv_heads, places="P")

        shape_RS = self._op("Shape", ids_RS)
        self._shape_RSxx = self._op("Concat", shape_RS, self._ints(-1, config.head_dim), axis=0)
        masks = self._masks(mask_RSP, positions_RS, places_RS)
        rotaries = self._rotaries(positions_RS)
        indices = None if places_RS is None else self._places(places_RS, shape_RS)
        x_TD = self._op("Reshape", self._embedded(ids_RS, given_RSD), self._ints(-1, config.dim))
        stored = []
        for layer in range(config.num_layers):
            name, j = f"layers.{layer}", layer - config.first_adapter_layer
            attended_TD, kept = self._attention(
                self._norm_if_any(x_TD, f"{name}.attention_norm.weight"),
                name,
                rotary=rotaries.get(config.rotary_of(layer)),
                mask_R1SP=masks[config.window_of(layer)],
                prefix=prefix[2 * j : 2 * j + 2] if j >= 0 else [],  # none without queries
                cache=cache[2 * layer : 2 * layer + 2],
                indices=indices,
            )
            stored += kept
            x_TD = self._op("Add", x_TD, self._norm_if_any(attended_TD, f"{name}.attention_out_norm.weight"))
            normed_TD = self._norm_if_any(x_TD, f"{name}.feed_forward_norm.weight")
            computed_TD = self._feed_forward(normed_TD, name)
            x_TD = self._op("Add", x_TD, self._norm_if_any(computed_TD, f"{name}.feed_forward_out_norm.weight"))
        last_TD = self._norm(self._op("Gather", x_TD, wanted_T), "norm.weight")
        logits_TV = self._cast(self._linear(last_TD, self._weights.linears["head.weight"]), "float32")
        logits_TV = self._capped(logits_TV, config.logit_cap, dtype="float32")
        tokens_T = self._choose(logits_TV, settings, sampling=sampling)
        outputs = [(TOKENS, tokens_T, "int32", "T"), (LOGITS, logits_TV, "float32", ["T", config.vocab_size])]
        kind, places = ("kept", "P") if indices is not None else ("new", "S")
        if self._storing == "stacked":
            stored = [self._op("Concat", *stored[first::2], axis=1) for first in (0, 1)]
        num_heads = config.num_kv_heads * (config.num_layers if self._storing == "stacked" else 1)
        for name, value in zip(self._layer_ports(kind, config.num_layers), stored, strict=True):
            outputs.append((name, value, dtype, ["R", num_heads, places, config.head_dim]))
        return self._model("llama_adapter_decoder", outputs)

    def prefix(self) -> "ir.Model":
        """The graph that projects visual queries: `visual_query` (B, Q, D) -> `prefix_k_00`, ... (B, N, Q, H)."""
        config, dtype = self._config, self._weights.float_dtype
        self._begin()
        query_BQD = self._input(VISUAL_QUERY, dtype, ["B", config.num_queries, config.dim])
        queries, gates = self._weights.tensors["adapter.queries"], self._weights.tensors["adapter.gates"]
        outputs: list[tuple[str, ir.Value, str, Any]] = []
        names = iter(layer_ports("prefix", num_prefix_layers(config)))
        for j in range(num_prefix_layers(config)):
            tokens_BQD = self._op("Add", query_BQD, self._stored(queries.rows(j, j + 1)))
            name = f"layers.{config.first_adapter_layer + j}.attention"
            rows = config.attention_dim, config.attention_dim + 2 * config.kv_dim
            own = self._weights.linears.get(f"adapter.kv.{j}.weight")
            if own is None:
                own = self._weights.linears[f"{name}.qkv.weight"].rows(*rows)
            bias = self._weights.tensors[f"{name}.qkv.bias"].rows(*rows)
            has_bias = bias.read(self._folder / self._location).any()
            flat_TD = self._op("Reshape", tokens_BQD, self._ints(-1, config.dim))
            kv = self._linear(flat_TD, own, bias=bias if has_bias else None)
            if config.qk_norm != "none":
                k, v = self._split(kv, axis=1, sizes=[config.kv_dim] * 2)
                kv = self._op("Concat", self._heads_norm(k, f"{name}.k_norm.weight"), v, axis=1)
            packed = self._op(
                "Reshape", kv, self._ints(-1, config.num_queries, 2, config.num_kv_heads, config.head_dim)
            )
            k, v = self._split(self._op("Transpose", packed, perm=[2, 0, 3, 1, 4]), axis=0, sizes=[1, 1])
            k_BNQH, v_BNQH = (self._for_queries(self._op("Squeeze", part, self._ints(0))) for part in (k, v))
            gate = self._op("Reshape", self._stored(gates.rows(j, j + 1)), self._ints(1, config.num_heads, 1, 1))
            shape = ["B", config.num_heads, config.num_queries, config.head_dim]
            outputs += [(next(names), k_BNQH, dtype, shape), (next(names), self._op("Mul", v_BNQH, gate), dtype, shape)]
        return self._model("llama_adapter_prefix", outputs)

    def slots(self) -> "ir.Model":
        """The graph that copies the cache of slot `source` over slot `target`, in place."""
        config, dtype = self._config, self._weights.float_dtype
        self._begin()
        source, target = self._input(SOURCE, "int64", [1]), self._input(TARGET, "int64", [1])
        place = self._op("Unsqueeze", target, self._ints(0))
        shape = ["R", config.num_kv_heads, "P", config.head_dim]
        outputs = []
        ports = zip(layer_ports("cache", config.num_layers), layer_ports("kept", config.num_layers), strict=True)
        for name, kept in ports:
            whole = self._input(name, dtype, shape)
            outputs.append((kept, self._op("ScatterND", whole, place, self._op("Gather", whole, source)), dtype, shape))
        return self._model("llama_adapter_slots", outputs)

    def _embedded(self, ids_RS: "ir.Value", given_RSD: "ir.Value | None") -> "ir.Value":
        """Embeddings (R, S, D) of tokens: those of their ids, or those that are given in place of ids below 0."""
        embedding_VD = self._tensor("embedding.weight")
        if given_RSD is None:
            return self._op("Gather", embedding_VD, ids_RS)
        zero = self._scalar(0, "int32")
        is_given_RS = self._op("Less", ids_RS, zero)
        own_RSD = self._op("Gather", embedding_VD, self._op("Where", is_given_RS, zero, ids_RS))
        return self._op("Where", self._op("Unsqueeze", is_given_RS, self._ints(2)), given_RSD, own_RSD)

    def _layer_ports(self, name: str, num_layers: int) -> list[str]:
        return stacked_ports(name) if self._storing == "stacked" else layer_ports(name, num_layers)

    def _layers(self, name: str, num_layers: int, *, heads: int, places: int | str) -> "list[ir.Value]":
        """The inputs `name` of all layers, k and v in turn, (R, heads, places, H) each."""
        config, dtype = self._config, self._weights.float_dtype
        if self._storing != "stacked" or not num_layers:
            shape = ["R", heads, places, config.head_dim]
            return [self._input(port, dtype, shape) for port in layer_ports(name, num_layers)]
        shape = ["R", num_layers * heads, places, config.head_dim]
        sizes = [heads] * num_layers
        k, v = (self._split(self._input(port, dtype, shape), axis=1, sizes=sizes) for port in stacked_ports(name))
        return [part for pair in zip(k, v, strict=True) for part in pair]

    def _attention(
        self,
        x_TD: "ir.Value",
        name: str,
        *,
        rotary: "tuple[ir.Value, ir.Value] | None",
        mask_R1SP: "ir.Value",
        prefix: "Sequence[ir.Value]",
        cache: "Sequence[ir.Value]",
        indices: "ir.Value | None",
    ) -> "tuple[ir.Value, list[ir.Value]]":
        """Attention of a layer, (tokens, D), and the keys and values that it stores."""
        config = self._config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        packed = self._linear_with_bias(x_TD, f"{name}.attention.qkv")
        if config.qk_norm != "none":
            q, k, v = self._split(packed, axis=1, sizes=[config.attention_dim, config.kv_dim, config.kv_dim])
            q, k = (
                self._heads_norm(x, f"{name}.attention.{x_norm}.weight") for x, x_norm in ((q, "q_norm"), (k, "k_norm"))
            )
            packed = self._op("Concat", q, k, v, axis=1)
        packed = self._op("Reshape", packed, self._shape_RSxx)
        qk, v_RSGH = self._split(packed, axis=2, sizes=[num_heads + num_kv_heads, num_kv_heads])
        qk = qk if rotary is None else self._rotated(qk, rotary)
        q_RSNH, k_RSGH = self._split(qk, axis=2, sizes=[num_heads, num_kv_heads])
        q_RGHM = self._by_key_heads(q_RSNH)
        k_RGSH, v_RGSH = (self._op("Transpose", part, perm=[0, 2, 1, 3]) for part in (k_RSGH, v_RSGH))
        if indices is None:
            # The scores of cached and new tokens are concatenated instead of the keys, because scores are much smaller.
            scores = [self._scores(cache[0], q_RGHM), self._scores(k_RGSH, q_RGHM)]
            weights_RGMP = self._causal(self._op("Concat", *scores, axis=3), mask_R1SP)
            num_cached, num_new = (self._size(self._op("Shape", part), 2) for part in (cache[0], k_RGSH))
            sizes = self._op("Concat", num_cached, num_new, axis=0)
            on_cached, on_new = self._op_n("Split", [weights_RGMP, sizes], 2, axis=3)
            heads_RGMH = self._op("Add", self._op("MatMul", on_cached, cache[1]), self._op("MatMul", on_new, v_RGSH))
            stored = [k_RGSH, v_RGSH]
        else:
            stored = [
                self._op("ScatterND", whole, indices, self._op("Transpose", part, perm=[0, 2, 1, 3]))
                for whole, part in zip(cache, (k_RSGH, v_RSGH), strict=True)
            ]
            heads_RGMH = self._op("MatMul", self._causal(self._scores(stored[0], q_RGHM), mask_R1SP), stored[1])
        heads_RNSH = self._of_heads(heads_RGMH, num_heads)
        if prefix:
            q_RNHS = q_RGHM if config.group == 1 else self._op("Transpose", q_RSNH, perm=[0, 2, 3, 1])
            weights = self._softmax(self._scores(prefix[0], q_RNHS), None)
            heads_RNSH = self._op("Add", heads_RNSH, self._op("MatMul", weights, prefix[1]))
        heads_RSNH = self._op("Transpose", heads_RNSH, perm=[0, 2, 1, 3])
        flat_TD = self._op("Reshape", heads_RSNH, self._ints(-1, config.attention_dim))
        return self._linear_with_bias(flat_TD, f"{name}.attention.out"), stored

    def _by_key_heads(self, q_RSNH: "ir.Value") -> "ir.Value":
        """Queries, (R, G, H, M). Those that read one head of keys are together, so that no key is copied."""
        config = self._config
        if config.group == 1:
            return self._op("Transpose", q_RSNH, perm=[0, 2, 3, 1])
        grouped = self._op("Reshape", q_RSNH, self._ints(0, 0, config.num_kv_heads, config.group, config.head_dim))
        return self._op("Reshape", self._op("Transpose", grouped, perm=[0, 2, 4, 3, 1]), self._ints(0, 0, 0, -1))

    def _of_heads(self, x: "ir.Value", num_heads: int) -> "ir.Value":
        """(R, G, M, ...) as (R, N, S, ...), or the reverse."""
        return x if self._config.group == 1 else self._op("Reshape", x, self._ints(0, num_heads, -1, 0))

    def _for_queries(self, x_BGQH: "ir.Value") -> "ir.Value":
        """Each head as often as query heads read it, (B, N, Q, H)."""
        config = self._config
        if config.group == 1:
            return x_BGQH
        return self._op("Gather", x_BGQH, self._constant(np.arange(config.num_heads) // config.group), axis=1)

    def _heads_norm(self, x_TD: "ir.Value", name: str) -> "ir.Value":
        """The norm of queries or keys, (tokens, heads * H), of each head or of all heads together."""
        [size] = self._weights.tensors[name].shape
        normed = self._norm(self._op("Reshape", x_TD, self._ints(0, -1, size)), name)
        return self._op("Reshape", normed, self._ints(0, -1))

    def _scores(self, k_RGPH: "ir.Value", q_RGHM: "ir.Value") -> "ir.Value":
        """K q transposed, (R, G, M, P), so that the large keys need not be transposed."""
        products = self._op("MatMul", k_RGPH, self._op("Mul", q_RGHM, self._scalar(self._config.head_dim**-0.5)))
        return self._op("Transpose", products, perm=[0, 1, 3, 2])

    def _causal(self, scores_RGMP: "ir.Value", mask_R1SP: "ir.Value") -> "ir.Value":
        """The weights of attention to the places that the mask allows, (R, G, M, P)."""
        weights_RNSP = self._softmax(self._of_heads(scores_RGMP, self._config.num_heads), mask_R1SP)
        return self._of_heads(weights_RNSP, self._config.num_kv_heads)

    def _softmax(self, scores: "ir.Value", mask: "ir.Value | None") -> "ir.Value":
        """Softmax of the capped scores over the last dimension, in float32."""
        scores = self._capped(scores, self._config.score_cap)
        if mask is not None:
            scores = self._op("Where", mask, scores, self._scalar(_MASKED))
        weights = self._op("Softmax", self._cast(scores, "float32"), axis=-1)
        return self._cast(weights, self._weights.float_dtype)

    def _feed_forward(self, x_TD: "ir.Value", name: str) -> "ir.Value":
        width = self._config.ffn_dim
        packed = self._linear_with_bias(x_TD, f"{name}.feed_forward.gate_up")
        gate, up = self._split(packed, axis=1, sizes=[width, width])
        activated = self._op("Mul", gate, self._op("Sigmoid", self._steepened(gate)))
        return self._linear_with_bias(self._op("Mul", activated, up), f"{name}.feed_forward.down")

    def _steepened(self, x: "ir.Value") -> "ir.Value":
        """The y of the activation x sigmoid(y): x for silu, sqrt(8 / pi) (x + 0.044715 x^3) for GELU with tanh."""
        if self._config.activation == "silu":
            return x
        slope = self._op("Mul", self._op("Mul", x, x), self._scalar(0.044715 * (8 / np.pi) ** 0.5))
        return self._op("Mul", x, self._op("Add", slope, self._scalar((8 / np.pi) ** 0.5)))

    def _capped(self, x: "ir.Value", cap: float, *, dtype: str | None = None) -> "ir.Value":
        """cap * tanh(x / cap); x itself if `cap` is 0."""
        if not cap:
            return x
        return self._op("Mul", self._op("Tanh", self._op("Div", x, self._scalar(cap, dtype))), self._scalar(cap, dtype))

    def _norm_if_any(self, x: "ir.Value", name: str) -> "ir.Value":
        """The norm of this name; x itself if the decoder has none there."""
        return self._norm(x, name) if name in self._weights.tensors else x

    def _norm(self, x: "ir.Value", name: str) -> "ir.Value":
        """RMSNorm in float32, written with the operators that onnxruntime fuses."""
        wide = self._cast(x, "float32")
        squares = self._op("ReduceMean", self._op("Pow", wide, self._scalar(2.0, "float32")), axes=[-1], keepdims=1)
        root = self._op("Sqrt", self._op("Add", squares, self._scalar(self._config.norm_eps, "float32")))
        scaled = self._op("Mul", self._op("Div", wide, root), self._cast(self._tensor(name), "float32"))
        return self._cast(scaled, self._weights.float_dtype)

    def _rotaries(self, positions_RS: "ir.Value") -> "dict[Rotary | None, tuple[ir.Value, ir.Value]]":
        """cos and sin of the positions, (R, S, 1, H / 2), for each rotary embedding of the layers."""
        config = self._config
        found: dict[Rotary | None, tuple[ir.Value, ir.Value]] = {}
        for rotary in config.distinct_rotaries:
            frequencies, factors = rotary.frequencies(config.head_dim, context=config.context)
            angles = np.outer(np.arange(config.context, dtype=np.float32), frequencies)
            cos, sin = (
                self._op("Unsqueeze", self._op("Gather", self._constant(table), positions_RS), self._ints(2))
                for table in (np.cos(angles) * factors, np.sin(angles) * factors)
            )
            found[rotary] = cos, sin
        return found

    def _masks(
        self, mask_RSP: "ir.Value", positions_RS: "ir.Value", places_RS: "ir.Value | None"
    ) -> "dict[int, ir.Value]":
        """The mask for each window of the layers, (R, 1, S, P)."""
        masks = {0: self._op("Unsqueeze", mask_RSP, self._ints(1))}
        windows = self._config.windows
        if not windows:
            return masks
        keys_RP = self._positions_of_keys(mask_RSP, positions_RS, places_RS)
        columns = (self._op("Unsqueeze", part, self._ints(axis)) for part, axis in ((positions_RS, 2), (keys_RP, 1)))
        distance_RSP = self._op("Sub", *columns)
        for window in windows:
            is_near_RSP = self._op("Less", distance_RSP, self._scalar(window, "int32"))
            masks[window] = self._op("And", masks[0], self._op("Unsqueeze", is_near_RSP, self._ints(1)))
        return masks

    def _positions_of_keys(
        self, mask_RSP: "ir.Value", positions_RS: "ir.Value", places_RS: "ir.Value | None"
    ) -> "ir.Value":
        """Positions of the keys that the mask is about, (R, P). Those of earlier steps are where their place is."""
        shape_RS, num_keys = self._op("Shape", positions_RS), self._size(self._op("Shape", mask_RSP), 2)
        num_rows, num_tokens = (self._size(shape_RS, axis) for axis in (0, 1))
        num_places = num_keys if places_RS is not None else self._op("Sub", num_keys, num_tokens)
        earlier_P = self._op("Range", self._int(0), self._op("Squeeze", num_places), self._int(1))
        earlier_RP = self._op(
            "Expand", self._op("Cast", earlier_P, to=6), self._op("Concat", num_rows, num_places, axis=0)
        )
        if places_RS is None:  # the step's own keys are behind the others
            return self._op("Concat", earlier_RP, positions_RS, axis=1)
        return self._op("ScatterElements", earlier_RP, places_RS, positions_RS, axis=1)

    def _rotated(self, x_RSNH: "ir.Value", rotary: "tuple[ir.Value, ir.Value]") -> "ir.Value":
        """Half-split rotary embedding, in float32."""
        half = self._config.head_dim // 2
        first, second = self._split(self._cast(x_RSNH, "float32"), axis=3, sizes=[half, half])
        cos, sin = rotary
        turned = self._op(
            "Concat",
            self._op("Sub", self._op("Mul", first, cos), self._op("Mul", second, sin)),
            self._op("Add", self._op("Mul", second, cos), self._op("Mul", first, sin)),
            axis=3,
        )
        return self._cast(turned, self._weights.float_dtype)

    def _places(self, places_RS: "ir.Value", shape_RS: "ir.Value") -> "ir.Value":
        """Indices of (row, head, place) for ScatterND, (R, G, S, 3)."""
        wide_RS = self._op("Cast", places_RS, to=7)
        num_rows, num_tokens = (self._size(shape_RS, axis) for axis in (0, 1))
        num_heads = self._config.num_kv_heads
        shape = self._op("Concat", num_rows, self._ints(num_heads), num_tokens, self._ints(1), axis=0)
        rows_R = self._op("Range", self._int(0), self._op("Squeeze", num_rows), self._int(1))
        heads = self._constant(np.arange(num_heads, dtype=np.int64).reshape(1, -1, 1, 1))
        parts = (
            self._op("Reshape", rows_R, self._ints(-1, 1, 1, 1)),
            heads,
            self._op("Unsqueeze", wide_RS, self._ints(1, 3)),
        )
        return self._op("Concat", *(self._op("Expand", part, shape) for part in parts), axis=3)

    def _choose(self, logits_TV: "ir.Value", settings: "Sequence[ir.Value]", *, sampling: str) -> "ir.Value":
        """The token of each row; -1 for rows whose logits are not finite."""
        best_T = self._op("ArgMax", logits_TV, axis=1, keepdims=0)
        # NaN or infinity times 0 is NaN, which is not equal to 0.
        vanishing = self._op(
            "ReduceSum", self._op("Mul", logits_TV, self._scalar(0.0, "float32")), self._ints(1), keepdims=0
        )
        is_finite_T = self._op("Equal", vanishing, self._scalar(0.0, "float32"))
        if sampling == "always":
            best_T = self._sampled(logits_TV, best_T, settings)
        elif sampling == "branch":
            is_sampled = self._op(
                "Greater", self._op("ReduceMax", settings[0], keepdims=0), self._scalar(0.0, "float32")
            )
            best_T = self._if(is_sampled, logits_TV, best_T, settings)
        return self._op("Cast", self._op("Where", is_finite_T, best_T, self._int(-1)), to=6)

    def _sampled(self, logits_TV: "ir.Value", best_T: "ir.Value", settings: "Sequence[ir.Value]") -> "ir.Value":
        """Draw as in llm/runners/sampler.py: temperature, top-k, then top-p as in the LLaMA reference."""
        temperature_T, top_p_T, top_k_T, uniform_T = settings
        is_greedy_T = self._op("Equal", temperature_T, self._scalar(0.0, "float32"))
        safe_T = self._op("Where", is_greedy_T, self._scalar(1.0, "float32"), temperature_T)
        probabilities = self._op("Softmax", self._op("Div", logits_TV, self._column(safe_T)), axis=-1)
        size = self._config.vocab_size
        sorted_TV, order_TV = self._op_n("TopK", [probabilities, self._ints(size)], 2, axis=1, largest=1, sorted=1)
        top_k_T1 = self._column(self._op("Cast", top_k_T, to=7))
        whole = self._op("Equal", top_k_T1, self._int(0))
        is_kept = self._op("Or", whole, self._op("Less", self._constant(np.arange(size)[None]), top_k_T1))
        zero, one = self._scalar(0.0, "float32"), self._ints(1)
        kept_TV = self._op("Where", is_kept, sorted_TV, zero)
        total_T1 = self._op(
            "Where", whole, self._scalar(1.0, "float32"), self._op("ReduceSum", kept_TV, one, keepdims=1)
        )
        kept_TV = self._op("Div", kept_TV, total_T1)
        before_TV = self._op("Sub", self._op("CumSum", kept_TV, self._int(1)), kept_TV)
        kept_TV = self._op("Where", self._op("Greater", before_TV, self._column(top_p_T)), zero, kept_TV)
        cumulative_TV = self._op("CumSum", kept_TV, self._int(1))
        sum_T1 = self._op("Slice", cumulative_TV, self._ints(size - 1), self._ints(size), one)
        target_T1 = self._op("Mul", self._column(uniform_T), sum_T1)
        # The first place whose cumulative probability exceeds the target, but at most the last kept place.
        passed = self._op("Cast", self._op("GreaterOrEqual", target_T1, cumulative_TV), to=7)
        kept = self._op("Cast", self._op("Greater", kept_TV, zero), to=7)
        last_T1 = self._op("Sub", self._op("ReduceSum", kept, one, keepdims=1), self._int(1))
        place_T1 = self._op("Min", self._op("ReduceSum", passed, one, keepdims=1), last_T1)
        drawn_T = self._op("Squeeze", self._op("GatherElements", order_TV, place_T1, axis=1), one)
        return self._op("Where", is_greedy_T, best_T, drawn_T)

    def _if(
        self, condition: "ir.Value", logits_TV: "ir.Value", best_T: "ir.Value", settings: "Sequence[ir.Value]"
    ) -> "ir.Value":
        import onnx_ir as ir

        branches = []
        outer = self._tape
        for is_sampled in (True, False):
            self._tape = type(outer)()
            inner = self._sampled(logits_TV, best_T, settings) if is_sampled else self._op("Identity", best_T)
            name = "sampled" if is_sampled else "greedy"
            for number, node in enumerate(self._tape.nodes):
                for index, value in enumerate(node.outputs):
                    value.name = f"{name}_{number}_{index}"  # names must be unique in all branches
            branches.append(ir.Graph([], [inner], nodes=self._tape.nodes, name=name))
        self._tape = outer
        chosen: ir.Value = outer.op(
            "If", [condition], attributes={"then_branch": branches[0], "else_branch": branches[1]}
        )
        return chosen

    def _linear_with_bias(self, x_TD: "ir.Value", name: str) -> "ir.Value":
        return self._linear(x_TD, self._weights.linears[f"{name}.weight"], bias=self._weights.tensors[f"{name}.bias"])

    def _linear(self, x_TD: "ir.Value", linear: Linear, *, bias: Stored | None = None) -> "ir.Value":
        added = [] if bias is None else [self._stored(bias)]
        if linear.scales is None:
            return self._op("Gemm", x_TD, self._stored(linear.weight), *added, transB=1)
        product = self._tape.op(
            "MatMulNBits",
            [x_TD, self._stored(linear.weight), self._stored(linear.scales)],
            attributes={
                "K": linear.num_inputs,
                "N": linear.num_outputs,
                "bits": linear.bits,
                "block_size": linear.group,
                "accuracy_level": 4,  # activations in int8, as the kernels of this package compute
            },
            domain=_CONTRIB,
        )
        return self._op("Add", product, *added) if added else product

    def _size(self, shape: "ir.Value", axis: int) -> "ir.Value":
        """One size of a shape, (1,)."""
        return self._op("Slice", shape, self._ints(axis), self._ints(axis + 1))

    def _column(self, value_T: "ir.Value") -> "ir.Value":
        return self._op("Unsqueeze", value_T, self._ints(1))

    def _tensor(self, name: str) -> "ir.Value":
        return self._stored(self._weights.tensors[name])

    def _stored(self, stored: Stored) -> "ir.Value":
        return self._initializer(stored.name, lambda: external(stored, location=self._location, folder=self._folder))
