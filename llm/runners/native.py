"""Runs each program of the decoder as one call of the C kernels, with the tokens of all rows and no padding."""

# A adapter layers, R rows, T tokens of all rows, Q queries, N heads, G heads of keys and values, H head size, D model
# width, V vocabulary

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import KeptTokens, MixedPlan, Pictures, Plan, Result, ScorePlan, WarmUp
from llama_adapter.llm.runners.draw import NO_TOKEN
from llama_adapter.llm.runners.eager import EagerRunner, paired
from llama_adapter.llm.runners.kernel_decoder import KernelDecoder, Places, batch_of, c_numbers
from llama_adapter.llm.runners.ragged import Tokens, portions
from llama_adapter.llm.runners.sampler import Prediction, logprobs, predict, sum_scores
from llama_adapter.llm.runners.score_layout import lay_out
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.devices.cpu_linear import bits, kernel_arrays
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.kernels.structs import BatchStruct, SumFunction
from llama_adapter.runtime.kernels.threads import torch_stands_aside
from llama_adapter.runtime.operators import ATEN
from llama_adapter.runtime.ranks import Alone
from llama_adapter.runtime.schemes.scheme import dtype_name

# Sizes of the widest instruction set. Decoders must fit them, so that all instruction sets support the same decoders.
_BLOCK = 64  # outputs that the kernels compute together
_LANES = 16  # floats in a vector


