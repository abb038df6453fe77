"""Runs each program of the decoder as one call of the C kernels, with the tokens of all rows and no padding.

Imports torch only for ranks.
"""

# A adapter layers, B pictures, L layers, R rows, T tokens of all rows, Q queries, N heads, G heads of keys and values,
# C past tokens, H head size, D model width, V vocabulary

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.model.blocks import ArrayBlocks, Past, lazy_zeros
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import (
    DecodePlan,
    MixedPlan,
    Pictures,
    Plan,
    PrefillPlan,
    Result,
    ScorePlan,
    to_compute,
)
from llama_adapter.llm.runners.draw import NO_TOKEN
from llama_adapter.llm.runners.host import HostRunner, Prediction, as_array, scores_of
from llama_adapter.llm.runners.kernel_decoder import KernelDecoder, Places, batch_of, c_numbers
from llama_adapter.llm.runners.ragged import Tokens, portions
from llama_adapter.llm.runners.score_layout import lay_out
from llama_adapter.runtime.kernels.arrays import Arrays, numbers, stored
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.kernels.structs import BatchStruct, SumFunction
from llama_adapter.runtime.kernels.threads import torch_stands_aside

if TYPE_CHECKING:
    from llama_adapter.runtime.ranks import Alone

# Sizes of the widest instruction set. Decoders must fit them, so that all instruction sets support the same decoders.
_BLOCK = 64  # outputs that the kernels compute together
_LANES = 16  # floats in a vector


