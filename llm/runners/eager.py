"""Executors run the decoder's three programs (prefix, prefill, decode) and scoring on one device.

The engine hands over plain ids and positions and gets predictions; how the program is run is decided here.
"""

# A adapter layers, R rows, S tokens, Q queries, N heads, H head size, V vocabulary

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.model.kv import DecodeView, KVCache
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.prediction import Prediction, predict
from llama_adapter.llm.runners.shapes import ExactShapes, Shapes
from llama_adapter.runtime.devices.backend import Backend
from llama_adapter.runtime.devices.transfer import Transfer
from llama_adapter.runtime.operators.base import ATEN, Operators

_MAX_TARGETS = 1 << 20  # scored tokens of one call; no limit that would ever be met


class ScoreRow(Protocol):
    """A prompt with its continuations, of at least one token each: a ScoreRequest."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def continuations(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def prefix(self) -> Prefix: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """What a warm-up took."""

    seconds: float
    programs: int  # shapes of prefills and decode steps that were run


class Executor(Protocol):
    """What the engine needs of a device. Rows in use are always slots 0..n-1.

    Predictions are valid until the next call.
    """

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def operators(self) -> Operators:
        """What the decoder computes by."""
        ...

    @property
    def queued(self) -> bool:
        """Whether calls return while the device still computes, so that more of them may be handed to it meanwhile."""
        ...

    @property
    def transfer(self) -> Transfer:
        """The way of small numbers to and from the device."""
        ...

    def project_prefix(self, visual_query_BQD: Tensor) -> list[Prefix]:
        """Visual query (B, Q, D) -> one prefix (A, 1, N, Q, H) per picture."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]], prefixes: Sequence[Prefix], *, first_slot: int) -> Prediction:
        """Fill slots first_slot.. with prompts and prefixes; what follows each prompt's last token."""
        ...

    def decode(self, token_ids: Sequence[int] | Tensor, positions: Sequence[int]) -> Prediction:
        """Feed one token to each of slots 0..R-1 at its position; what follows. Ids (R,) may be on the device."""
        ...

    def score(self, rows: Sequence[ScoreRow]) -> list[list[float]]:
        """Log-probability of each continuation's tokens given its prompt; no slot is used."""
        ...

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        """Slot `source`, of which `num_tokens` positions are in use, replaces slot `target`."""
        ...

    def clear(self, slot: int, *, position: int | None = None) -> None:
        """Forget what is in a slot, or at one position of it.

        What is not a number there would reach the slot's next row even through the mask.
        """
        ...

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        """Run, before the first request, the steps that prompts and answers of up to these lengths may need.

        Where decode steps come in few shapes that is all of them, else the largest; for each number of rows there is a
        prefill of equal prompts of that length, and prefills of other shapes meet the device when they come. Waits for
        the device. No slot may be in use.
        """
        ...


# Tokens (R, 1), positions (R,) -> the parts of a Prediction.
DecodeProgram = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_Value = TypeVar("_Value")