def can_run(decoder: LlamaAdapterDecoder) -> bool:
    """Whether the kernels can run this decoder, whose linear layers must already be prepared."""
    config = decoder.config
    return (
        kernel_arrays(decoder) is not None
        and config.head_dim % _LANES == 0
        and config.head_dim <= 16 * _LANES
        and config.ffn_dim % _BLOCK == 0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A decode step of slots 0..R-1. All steps share memory and call no operator of torch: while weights pass through
    the caches, torch's code leaves them, and a step of 160M would spend 0.4 ms on loading it again.
    """

    ids: "ctypes.Array[ctypes.c_int64]"
    places: "ctypes.Array[ctypes.c_int64]"  # also the positions
    prediction: Prediction
    batch: BatchStruct


class NativeRunner(EagerRunner):
    """As `EagerRunner`, computed by the kernels. Only the prefix of pictures is projected by torch's module."""

    def __init__(
        self, decoder: LlamaAdapterDecoder, config: EngineConfig, *, backend: Backend, library: Library
    ) -> None:
        # Plain operators compute everything outside of the kernels.
        operators = dataclasses.replace(ATEN, name=f"native {library.instruction_set}")
        super().__init__(decoder, config, backend=backend, operators=operators)
        # Decode steps by number of rows, and the memory that they share.
        self._steps: dict[int, _Step] = {}
        self._x_RD = torch.empty(config.num_slots, config.decoder.dim)
        self._predictions = self._empty_prediction(config.num_slots)
        table_BT = self._cache.table_BT.numpy() if self._cache.is_paged else None
        self._places = Places(bits(self._cache.k), bits(self._cache.v), table_BT)
        self._is_alone = config.decoder.num_ranks == 1
        self._sum = _Sum(decoder.ranks)
        arrays, address = kernel_arrays(decoder), None if self._is_alone else self._sum.address
        assert arrays is not None, "`can_run` was true"
        self.arrays = arrays  # with these, `KernelProgram` computes the same
        dtype = dtype_name(config.dtype)
        self._kernels = KernelDecoder(config.decoder, arrays, dtype=dtype, library=library, sum_address=address)

    @property
    def runs_mixed(self) -> bool:
        return not self._backend.capabilities.queued

    # The methods that the engine calls between programs also use `torch_stands_aside`, because torch's threads would
    # spin during the next program.

    @torch_stands_aside()
    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        return super().project_prefix(visual_query_BQD)

    @torch_stands_aside()
    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        return super().stored_prefix(k_ANQH, v_ANQH)

    @torch_stands_aside()
    def empty_prefix(self) -> Prefix:
        return super().empty_prefix()

    @torch_stands_aside()
    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        super().move(source, target, num_tokens=num_tokens)

    @torch_stands_aside()
    def clear(self, slot: int, *, position: int | None = None) -> None:
        super().clear(slot, position=position)

    @torch_stands_aside()
    def run(self, plan: Plan) -> Result:
        return super().run(plan)

    @torch_stands_aside()
    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        return super().warm_up(prompt_tokens=prompt_tokens, new_tokens=new_tokens)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        prefixes: Sequence[Prefix],
        *,
        first_slot: int,
        pictures: Sequence[Pictures] = (),
        kept: Sequence[KeptTokens | None] = (),
    ) -> Prediction:
        known = self._admit(prompts, prefixes, kept, first_slot=first_slot)
        return self._fill(paired(prompts, pictures), known, first_slot=first_slot, steps=Tokens())

    @torch.inference_mode()
    def mixed(self, plan: MixedPlan) -> Prediction:
        prefill, positions = plan.prefill, plan.decode.positions
        self._cache.hold([self._start + position + 1 for position in positions])
        known = self._admit(prefill.prompts, prefill.prefixes, prefill.kept, first_slot=prefill.first_slot)
        steps = self._step_tokens(list(self._readback.newest(len(positions))), positions)
        prompts = paired(prefill.prompts, prefill.pictures)
        return self._fill(prompts, known, first_slot=prefill.first_slot, steps=steps)

    def _fill(
        self,
        prompts: Sequence[tuple[Sequence[int], Pictures]],
        known: Sequence[int],
        *,
        first_slot: int,
        steps: Tokens,
    ) -> Prediction:
        """Predictions after `steps`, the tokens of running rows, and after each prompt.

        The first `known` tokens of the prompts are in their slots.
        """
        # A prompt is laid out with one continuation of one token, so that the logits that predict this
        # token are computed.
        rows = [
            (slot, self._start + count, lay_out(prompt[count:], [(NO_TOKEN,)], () if count else pictures))
            for slot, ((prompt, pictures), count) in enumerate(zip(prompts, known, strict=True), start=first_slot)
        ]
        portioned = portions(rows, steps=steps, past_length=self._start)
        parts = [self._run(tokens, self._places, self._prefix) for tokens in portioned]
        if len(parts) == 1:
            return parts[0]
        logits_RV, best_R = map(torch.cat, zip(*parts, strict=True))
        return Prediction(logits_RV, best_R)

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int] | Tensor, positions: Sequence[int]) -> Prediction:
        ids = token_ids.tolist() if isinstance(token_ids, Tensor) else token_ids
        places = [self._start + position for position in positions]
        self._cache.hold([place + 1 for place in places])
        if not self._is_alone:
            return self._run(self._step_tokens(ids, positions), self._places, self._prefix)
        self._kernels.check(ids, range(len(ids)), places, places, of=self._places)
        step = self._steps.get(len(ids)) or self._new_step(len(ids))
        step.ids[:], step.places[:] = ids, places  # type: ignore[assignment]  # ctypes takes integers
        return self._forward(step.batch, step.prediction)

    def _new_step(self, num_rows: int) -> _Step:
        prediction = Prediction(*(whole[:num_rows] for whole in self._predictions))
        tokens = self._step_tokens([0] * num_rows, [0] * num_rows)
        batch = self._batch(tokens, self._x_RD, self._places, self._prefix, prediction)
        ids, places = c_numbers(tokens.ids), c_numbers(tokens.places)
        batch.ids, batch.places, batch.positions = ids, places, places
        self._steps[num_rows] = _Step(ids=ids, places=places, prediction=prediction, batch=batch)
        return self._steps[num_rows]

    def _step_tokens(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tokens:
        """One token for each of slots 0..R-1."""
        return Tokens.of_steps(token_ids, [self._start + position for position in positions])

    @torch.inference_mode()
    def score(self, plan: ScorePlan) -> list[list[float]]:
        past, known = self._past_of(plan)
        start = self._start + known
        asked = zip(plan.continuations, paired(plan.prompts, plan.pictures), strict=True)
        layouts = [lay_out(prompt[known:], choices, () if known else own) for choices, (prompt, own) in asked]
        sizes, widest = self.config.decoder, max(len(layout.token_ids) for layout in layouts)
        # Keys and values of one layer are enough without a past, and if none are kept: no layer reads those of another.
        num_layers = 1 if past is None and not any(plan.kept) else sizes.num_layers
        shape = (num_layers, len(layouts), sizes.num_kv_heads, start + widest, sizes.head_dim)
        k, v = (torch.empty(shape, dtype=self.config.dtype) for _ in range(2))
        if past is not None:
            for whole, past_LNCH in zip((k, v), past, strict=True):
                whole[:, :, :, :start] = past_LNCH[:, None]
        prefix = Prefix(*map(self._joined, zip(*plan.prefixes, strict=True)))
        rows = [(row, start, layout) for row, layout in enumerate(layouts)]
        cache, parts = Places(bits(k), bits(v)), portions(rows, steps=Tokens(), past_length=start)
        logits_TV = torch.cat([self._run(tokens, cache, prefix).logits_RV for tokens in parts])
        self._keep(plan, lambda row, num_places: (k[:, row, :, :num_places].clone(), v[:, row, :, :num_places].clone()))
        targets_T = torch.tensor([token for layout in layouts for token in layout.targets])
        return sum_scores(logprobs(logits_TV, targets_T), layouts)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Keys or values of several pictures in the form that the kernels read. Raises ValueError for other shapes."""
        joined = torch.cat(list(parts), dim=1).to(self.config.dtype).contiguous()
        layers, _, *sizes = self._prefix.k.shape
        if joined.shape != (layers, len(parts), *sizes):
            raise ValueError(f"prefixes of {tuple(joined.shape)} for slots of {tuple(self._prefix.k.shape)}")
        return joined

    def _run(self, tokens: Tokens, places: Places, prefix: Prefix) -> Prediction:
        """Predictions after each token in `logit_tokens`. Keys and values are written in place."""
        self._kernels.check(tokens.ids, tokens.run_rows, tokens.places, tokens.positions, of=places)
        if self._reads_ids(tokens):
            x_TD = torch.empty(len(tokens.ids), self.config.decoder.dim)
        else:
            x_TD = self._decoder.embed(torch.tensor(tokens.ids)).float()
        for first, picture in tokens.pictures:
            x_TD[first : first + len(picture.embeddings_SD)] = picture.embeddings_SD
        prediction = self._empty_prediction(len(tokens.logit_tokens))
        batch = self._batch(tokens, x_TD, places, prefix, prediction)
        return self._forward(batch, prediction)

    def _reads_ids(self, tokens: Tokens) -> bool:
        """Whether the kernels look up the embeddings. They cannot if each rank has a part of the vocabulary."""
        return self._is_alone and not tokens.pictures

    def _batch(
        self, tokens: Tokens, x_TD: Tensor, places: Places, prefix: Prefix, prediction: Prediction
    ) -> BatchStruct:
        """The batch for the kernels. The caller keeps the tensors, whose addresses it holds."""
        return batch_of(
            tokens,
            x=x_TD.data_ptr(),
            cache=places,
            prefix=Places(*map(bits, prefix)),
            logits=prediction.logits_RV.data_ptr(),
            best=prediction.best_R.data_ptr() if self._is_alone else None,
            reads_ids=self._reads_ids(tokens),
        )

    def _empty_prediction(self, num_rows: int) -> Prediction:
        """Memory for logits, of this rank's part of the vocabulary, and for the best tokens."""
        num_logits = len(self.config.decoder.vocab_rows)
        return Prediction(torch.empty(num_rows, num_logits), torch.empty(num_rows, dtype=torch.int64))

    def _forward(self, batch: BatchStruct, prediction: Prediction) -> Prediction:
        with self._sum.failures_raised():
            self._kernels.forward(batch)
        if self._is_alone:
            return prediction
        return predict(self._decoder.ranks.join(prediction.logits_RV, width=self.config.decoder.vocab_size))


class _Sum:
    """The sum over ranks, as a function that the kernels can call."""

    def __init__(self, ranks: Alone) -> None:
        self._ranks = ranks
        self._failure: BaseException | None = None
        self._function = SumFunction(self._add)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _add(self, address: int, count: int) -> int:
        """Replace `count` floats at `address` by their sum over ranks.

        Returns 1 if it fails, because an exception cannot pass through C code.
        """
        try:
            x = torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
            total = self._ranks.sum(x)
            if total is not x:
                x.copy_(total)
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