def can_run(config: DecoderConfig) -> bool:
    """Whether the kernels compute decoders of these sizes."""
    return config.head_dim % _LANES == 0 and config.head_dim <= 16 * _LANES and config.ffn_dim % _BLOCK == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A decode step of slots 0..R-1, whose memory is used again. All steps share that of logits and tokens."""

    ids: "ctypes.Array[ctypes.c_int64]"
    places: "ctypes.Array[ctypes.c_int64]"  # also the positions
    prediction: Prediction
    batch: BatchStruct


class KernelRunner(HostRunner):
    """See `Runner`. Prefixes are float32; slots have them in the decoder's type."""

    runs_mixed = True

    def __init__(
        self, config: EngineConfig, arrays: Arrays, *, dtype: str, library: Library, ranks: "Alone | None" = None
    ) -> None:
        """`arrays` are those of a prepared `LlamaAdapterDecoder`; `dtype` is that of activations and cache.

        `ranks` compute the other shares, for a share. Raises KeyError and ValueError if the arrays do not fit.
        """
        super().__init__(config, dtype=np.dtype(np.float32))
        self.operators_name = f"native {library.instruction_set}"
        self.arrays = arrays
        self._kept_dtype = dtype
        sizes, self._kept_type = config.decoder, np.dtype(np.float32 if dtype == "float32" else np.uint16)
        self._ranks = None if ranks is None else _Ranks(ranks)
        address = None if self._ranks is None else self._ranks.address
        self._kernels = KernelDecoder(sizes, arrays, dtype=dtype, library=library, sum_address=address)
        cache = {"num_slots": config.num_slots, "block": config.block, "spare_blocks": config.spare_blocks}
        shape = (sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)
        self._cache = ArrayBlocks(shape, self._kept_type, sizes.context, **cache)
        self._cache.begin(None if config.past is None else self._stored_past(config.past))
        self._places = Places(self._cache.k, self._cache.v, self._cache.table_BT if self._cache.is_paged else None)
        k, v = (lazy_zeros(sizes.prefix_shape(config.num_slots), self._kept_type) for _ in range(2))
        self._prefix = Places(k, v)
        self._steps: dict[int, _Step] = {}  # by number of rows
        # The memory of steps, which call nothing else: while weights pass through the caches, other code leaves them.
        self._x_RD = self._no_embeddings(config.num_slots)
        self._predictions = self._empty_prediction(config.num_slots)

    def _stored_past(self, past: PastKeyValues) -> Past:
        heads = self.config.decoder.kv_heads
        k_LGCH, v_LGCH = past.of_heads(slice(heads.start, heads.stop)).parts
        return stored(k_LGCH, self._kept_dtype), stored(v_LGCH, self._kept_dtype)

    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        return self._kernels.project(visual_query_BQD)

    def run(self, plan: Plan) -> Result:
        # Between the calls of the kernels, torch sums over ranks.
        with torch_stands_aside() if self._ranks is not None else contextlib.nullcontext():
            return super().run(plan)

    def predict(self, plan: PrefillPlan | DecodePlan | MixedPlan) -> Prediction:
        match plan:
            case DecodePlan():
                return self.decode(self._newest[: len(plan.rows)], plan.positions)
            case PrefillPlan():
                return self._fill(plan, Tokens())
            case MixedPlan(decode, prefill):
                places = [self._start + position for position in decode.positions]
                self._cache.hold([place + 1 for place in places])
                return self._fill(prefill, Tokens.of_steps(self._newest[: len(places)], places))

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[Prefix],
        *,
        first_slot: int,
        pictures: Sequence[Pictures] = (),
    ) -> Prediction:
        """Fill slots from `first_slot` on; returns the predictions after each prompt's last token."""
        rows, greedy = range(len(prompts)), [None] * len(prompts)
        plan = PrefillPlan(rows, list(map(tuple, prompts)), prefixes, greedy, first_slot, pictures=pictures)
        return self._fill(plan, Tokens())

    def _fill(self, plan: PrefillPlan, steps: Tokens) -> Prediction:
        """Predictions after `steps`, the tokens of running rows, and after each prompt."""
        first_slot, prompts = plan.first_slot, plan.prompts
        self._cache.hold([self._start + len(prompt) for prompt in prompts], first_slot=first_slot)
        known = self._beginnings.restore(plan, self._cache.write)
        for slot, prefix in enumerate(plan.prefixes, start=first_slot):
            for whole, part in zip((self._prefix.k, self._prefix.v), prefix, strict=True):
                whole[:, slot] = stored(part[:, 0], self._kept_dtype)
        # A prompt is laid out with one continuation of one token, so that the logits that predict this token are
        # computed.
        rest = zip(to_compute(prompts, plan.pictures, known), known, strict=True)
        rows = [
            (slot, self._start + count, lay_out(prompt, [(NO_TOKEN,)], pictures))
            for slot, ((prompt, pictures), count) in enumerate(rest, start=first_slot)
        ]
        parts = portions(rows, steps=steps, past_length=self._start)
        predictions = [self._run(tokens, self._places, self._prefix) for tokens in parts]
        self._beginnings.keep(
            plan, lambda row, count: self._cache.read(first_slot + row, num_places=count), start=self._start
        )
        if len(predictions) == 1:
            return predictions[0]
        return Prediction(*map(np.concatenate, zip(*predictions, strict=True)))

    def decode(self, token_ids: Sequence[int], positions: Sequence[int]) -> Prediction:
        """Feed one token to each of slots 0..R-1 at its position; returns the predictions of the next tokens."""
        places = [self._start + position for position in positions]
        self._cache.hold([place + 1 for place in places])
        if self._ranks is not None:
            return self._run(Tokens.of_steps(token_ids, places), self._places, self._prefix)
        self._kernels.check(token_ids, range(len(token_ids)), places, places, of=self._places)
        step = self._steps.get(len(places)) or self._new_step(len(places))
        step.ids[:], step.places[:] = list(token_ids), places  # type: ignore[assignment]  # ctypes takes integers
        self._kernels.forward(step.batch)
        return step.prediction

    def _new_step(self, num_rows: int) -> _Step:
        prediction = Prediction(*(whole[:num_rows] for whole in self._predictions))
        tokens = Tokens.of_steps([0] * num_rows, [0] * num_rows)
        batch = batch_of(tokens, self._x_RD, *prediction, cache=self._places, prefix=self._prefix)
        ids, places = c_numbers(tokens.ids), c_numbers(tokens.places)
        batch.ids, batch.places, batch.positions = ids, places, places
        self._steps[num_rows] = _Step(ids=ids, places=places, prediction=prediction, batch=batch)
        return self._steps[num_rows]

    def score(self, plan: ScorePlan) -> list[list[float]]:
        past, known = self._beginnings.before(plan, self._cache.past)
        start, sizes = self._start + known, self.config.decoder
        asked = zip(plan.continuations, to_compute(plan.prompts, plan.pictures, [known] * len(plan.rows)), strict=True)
        layouts = [lay_out(prompt, choices, own) for choices, (prompt, own) in asked]
        widest = max(len(layout.token_ids) for layout in layouts)
        # Keys and values of one layer are enough without a past, and if none are kept: no layer reads those of another.
        num_layers = 1 if past is None and not any(plan.kept) else sizes.num_layers
        shape = (num_layers, len(layouts), sizes.num_kv_heads, start + widest, sizes.head_dim)
        k, v = (np.empty(shape, self._kept_type) for _ in range(2))
        if past is not None:
            for whole, past_LGCH in zip((k, v), past, strict=True):
                whole[:, :, :, :start] = past_LGCH[:, None]
        prefix = Places(*map(self._joined, zip(*plan.prefixes, strict=True)))
        rows = [(row, start, layout) for row, layout in enumerate(layouts)]
        parts = portions(rows, steps=Tokens(), past_length=start)
        logits_TV = np.concatenate([self._run(tokens, Places(k, v), prefix).logits_RV for tokens in parts])
        self._beginnings.keep(
            plan, lambda row, count: (k[:, row, :, :count].copy(), v[:, row, :, :count].copy()), start=self._start
        )
        return scores_of(logits_TV, layouts)

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Keys or values of several pictures in the form that the kernels read. Raises ValueError for other shapes."""
        joined = stored(np.concatenate(parts, axis=1), self._kept_dtype)
        if joined.shape != self.config.decoder.prefix_shape(len(parts)):
            raise ValueError(f"prefixes of {joined.shape} for slots of {self._prefix.k.shape}")
        return joined

    def kept(self, *, num_tokens: int) -> PastKeyValues:
        """Keys and values of the past and of the first `num_tokens` tokens of slot 0, as a past for other prompts."""
        return PastKeyValues(*map(numbers, self._cache.read(0, num_places=self._start + num_tokens)))

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self._cache.move(source, target, num_places=self._start + num_tokens)
        for whole in (self._prefix.k, self._prefix.v):
            whole[:, target] = whole[:, source]
        self._newest[target] = self._newest[source]

    def clear(self, slot: int, *, position: int | None = None) -> None:
        if position is not None:
            self._cache.clear(slot, place=self._start + position)
            return
        self._cache.clear(slot)
        for whole in (self._prefix.k, self._prefix.v):
            whole[:, slot] = 0

    def reset(self) -> None:
        super().reset()
        self._cache.hold(())

    def _run(self, tokens: Tokens, places: Places, prefix: Places) -> Prediction:
        """Predictions after each token in `logit_tokens`. Keys and values are written in place."""
        self._kernels.check(tokens.ids, tokens.run_rows, tokens.places, tokens.positions, of=places)
        # The kernels cannot look up embeddings of which each rank has a part.
        reads_ids = self._ranks is None and not tokens.pictures
        x_TD = self._no_embeddings(len(tokens.ids)) if reads_ids else self._embedded(tokens)
        prediction = self._empty_prediction(len(tokens.logit_tokens))
        best_R = prediction.best_R if self._ranks is None else None
        batch = batch_of(tokens, x_TD, prediction.logits_RV, best_R, cache=places, prefix=prefix, reads_ids=reads_ids)
        if self._ranks is None:
            self._kernels.forward(batch)
            return prediction
        with self._ranks.failures_raised():
            self._kernels.forward(batch)
        logits_RV = self._ranks.join(prediction.logits_RV, width=self.config.decoder.vocab_size)
        is_finite_R = np.isfinite(logits_RV.max(-1))
        return Prediction(logits_RV, np.where(is_finite_R, logits_RV.argmax(-1), NO_TOKEN))

    def _no_embeddings(self, num_tokens: int) -> np.ndarray:
        """Memory for the kernels' own embeddings."""
        return np.empty((num_tokens, self.config.decoder.dim), np.float32)

    def _embedded(self, tokens: Tokens) -> np.ndarray:
        """Embeddings of tokens and pictures, (T, D)."""
        own = self.config.decoder.vocab_rows
        ids_T = np.array(tokens.ids) - own.start
        is_here_T = (ids_T >= 0) & (ids_T < len(own))
        x_TD = numbers(self.arrays["embedding.weight"][np.where(is_here_T, ids_T, 0)])
        x_TD[~is_here_T] = 0
        if self._ranks is not None:
            x_TD = self._ranks.sum(x_TD)
        for first, picture in tokens.pictures:
            x_TD[first : first + len(picture.embeddings_SD)] = as_array(picture.embeddings_SD)
        return x_TD

    def _empty_prediction(self, num_rows: int) -> Prediction:
        """Memory for logits, of this rank's part of the vocabulary, and for the best tokens."""
        num_logits = len(self.config.decoder.vocab_rows)
        return Prediction(np.empty((num_rows, num_logits), np.float32), np.empty(num_rows, np.int64))

    def _agreed(self, token_ids: list[int]) -> list[int]:
        return token_ids if self._ranks is None else self._ranks.from_first(token_ids)