class EagerExecutor:
    """Runs the module as it is, operator by operator.

    Where `shapes` ask for more rows than are needed, the free slots behind the running ones are computed along: a token
    at position 0, which a later prefill of that slot writes over. Padding repeats what is there, tokens and rows, so
    that it is as finite as they are: behind a mask, 0 times NaN would still reach a row.
    """

    def __init__(
        self,
        decoder: LlamaAdapterDecoder,
        *,
        backend: Backend,
        num_slots: int,
        shapes: Shapes | None = None,
        operators: Operators = ATEN,
    ) -> None:
        self.config = decoder.config
        self.num_slots = num_slots
        self.operators = operators
        self.queued = backend.capabilities.queued
        self.transfer = Transfer(backend)
        self._decoder = decoder
        self._backend, self._device = backend, backend.device
        self._shapes = ExactShapes() if shapes is None else shapes
        dtype = decoder.embedding.weight.dtype
        self._cache = KVCache(self.config, num_slots=num_slots, dtype=dtype, device=self._device)
        shape = (
            self.config.num_adapter_layers,
            num_slots,
            self.config.num_heads,
            self.config.num_queries,
            self.config.head_dim,
        )
        self._prefix = Prefix(
            torch.zeros(shape, dtype=dtype, device=self._device), torch.zeros(shape, dtype=dtype, device=self._device)
        )

    @torch.inference_mode()
    def project_prefix(self, visual_query_BQD: Tensor) -> list[Prefix]:
        num_pictures = len(visual_query_BQD)
        num_rows = self._shapes.rows(num_pictures, limit=max(num_pictures, self.num_slots))
        padding = visual_query_BQD[-1:].expand(num_rows - num_pictures, -1, -1)
        whole_BQD = torch.cat([visual_query_BQD, padding]).to(self._device, self._cache.k.dtype)
        prefix = self._decoder.project_prefix(whole_BQD)
        return [Prefix(prefix.k[:, row : row + 1], prefix.v[:, row : row + 1]) for row in range(num_pictures)]

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], prefixes: Sequence[Prefix], *, first_slot: int) -> Prediction:
        num_prompts = len(prompts)
        self._prefix.k[:, first_slot : first_slot + num_prompts] = torch.cat([prefix.k for prefix in prefixes], dim=1)
        self._prefix.v[:, first_slot : first_slot + num_prompts] = torch.cat([prefix.v for prefix in prefixes], dim=1)
        num_rows = self._shapes.rows(num_prompts, limit=self.num_slots - first_slot)
        length = self._shapes.prompt(max(map(len, prompts)), limit=self.config.context)
        positions_1S = torch.arange(length, device=self._device)[None]
        causal_11SS = torch.ones(length, length, dtype=torch.bool, device=self._device).tril()[None, None]
        slots = slice(first_slot, first_slot + num_rows)
        hidden_RSD = self._decoder(
            self._padded(_one_for_all(prompts), num_rows=num_rows, width=length),
            positions_1S,
            causal_11SS,
            Prefix(self._prefix.k[:, slots], self._prefix.v[:, slots]),
            self._cache.prefill_view(first_slot, num_rows),
        )
        last_R = self._column([len(prompt) - 1 for prompt in prompts], num_rows=num_rows)
        rows_R = torch.arange(num_rows, device=self._device)
        logits_RV, best_R = predict(self._decoder.logits(hidden_RSD[rows_R, last_R]))
        return Prediction(logits_RV[:num_prompts], best_R[:num_prompts])

    @torch.inference_mode()
    def decode(self, token_ids: Sequence[int] | Tensor, positions: Sequence[int]) -> Prediction:
        num_rows = self._shapes.step_rows(len(positions), limit=self.num_slots)
        length = self._shapes.length(max(positions) + 1, limit=self.config.context)
        program = self._decode_program(num_rows, length)
        tokens_R = token_ids if isinstance(token_ids, Tensor) else self.transfer.upload(token_ids)
        if num_rows > len(tokens_R):
            tokens_R = torch.cat([tokens_R, tokens_R[-1:].expand(num_rows - len(tokens_R))])
        logits_RV, best_R = program(tokens_R[:, None], self._column(positions, num_rows=num_rows))
        return Prediction(logits_RV[: len(positions)], best_R[: len(positions)])

    def _decode_program(self, num_rows: int, length: int) -> DecodeProgram:
        """One step of slots 0..num_rows-1 that attends to positions 0..length-1; all of its shapes are fixed."""
        decoder, store = self._decoder, self.operators.store
        layers = self._cache.layers(num_rows)
        prefix = Prefix(self._prefix.k[:, :num_rows], self._prefix.v[:, :num_rows])

        def program(tokens_R1: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
            mask_R11P = (torch.arange(length, device=positions_R.device) <= positions_R[:, None])[:, None, None]
            view = DecodeView(layers, positions_B=positions_R, length=length, store=store)
            hidden_R1D = decoder(tokens_R1, positions_R[:, None], mask_R11P, prefix, view)
            logits_RV, best_R = predict(decoder.logits(hidden_R1D[:, 0]))
            return logits_RV, best_R

        return program

    @torch.inference_mode()
    def score(self, rows: Sequence[ScoreRow]) -> list[list[float]]:
        distinct = [
            _ScoreLayout(*question) for question in _one_for_all([(row.prompt_ids, row.continuations) for row in rows])
        ]
        layouts = distinct * (len(rows) // len(distinct))
        num_rows = self._shapes.rows(len(rows), limit=max(self.num_slots, len(rows)))
        widest = max(len(layout.token_ids) for layout in distinct)
        width = self._shapes.prompt(widest, limit=max(self.config.context, widest))
        tokens_RS = self._padded([layout.token_ids for layout in distinct], num_rows=num_rows, width=width)
        positions_RS = self._padded([layout.positions for layout in distinct], num_rows=num_rows, width=width)
        masks = [layout.mask(width) for layout in distinct]
        mask_R1SS = torch.stack([*masks, *[masks[-1]] * (len(tokens_RS) - len(masks))])[:, None].to(self._device)
        copies = [*rows, *[rows[-1]] * (num_rows - len(rows))]
        prefix = Prefix(
            torch.cat([row.prefix.k for row in copies], dim=1), torch.cat([row.prefix.v for row in copies], dim=1)
        )
        hidden_RSD = self._decoder(tokens_RS, positions_RS, mask_R1SS, prefix)
        places = [(row, place) for row, layout in enumerate(layouts) for place in layout.predictors]
        targets = [token for layout in layouts for continuation in layout.continuations for token in continuation]
        num_targets = self._shapes.rows(len(targets), limit=_MAX_TARGETS)
        rows_T, places_T = (self._column(column, num_rows=num_targets) for column in zip(*places, strict=True))
        logprobs_TV = self._decoder.logits(hidden_RSD[rows_T, places_T]).log_softmax(-1)
        per_token = logprobs_TV.gather(-1, self._column(targets, num_rows=num_targets)[:, None])[:, 0].cpu()
        lengths = [len(continuation) for layout in layouts for continuation in layout.continuations]
        scores = iter([float(part.sum()) for part in torch.split(per_token[: len(targets)], lengths)])
        return [list(itertools.islice(scores, len(layout.continuations))) for layout in layouts]

    @torch.inference_mode()
    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self._cache.move(source, target, num_tokens=self._shapes.length(num_tokens, limit=self.config.context))
        self._prefix.k[:, target] = self._prefix.k[:, source]
        self._prefix.v[:, target] = self._prefix.v[:, source]

    @torch.inference_mode()
    def clear(self, slot: int, *, position: int | None = None) -> None:
        if position is not None:
            for cache in (self._cache.k, self._cache.v):
                cache[:, slot, :, position] = 0
            return
        for whole in (self._cache.k, self._cache.v, self._prefix.k, self._prefix.v):
            whole[:, slot] = 0

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        started = time.perf_counter()
        context = self.config.context
        longest = min(prompt_tokens + new_tokens, context)
        rows, lengths = [self.num_slots], [longest]
        if self._shapes.are_few:
            every_row = range(1, self.num_slots + 1)
            rows = _each([self._shapes.step_rows(needed, limit=self.num_slots) for needed in every_row])
            lengths = _each([self._shapes.length(needed, limit=context) for needed in range(1, longest + 1)])
        prefixes = self.project_prefix(torch.zeros(self.num_slots, self.config.num_queries, self.config.dim))
        prompt = [0] * min(prompt_tokens, context)
        for num_rows in rows:
            self.prefill([prompt] * num_rows, prefixes[:num_rows], first_slot=0)
            for length in lengths:
                self.decode([0] * num_rows, [length - 1] * num_rows)
        for slot in range(self.num_slots):
            self.clear(slot)
        self._backend.synchronise()
        return WarmUp(seconds=time.perf_counter() - started, programs=len(rows) * (1 + len(lengths)))

    def _padded(self, rows: Sequence[Sequence[int]], *, num_rows: int, width: int) -> Tensor:
        """Ids of `num_rows` rows, or the single row that stands for all, each filled up to `width`."""
        filled = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
        missing = num_rows - len(rows) if len(rows) > 1 else 0
        return self.transfer.upload([*filled, *[filled[-1]] * missing])

    def _column(self, values: Sequence[int], *, num_rows: int, padding: int = 0) -> Tensor:
        return self.transfer.upload([*values, *[padding] * (num_rows - len(values))])


def _one_for_all(values: Sequence[_Value]) -> Sequence[_Value]:
    """The first alone, where all are equal: the decoder computes for it once what does not depend on the picture."""
    return values[:1] if all(value == values[0] for value in values) else values


def _each(sizes: Sequence[int]) -> list[int]:
    """Every size once, largest first, so that smaller programs find memory that larger ones left."""
    return sorted(set(sizes), reverse=True)


class _ScoreLayout:
    """All continuations of one prompt: each sees the prompt and itself, and counts its positions from the prompt's end.

    The last token of a continuation predicts nothing that is scored, so it is left out.
    """

    def __init__(self, prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        self.continuations = continuations
        self.prompt_length = len(prompt_ids)
        self.token_ids = list(prompt_ids)
        self.positions = list(range(self.prompt_length))
        self.predictors: list[int] = []  # of all continuations' tokens in turn, the places whose logits predict them
        self._owners = [-1] * self.prompt_length  # the continuation each token belongs to, -1 for the prompt
        for index, continuation in enumerate(continuations):
            start, num_fed = len(self.token_ids), len(continuation) - 1
            self.predictors += [self.prompt_length - 1, *range(start, start + num_fed)]
            self.token_ids.extend(continuation[:-1])
            self.positions.extend(range(self.prompt_length, self.prompt_length + num_fed))
            self._owners.extend([index] * num_fed)

    def mask(self, num_tokens: int) -> Tensor:
        """(S, S) bool for a row padded to `num_tokens`; padding sees itself, so that its softmax is defined."""
        owners = torch.tensor([*self._owners, *[-2] * (num_tokens - len(self._owners))])
        visible = (owners[None, :] == -1) | (owners[None, :] == owners[:, None])
        return visible & torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
