"""A decoder in the C kernels on numpy arrays, with the tokens of all rows and no padding. Imports no torch."""

# A adapter layers, B pictures, Q queries, N heads, G heads of keys and values, H head size, D model width, L layers,
# R slots or rows, P places, T wanted tokens, V vocabulary

import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.program import Chosen, DecoderProgram
from llama_adapter.llm.exported.step import Step
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.draw import NO_TOKEN
from llama_adapter.llm.runners.kernel_decoder import KernelDecoder, Places, batch_of
from llama_adapter.llm.runners.ragged import Tokens, portions
from llama_adapter.llm.runners.score_layout import ScoreLayout, lay_out
from llama_adapter.runtime.kernels.arrays import Arrays, numbers, rounded, stored
from llama_adapter.runtime.kernels.library import Library


class KernelProgram(DecoderProgram):
    """See `DecoderProgram`. The cache has places for the whole context, which take memory when they are written."""

    has_sampling, runs_mixed = False, True

    def __init__(self, config: DecoderConfig, arrays: Arrays, *, dtype: str, num_slots: int, library: Library) -> None:
        """`arrays` are those of a prepared `LlamaAdapterDecoder`; `dtype` is that of activations and cache.

        Raises KeyError and ValueError if they do not fit.
        """
        self.name = f"native {library.instruction_set}"
        self._config, self._dtype = config, dtype
        places = (config.num_layers, num_slots, config.num_kv_heads, config.context, config.head_dim)
        shapes = places, config.prefix_shape(num_slots)
        self._cache, self._prefix = (Places(self._zeros(shape), self._zeros(shape)) for shape in shapes)
        self._decoder = KernelDecoder(config, arrays, dtype=dtype, library=library)
        self._kv = self._decoder.qkv[config.first_adapter_layer :]
        if config.separate_adapter_kv:
            count, sizes = config.num_adapter_layers, (config.dim, 2 * config.kv_dim)
            self._kv = [self._decoder.linear(f"adapter.kv.{index}", *sizes) for index in range(count)]
        names = [f"layers.{index}.attention.k_norm.weight" for index in range(config.num_layers)]
        self._k_norms = [numbers(arrays[name]) for name in names if name in arrays]
        self._queries_AQD, self._gates_AN = (numbers(arrays[f"adapter.{name}"]) for name in ("queries", "gates"))

    def _zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        number = np.dtype(np.float32 if self._dtype == "float32" else np.uint16)
        memory = mmap.mmap(-1, max(math.prod(shape) * number.itemsize, 1))
        return np.frombuffer(memory, number, count=math.prod(shape)).reshape(shape)

    @property
    def capacity(self) -> int:
        return self._config.context

    def reserve(self, num_places: int) -> None:
        """All places are there."""

    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        config, query_BQD = self._config, rounded(visual_query_BQD.astype(np.float32), self._dtype)
        num_pictures, width = len(query_BQD), 2 * config.kv_dim
        shape = config.prefix_shape(num_pictures)
        prefix = Prefix(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        for index in range(config.num_adapter_layers):
            kv = self._kv[index](rounded(self._queries_AQD[index] + query_BQD, self._dtype))[..., -width:]
            k_BQGH, v_BQGH = np.split(kv.reshape(num_pictures, -1, 2 * config.num_kv_heads, config.head_dim), 2, axis=2)
            if self._k_norms:
                k_BQGH = self._normed(k_BQGH, self._k_norms[config.first_adapter_layer + index])
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
            for whole, part in zip((self._prefix.k, self._prefix.v), prefix, strict=True):
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
        cache = Places(self._zeros(shape), self._zeros(shape))
        joined = (np.concatenate(parts, axis=1) for parts in zip(*prefixes, strict=True))
        prefix = Places(*(stored(part, self._dtype) for part in joined))
        rows = [(row, start, layout) for row, layout in enumerate(layouts)]
        return self._joined(portions(rows, steps=Tokens(), past_length=start), cache, prefix).logits_TV

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        for whole in (self._cache.k, self._cache.v):
            whole[:, target, :, :num_tokens] = whole[:, source, :, :num_tokens]
        for whole in (self._prefix.k, self._prefix.v):
            whole[:, target] = whole[:, source]

    def clear(self, slot: int) -> None:
        for whole in (self._cache.k, self._cache.v, self._prefix.k, self._prefix.v):
            whole[:, slot] = 0

    def close(self) -> None:
        """The memory is released with the program."""

    def _joined(self, parts: Iterable[Tokens], cache: Places, prefix: Places) -> Chosen:
        chosen = [self._run(tokens, cache, prefix) for tokens in parts]
        return chosen[0] if len(chosen) == 1 else Chosen(*map(np.concatenate, zip(*chosen, strict=True)))

    def _run(self, tokens: Tokens, cache: Places, prefix: Places) -> Chosen:
        """After each token in `logit_tokens`. Keys and values are written in place. Raises IndexError."""
        config, count = self._config, len(tokens.logit_tokens)
        self._decoder.check(tokens.ids, tokens.run_rows, tokens.places, tokens.positions, of=cache)
        x_TD = np.empty((len(tokens.ids), config.dim), np.float32)
        logits_TV, best_T = np.empty((count, config.vocab_size), np.float32), np.empty(count, np.int64)
        x, logits, best = (array.ctypes.data for array in (x_TD, logits_TV, best_T))
        self._decoder.forward(batch_of(tokens, x=x, cache=cache, prefix=prefix, logits=logits, best=best))
        return Chosen(best_T, logits_TV)


def _steps(step: Step, *, first_slot: int) -> Tokens:
    """One token of each row at its place."""
    ids, places = step.ids_RS[:, 0].tolist(), step.places_RS[:, 0].tolist()
    return Tokens.of_steps(ids, places, first_row=first_slot)