class _Ranks:
    """The collectives of ranks with arrays, and their sum as a function that the kernels call."""

    def __init__(self, ranks: "Alone") -> None:
        import torch

        self._torch, self.ranks = torch, ranks
        self._failure: BaseException | None = None
        self._function = SumFunction(self._add)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def sum(self, x: np.ndarray) -> np.ndarray:
        """The sum of all ranks' arrays, which have the same shape."""
        total: np.ndarray = self.ranks.sum(self._torch.from_numpy(x)).numpy()
        return total

    def join(self, part: np.ndarray, *, width: int) -> np.ndarray:
        """All ranks' arrays concatenated in the last dimension to `width`."""
        joined: np.ndarray = self.ranks.join(self._torch.from_numpy(part), width=width).numpy()
        return joined

    def from_first(self, token_ids: list[int]) -> list[int]:
        """The first rank's tokens."""
        first: list[int] = self.ranks.from_first(self._torch.tensor(token_ids, device="cpu")).tolist()
        return first

    def _add(self, address: int, count: int) -> int:
        """Replace `count` floats at `address` by their sum over ranks.

        Returns 1 if it fails, because an exception cannot pass through C code.
        """
        try:
            x = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
            x[:] = self.sum(x)
        except BaseException as error:  # raised again by `failures_raised`
            self._failure = error
            return 1
        return 0

    @contextlib.contextmanager
    def failures_raised(self) -> Iterator[None]:
        """Raise the exception of a failed sum, instead of the RuntimeError for the kernels' return value."""
        try:
            yield
        except RuntimeError:
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure from None
            raise
