"""A decoder in the C kernels on numpy arrays, with the tokens of all rows and no padding. Imports no torch."""

# A adapter layers, B pictures, Q queries, N heads, G heads of keys and values, H head size, D model width, L layers,
# R slots or rows, P places, T wanted tokens, V vocabulary

import ctypes
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.program import Chosen, DecoderProgram
from llama_adapter.llm.exported.step import Step
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.draw import NO_TOKEN
from llama_adapter.llm.runners.ragged import Tokens, c_numbers, portions
from llama_adapter.llm.runners.score_layout import ScoreLayout, lay_out
from llama_adapter.runtime.kernels.arrays import ArrayLinear, Arrays, numbers, rounded, stored
from llama_adapter.runtime.kernels.library import KINDS, Library
from llama_adapter.runtime.kernels.structs import ACTIVATIONS, BatchStruct, DecoderStruct, KeptStruct, LayerStruct
from llama_adapter.runtime.kernels.threads import num_threads

Cache = tuple[np.ndarray, np.ndarray]  # keys and values, (L or 1, R, G, P, H) each


class KernelProgram(DecoderProgram):
    """See `DecoderProgram`. The cache has places for the whole context, which take memory when they are written."""

    has_sampling, runs_mixed = False, True

    def __init__(self, config: DecoderConfig, arrays: Arrays, *, dtype: str, num_slots: int, library: Library) -> None:
        """`arrays` are those of a prepared `LlamaAdapterDecoder`; `dtype` is that of activations and cache.

        Raises KeyError and ValueError if they do not fit.
        """
        self.name = f"native {library.instruction_set}"
        self._config, self._dtype, self._library = config, dtype, library
        self._held: list[object] = []  # memory that the structures point to
        places = (config.num_layers, num_slots, config.num_kv_heads, config.context, config.head_dim)
        queries = (config.num_adapter_layers, num_slots, config.num_heads, config.num_queries, config.head_dim)
        self._cache = self._zeros(places), self._zeros(places)
        self._prefix = Prefix(self._zeros(queries), self._zeros(queries))
        self._struct = self._describe(arrays)
        names = {index: f"layers.{index}.attention.k_norm.weight" for index in range(config.num_layers)}
        self._k_norms = {index: numbers(arrays[name]) for index, name in names.items() if name in arrays}
        self._queries_AQD, self._gates_AN = (numbers(arrays[f"adapter.{name}"]) for name in ("queries", "gates"))

    def _zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        number = np.dtype(np.float32 if self._dtype == "float32" else np.uint16)
        memory = mmap.mmap(-1, max(int(np.prod(shape)) * number.itemsize, 1))
        return np.frombuffer(memory, number, count=int(np.prod(shape))).reshape(shape)

    def _describe(self, arrays: Arrays) -> DecoderStruct:
        config, embedding_VD = self._config, arrays["embedding.weight"]
        if embedding_VD.shape != (config.vocab_size, config.dim):
            raise ValueError(f"the embedding is {embedding_VD.shape}")
        rotaries = [config.rotary_of(layer) for layer in range(config.num_layers)]
        distinct = list(dict.fromkeys(rotary for rotary in rotaries if rotary is not None))
        size = config.context * config.head_dim
        tables = [
            [self._floats(arrays, f"rotaries.{index}.{part}", size) for part in ("cos", "sin")]
            for index in range(len(distinct))
        ]
        self._qkv = [
            self._linear(arrays, f"layers.{layer}.attention.qkv", config.dim, config.attention_dim + 2 * config.kv_dim)
            for layer in range(config.num_layers)
        ]
        self._kv = [
            self._linear(arrays, f"adapter.kv.{index}", config.dim, 2 * config.kv_dim)
            for index in range(config.num_adapter_layers if config.separate_adapter_kv else 0)
        ]
        layers = [
            self._layer(arrays, index, [None, None] if rotary is None else tables[distinct.index(rotary)])
            for index, rotary in enumerate(rotaries)
        ]
        self._held.append(embedding_VD)
        return DecoderStruct(
            dim=config.dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            first_adapter_layer=config.first_adapter_layer,
            num_queries=config.num_queries,
            norm_eps=config.norm_eps,
            score_cap=config.score_cap,
            logit_cap=config.logit_cap,
            activation=ACTIVATIONS[config.activation],
            norms_all_heads=config.qk_norm == "all",
            kept_type=KINDS[self._dtype],
            embedding_type=KINDS["float32" if embedding_VD.dtype == np.float32 else "bfloat16"],
            embedding=embedding_VD.ctypes.data,
            layers=(LayerStruct * config.num_layers)(*layers),
            norm=self._floats(arrays, "norm.weight", config.dim),
            head=self._linear(arrays, "head", config.dim, config.vocab_size).struct,
            adds_residual=True,
        )

    def _layer(self, arrays: Arrays, index: int, table: Sequence[int | None]) -> LayerStruct:
        config, name = self._config, f"layers.{index}"
        gate_up = self._linear(arrays, f"{name}.feed_forward.gate_up", config.dim, 2 * config.ffn_dim)
        norms = ("attention_norm", "feed_forward_norm", "attention_out_norm", "feed_forward_out_norm")
        heads = {"attention.q_norm": config.num_heads, "attention.k_norm": config.num_kv_heads}
        widths = dict.fromkeys(norms, config.dim)
        for norm, count in heads.items():
            widths[norm] = config.head_dim * (count if config.qk_norm == "all" else 1)
        found = {
            norm.rpartition(".")[2]: self._floats(arrays, f"{name}.{norm}.weight", width)
            for norm, width in widths.items()
            if f"{name}.{norm}.weight" in arrays
        }
        return LayerStruct(
            **found,
            rotary_cos=table[0],
            rotary_sin=table[1],
            window=config.window_of(index),
            qkv=self._qkv[index].struct,
            out=self._linear(arrays, f"{name}.attention.out", config.attention_dim, config.dim).struct,
            gate=gate_up.part(0, config.ffn_dim),
            up=gate_up.part(config.ffn_dim, config.ffn_dim),
            down=self._linear(arrays, f"{name}.feed_forward.down", config.ffn_dim, config.dim).struct,
        )

    def _linear(self, arrays: Arrays, name: str, num_in: int, num_out: int) -> ArrayLinear:
        layer = ArrayLinear(arrays, name, num_in=num_in, num_out=num_out, dtype=self._dtype, library=self._library)
        self._held.append(layer)
        return layer

    def _floats(self, arrays: Arrays, name: str, count: int) -> int:
        """Address of numbers in float32."""
        floats = np.ascontiguousarray(numbers(arrays[name]))
        if floats.size != count:
            raise ValueError(f"`{name}` has {floats.size} numbers, where {count} are wanted")
        self._held.append(floats)
        return floats.ctypes.data

    @property
    def capacity(self) -> int:
        return self._config.context

    def reserve(self, num_places: int) -> None:
        """All places are there."""

    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        config, query_BQD = self._config, rounded(visual_query_BQD.astype(np.float32), self._dtype)
        num_pictures, width = len(query_BQD), 2 * config.kv_dim
        shape = (config.num_adapter_layers, num_pictures, config.num_heads, config.num_queries, config.head_dim)
        prefix = Prefix(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        for index in range(config.num_adapter_layers):
            qkv = self._qkv[config.first_adapter_layer + index]
            tokens_BQD = rounded(self._queries_AQD[index] + query_BQD, self._dtype)
            kv = self._kv[index](tokens_BQD) if self._kv else qkv(tokens_BQD)[..., -width:]
            k_BQGH, v_BQGH = np.split(kv.reshape(num_pictures, -1, 2 * config.num_kv_heads, config.head_dim), 2, axis=2)
            if (weight := self._k_norms.get(config.first_adapter_layer + index)) is not None:
                k_BQGH = self._normed(k_BQGH, weight)
            k_BNQH, v_BNQH = (
                np.repeat(part.swapaxes(1, 2), config.num_heads // config.num_kv_heads, axis=1)
                for part in (k_BQGH, v_BQGH)
            )
            prefix.k[index] = k_BNQH
            prefix.v[index] = rounded(v_BNQH * self._gates_AN[index][:, None, None], self._dtype)
        return prefix

    def _normed(self, k_BQGH: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """The norm of keys, of each head or of all heads together: of as many numbers as there are weights."""
        x = k_BQGH.reshape(*k_BQGH.shape[:2], -1, weight.size)
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self._config.norm_eps))
        return rounded(x / scale * weight, self._dtype).reshape(k_BQGH.shape)

    def place(self, prefixes: Sequence[Prefix], *, first_slot: int) -> None:
        for slot, prefix in enumerate(prefixes, start=first_slot):
            for whole, part in zip(self._prefix, prefix, strict=True):
                whole[:, slot] = stored(part[:, 0], self._dtype)

    def run(self, step: Step, *, first_slot: int) -> Chosen:
        if step.ids_RS.shape[1] == 1:
            return self._run(_steps(step, first_slot=first_slot), self._cache, self._prefix)
        return self._fill(step, Tokens(), first_slot=first_slot)

    def mixed(self, decode: Step, prefill: Step, *, first_slot: int) -> Chosen:
        return self._fill(prefill, _steps(decode, first_slot=0), first_slot=first_slot)

    def _fill(self, prefill: Step, tokens: Tokens, *, first_slot: int) -> Chosen:
        """After `tokens` and each prompt."""
        lengths = prefill.wanted_T % prefill.ids_RS.shape[1] + 1
        prompts = [ids_S[:length].tolist() for ids_S, length in zip(prefill.ids_RS, lengths, strict=True)]
        rows = [(row, 0, lay_out(prompt, [(NO_TOKEN,)])) for row, prompt in enumerate(prompts, start=first_slot)]
        return self._joined(portions(rows, steps=tokens, past_length=0), self._cache, self._prefix)

    def score(self, layouts: Sequence[ScoreLayout], prefixes: Sequence[Prefix], *, start: int) -> np.ndarray:
        config, widest = self._config, max(len(layout.token_ids) for layout in layouts)
        # One layer is enough: no layer reads the keys and values of another.
        shape = (1, len(layouts), config.num_kv_heads, widest, config.head_dim)
        cache = self._zeros(shape), self._zeros(shape)
        joined = (np.concatenate(parts, axis=1) for parts in zip(*prefixes, strict=True))
        prefix = Prefix(*(stored(part, self._dtype) for part in joined))
        rows = [(row, start, layout) for row, layout in enumerate(layouts)]
        return self._joined(portions(rows, steps=Tokens(), past_length=start), cache, prefix).logits_TV

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        for whole in self._cache:
            whole[:, target, :, :num_tokens] = whole[:, source, :, :num_tokens]
        for whole in self._prefix:
            whole[:, target] = whole[:, source]

    def clear(self, slot: int) -> None:
        for whole in (*self._cache, *self._prefix):
            whole[:, slot] = 0

    def close(self) -> None:
        """The memory is released with the program."""

    def _joined(self, parts: Iterable[Tokens], cache: Cache, prefix: Prefix) -> Chosen:
        chosen = [self._run(tokens, cache, prefix) for tokens in parts]
        return chosen[0] if len(chosen) == 1 else Chosen(*map(np.concatenate, zip(*chosen, strict=True)))

    def _run(self, tokens: Tokens, cache: Cache, prefix: Prefix) -> Chosen:
        """After each token in `logit_tokens`. Keys and values (L or 1, R, G, P, H) are written in place.

        Raises IndexError for values out of range, because the kernels do not check bounds.
        """
        config, count = self._config, len(tokens.logit_tokens)
        _, num_rows, _, num_places, _ = cache[0].shape
        ranges = ((tokens.ids, config.vocab_size), (tokens.run_rows, num_rows), (tokens.places, num_places))
        for values, limit in (*ranges, (tokens.positions, config.context)):
            if min(values) < 0 or max(values) >= limit or prefix.k.shape[1] < num_rows:
                raise IndexError(f"{min(values)} to {max(values)} are out of range: there are {limit}")
        x_TD = np.empty((len(tokens.ids), config.dim), np.float32)
        logits_TV, best_T = np.empty((count, config.vocab_size), np.float32), np.empty(count, np.int64)
        batch = BatchStruct(
            num_tokens=len(tokens.ids),
            num_runs=len(tokens.run_rows),
            equal_runs=tokens.num_equal_rows(),
            ids=c_numbers(tokens.ids),
            x=x_TD.ctypes.data,
            run_rows=c_numbers(tokens.run_rows),
            run_starts=c_numbers(tokens.run_starts),
            places=c_numbers(tokens.places),
            positions=c_numbers(tokens.positions),
            shared_ends=c_numbers(tokens.shared_ends),
            starts=c_numbers(tokens.starts),
            cache=_kept(*cache),
            prefix=_kept(*prefix),
            num_logits=count,
            logit_tokens=c_numbers(tokens.logit_tokens),
            logits=logits_TV.ctypes.data,
            best=best_T.ctypes.data,
        )
        self._library.forward(ctypes.addressof(self._struct), ctypes.addressof(batch), num_threads())
        return Chosen(best_T, logits_TV)


def _steps(step: Step, *, first_slot: int) -> Tokens:
    """One token of each row at its place."""
    ids, places = step.ids_RS[:, 0].tolist(), step.places_RS[:, 0].tolist()
    return Tokens.of_steps(ids, places, first_row=first_slot)


def _kept(k: np.ndarray, v: np.ndarray) -> KeptStruct:
    """Keys and values (layers, rows, heads, P, H). One layer alone is used for all."""
    layer, row, head = (stride // k.itemsize for stride in k.strides[:3])
    layer_stride = 0 if k.shape[0] == 1 else layer
    return KeptStruct(
        k=k.ctypes.data,
        v=v.ctypes.data,
        layer_stride=layer_stride,
        row_stride=row,
        head_stride=head,
        block=k.shape[3],
    )
