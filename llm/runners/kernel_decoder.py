"""A decoder and batches of tokens as the C kernels read them, from numpy arrays. Imports no torch."""

# A adapter layers, B pictures or rows, Q queries, N heads, R rows, G heads of keys and values, P places, H head size,
# T tokens or blocks of a row, D model width, V vocabulary

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.ragged import Tokens
from llama_adapter.runtime.kernels.arrays import ArrayLinear, Arrays, numbers, rounded, shaped
from llama_adapter.runtime.kernels.library import KINDS, Library
from llama_adapter.runtime.kernels.structs import ACTIVATIONS, BatchStruct, DecoderStruct, KeptStruct, LayerStruct
from llama_adapter.runtime.kernels.threads import num_threads

# Norms, and the values of `DecoderConfig.norms` with which a decoder has them.
_NORMS = dict.fromkeys(("attention_norm", "feed_forward_norm"), ("before", "both")) | dict.fromkeys(
    ("attention_out_norm", "feed_forward_out_norm"), ("after", "both")
)


@dataclass(frozen=True, slots=True)
class Places:
    """Keys and values (layers, rows, G, P, H), the last two dimensions dense. One layer alone is used for all.

    With a table, rows are blocks, and each row of a batch has several; see `Blocks`.
    """

    k: np.ndarray
    v: np.ndarray
    table_BT: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        """Rows that a batch may have."""
        return len(self.k[0] if self.table_BT is None else self.table_BT)

    @property
    def num_places(self) -> int:
        """Places of a row."""
        return int(self.k.shape[3]) * (1 if self.table_BT is None else self.table_BT.shape[1])

    @property
    def struct(self) -> KeptStruct:
        """The structure for the kernels, which holds addresses only."""
        layer, row, head = (stride // self.k.itemsize for stride in self.k.strides[:3])
        return KeptStruct(
            k=self.k.ctypes.data,
            v=self.v.ctypes.data,
            layer_stride=0 if len(self.k) == 1 else layer,
            row_stride=row,
            head_stride=head,
            table=None if self.table_BT is None else self.table_BT.ctypes.data,
            blocks=0 if self.table_BT is None else self.table_BT.shape[1],
            block=self.k.shape[3],
        )


class KernelDecoder:
    """A decoder, or a rank's share of one, as one function of the kernels. It keeps the arrays that it reads."""

    def __init__(
        self, config: DecoderConfig, arrays: Arrays, *, dtype: str, library: Library, sum_address: int | None = None
    ) -> None:
        """`arrays` are those of a prepared `LlamaAdapterDecoder`; `dtype` is that of activations and cache.

        `sum_address` is that of a `SumFunction`, for a share. Raises KeyError and ValueError if the arrays do not fit.
        """
        self._config, self._arrays, self._dtype, self._library = config, arrays, dtype, library
        self._held: list[object] = []  # memory that the structures point to
        self._qkv = [
            self._linear(f"layers.{index}.attention.qkv", config.dim, config.attention_dim + 2 * config.kv_dim)
            for index in range(config.num_layers)
        ]
        embedding_VD = arrays["embedding.weight"]
        num_tokens = len(config.vocab_rows)
        if embedding_VD.shape != (num_tokens, config.dim):
            raise ValueError(f"the embedding is {embedding_VD.shape}")
        tables = [
            [self._held_floats(part_PH) for part_PH in rotary.table(config.head_dim, context=config.context)]
            for rotary in config.distinct_rotaries
        ]
        layers = [
            self._layer(index, [None, None] if table is None else tables[table])
            for index, table in enumerate(config.layer_tables)
        ]
        self._struct = DecoderStruct(
            dim=config.dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=num_tokens,
            first_adapter_layer=config.first_adapter_layer,
            num_queries=config.num_queries,
            norm_eps=config.norm_eps,
            score_cap=config.score_cap,
            logit_cap=config.logit_cap,
            activation=ACTIVATIONS[config.activation],
            norms_all_heads=config.qk_norm == "all",
            kept_type=KINDS[dtype],
            embedding_type=KINDS["float32" if embedding_VD.dtype == np.float32 else "bfloat16"],
            embedding=embedding_VD.ctypes.data,
            layers=(LayerStruct * config.num_layers)(*layers),
            norm=self._floats("norm.weight", config.dim),
            head=self._linear("head", config.dim, num_tokens).struct,
            sum=sum_address,
            adds_residual=config.rank == 0,
        )

        self.linears = [layer for layer in self._held if isinstance(layer, ArrayLinear)]  # of a step
        self._adapter_kv, count = self._qkv[config.first_adapter_layer :], config.num_adapter_layers
        if config.separate_adapter_kv:
            width = 2 * config.kv_dim
            self._adapter_kv = [self._linear(f"adapter.kv.{index}", config.dim, width) for index in range(count)]
        self._queries_AQD = shaped(arrays, "adapter.queries", count, config.num_queries, config.dim)
        self._gates_AN = shaped(arrays, "adapter.gates", count, config.num_heads)

    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        """Visual queries, float32 -> prefix (A, B, N, Q, H), float32. See `llm.model.adapter.Adapter`."""
        config, query_BQD = self._config, rounded(visual_query_BQD, self._dtype)
        num_pictures, width = len(query_BQD), 2 * config.kv_dim
        shape = config.prefix_shape(num_pictures)
        prefix = Prefix(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        for index in range(config.num_adapter_layers):
            name = f"layers.{config.first_adapter_layer + index}.attention"
            kv = self._adapter_kv[index](rounded(self._queries_AQD[index] + query_BQD, self._dtype))[..., -width:]
            if config.separate_adapter_kv:
                kv = rounded(kv + rounded(numbers(self._arrays[f"{name}.qkv.bias"])[-width:], self._dtype), self._dtype)
            k_BQGH, v_BQGH = np.split(kv.reshape(num_pictures, -1, 2 * config.num_kv_heads, config.head_dim), 2, axis=2)
            if config.qk_norm != "none":
                k_BQGH = self._normed(k_BQGH, numbers(self._arrays[f"{name}.k_norm.weight"]))
            k_BNQH, v_BNQH = (np.repeat(part.swapaxes(1, 2), config.group, axis=1) for part in (k_BQGH, v_BQGH))
            prefix.k[index] = k_BNQH
            prefix.v[index] = rounded(v_BNQH * self._gates_AN[index][:, None, None], self._dtype)
        return prefix

    def _normed(self, k_BQGH: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """The norm of keys, of each head or of all heads together: of as many numbers as there are weights."""
        x = k_BQGH.reshape(*k_BQGH.shape[:2], -1, weight.size)
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self._config.norm_eps))
        return rounded(x / scale * weight, self._dtype).reshape(k_BQGH.shape)

    def _linear(self, name: str, num_in: int, num_out: int) -> ArrayLinear:
        """A layer of these arrays."""
        layer = ArrayLinear(
            self._arrays, name, num_in=num_in, num_out=num_out, dtype=self._dtype, library=self._library
        )
        self._held.append(layer)
        return layer

    def forward(self, batch: BatchStruct) -> None:
        """Compute a batch. Raises RuntimeError if a sum over ranks failed."""
        self._library.forward(ctypes.addressof(self._struct), ctypes.addressof(batch), num_threads())

    def check(
        self, ids: Sequence[int], rows: Sequence[int], places: Sequence[int], positions: Sequence[int], *, of: Places
    ) -> None:
        """Raise IndexError for values out of range, because the kernels do not check bounds."""
        if len(places) != len(ids) or len(positions) != len(ids):
            raise IndexError(f"{len(positions)} positions of {len(ids)} tokens")
        ranges = (
            ("token", ids, self._config.vocab_size),
            ("slot", rows, of.num_rows),
            ("place", places, of.num_places),
            ("position", positions, self._config.context),
        )
        for name, values, count in ranges:
            if min(values) < 0 or max(values) >= count:
                raise IndexError(f"{name}s {min(values)} to {max(values)}: there are {count}")

    def _layer(self, index: int, table: Sequence[int | None]) -> LayerStruct:
        config, name = self._config, f"layers.{index}"
        gate_up = self._linear(f"{name}.feed_forward.gate_up", config.dim, 2 * config.ffn_dim)
        heads = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads}
        is_whole = config.qk_norm == "all"
        widths = {norm: (norm, config.dim) for norm, where in _NORMS.items() if config.norms in where}
        if config.qk_norm != "none":
            each = {norm: config.head_dim * (count if is_whole else 1) for norm, count in heads.items()}
            widths |= {norm: (f"attention.{norm}", width) for norm, width in each.items()}
        return LayerStruct(
            **{norm: self._floats(f"{name}.{own}.weight", width) for norm, (own, width) in widths.items()},
            rotary_cos=table[0],
            rotary_sin=table[1],
            window=config.window_of(index),
            qkv=self._qkv[index].struct,
            out=self._linear(f"{name}.attention.out", config.attention_dim, config.dim).struct,
            gate=gate_up.part(0, config.ffn_dim),
            up=gate_up.part(config.ffn_dim, config.ffn_dim),
            down=self._linear(f"{name}.feed_forward.down", config.ffn_dim, config.dim).struct,
        )

    def _floats(self, name: str, count: int) -> int:
        """Address of numbers in float32."""
        return self._held_floats(shaped(self._arrays, name, count))

    def _held_floats(self, floats: np.ndarray) -> int:
        self._held.append(floats)
        return int(floats.ctypes.data)


def batch_of(
    tokens: Tokens,
    x_TD: np.ndarray,
    logits_RV: np.ndarray,
    best_R: np.ndarray | None,
    *,
    cache: Places,
    prefix: Places,
    reads_ids: bool = True,
) -> BatchStruct:
    """A batch for `KernelDecoder.forward`. The caller keeps the arrays, whose addresses it holds.

    Unless it `reads_ids`, `x_TD` has the embeddings, float32. `logits_RV`, float32, and `best_R`, int64 or None, are
    for the tokens in `logit_tokens`.
    """
    return BatchStruct(
        num_tokens=len(tokens.ids),
        num_runs=len(tokens.run_rows),
        equal_runs=tokens.num_equal_rows(),
        ids=c_numbers(tokens.ids) if reads_ids else None,
        x=x_TD.ctypes.data,
        run_rows=c_numbers(tokens.run_rows),
        run_starts=c_numbers(tokens.run_starts),
        places=c_numbers(tokens.places),
        positions=c_numbers(tokens.positions),
        shared_ends=c_numbers(tokens.shared_ends),
        starts=c_numbers(tokens.starts),
        cache=cache.struct,
        prefix=prefix.struct,
        num_logits=len(tokens.logit_tokens),
        logit_tokens=c_numbers(tokens.logit_tokens),
        logits=logits_RV.ctypes.data,
        best=None if best_R is None else best_R.ctypes.data,
    )


def c_numbers(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    """The numbers as an array of C."""
    return (ctypes.c_int64 * len(values))(*values)
