"""Runs the decoder operator by operator; the base of the other runners."""

# A adapter layers, R rows, S tokens, D model width, Q queries, N heads, H head size, V vocabulary

import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.model.kv import DecodeView, KVCache, KVView, LayerViews, NoCache, Recorder
from llama_adapter.llm.model.llama import LlamaAdapterDecoder, linears_of, norms_of
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.async_readback import AsyncReadback
from llama_adapter.llm.runners.base import (
    DecodePlan,
    MixedPlan,
    Pictures,
    Plan,
    PrefillPlan,
    Result,
    ScorePlan,
    Scores,
    WarmUp,
    to_compute,
)
from llama_adapter.llm.runners.beginnings import Beginnings
from llama_adapter.llm.runners.sampler import Prediction, logprobs, predict, sum_scores
from llama_adapter.llm.runners.score_layout import lay_out, layout_mask, layout_positions
from llama_adapter.llm.runners.shapes import EXACT, Shapes, padded
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.devices.transfer import shared
from llama_adapter.runtime.operators import ATEN, Operators, StepOperators, capped, undisturbed
from llama_adapter.runtime.ranks import ALONE

_MAX_TARGETS = 1 << 20  # limit of scored tokens in one call; never reached
_LOGITS_AT_ONCE = 1 << 26  # of scored tokens: with a large vocabulary, those of all would take more than the weights

# Tokens (R, 1), positions (R,) -> the parts of a Prediction.
DecodeProgram = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# Of a prefill: tokens (R or 1, S), the last place of each row (R,), the slots -> the parts of a Prediction.
# Of scoring: tokens, positions, mask, prefix k and v, rows, places and ids of targets -> (log-probabilities,).
PromptProgram = Callable[..., tuple[Tensor, ...]]

_Value = TypeVar("_Value")


class FusedDecoder:
    """A decode step by fused operators: five calls for each layer. For devices on which each operator costs time.

    It has the weights of a decoder as the operators read them. They are shared with the decoder.
    """

    def __init__(self, decoder: LlamaAdapterDecoder, step: StepOperators) -> None:
        self.decoder, self.step = decoder, step
        self.layers: Sequence[tuple[Any, ...]] = [
            tuple(map(step.weights, linears_of(layer)))  # type: ignore[arg-type]
            for layer in decoder.layers
        ]
        self.head = step.weights(decoder.head)

    @property
    def can_run(self) -> bool:
        """Whether the operators can read all layers of the decoder, and it is whole."""
        weights = (*itertools.chain.from_iterable(self.layers), self.head)
        return all(each is not None for each in weights) and self.decoder.ranks is ALONE

    def run(
        self, tokens_R: Tensor, positions_R: Tensor, cache: LayerViews, table_RT: Tensor | None, prefix: Prefix
    ) -> tuple[Tensor, Tensor]:
        """One token of each row at its position -> the parts of a Prediction. The cache is as in `KVCache.layers`."""
        decoder, step, config = self.decoder, self.step, self.decoder.config
        eps = config.norm_eps
        hidden = step.embed(tokens_R, decoder.embedding.weight)
        for index, (layer, (qkv, out, gate_up, down)) in enumerate(zip(decoder.layers, self.layers, strict=True)):
            norm, out_norm, next_norm, next_out_norm, q_norm, k_norm = norms_of(layer)  # type: ignore[arg-type]
            j, rotary = index - config.first_adapter_layer, decoder.table_of(index)
            heads = step.attend(
                step.project(hidden, qkv, norm=norm, eps=eps),
                None if rotary is None else (rotary.cos, rotary.sin),
                cache[index],
                table_RT,
                positions_R,
                (prefix.k[j], prefix.v[j]) if j >= 0 else None,
                norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
                eps=eps,
                cap=config.score_cap,
                window=decoder.layer_windows[index],
            )
            hidden = step.add(hidden.x, heads, out, norm=out_norm, eps=eps)
            units = step.project(hidden, gate_up, norm=next_norm, eps=eps, activation=config.activation)
            hidden = step.add(hidden.x, units, down, norm=next_out_norm, eps=eps)
        logits_RV = step.project(hidden, self.head, norm=decoder.norm.weight, eps=eps, dtype=torch.float32)
        logits_RV = capped(logits_RV, config.logit_cap)
        return predict(logits_RV)


class EagerRunner:
    """Runs the decoder's module without compilation.

    If `shapes` round the number of rows up, the next free slots are computed too, with a token at position 0 that a
    later prefill of the slot overwrites. Padding repeats real tokens and rows, so that its numbers are finite if theirs
    are: a mask multiplies by 0, and 0 times NaN would still affect a row.
    """

    runs_mixed = False

    def __init__(
        self,
        decoder: LlamaAdapterDecoder,
        config: EngineConfig,
        *,
        backend: Backend,
        operators: Operators = ATEN,
        shapes: Shapes = EXACT,
    ) -> None:
        """`decoder` must be on the backend's device, have weights in `config.dtype`, and use `operators`."""
        self.config = config
        self.operators, self.operators_name = operators, operators.name
        self._decoder = decoder
        self._backend, self._device = backend, backend.device
        self._shapes = shapes
        self._readback = AsyncReadback(backend, num_slots=config.num_slots, ranks=decoder.ranks)
        self._upload = self._readback.upload
        sizes = config.decoder
        self._beginnings = Beginnings()
        self._start = config.past_length  # the decoder's position at which prompts begin
        self._heads = slice(sizes.heads.start, sizes.heads.stop)  # this rank's heads among those of all ranks
        kv_heads = slice(sizes.kv_heads.start, sizes.kv_heads.stop)
        past = None if config.past is None else config.past.of_heads(kv_heads)
        self._cache = KVCache(
            sizes,
            num_slots=config.num_slots,
            dtype=config.dtype,
            device=self._device,
            past=past,
            block=config.block,
            spare_blocks=config.spare_blocks,
        )
        self._prefix = self.empty_prefix(config.num_slots)
        fused = None if operators.step is None else FusedDecoder(decoder, operators.step)
        self._fused = fused if fused is not None and fused.can_run else None

    def run(self, plan: Plan) -> Result:
        match plan:
            case DecodePlan(rows=[]):
                return self._readback.read()
            case DecodePlan():
                prediction = self.decode(self._readback.newest(len(plan.rows)), plan.positions)
                return self._readback.choose(plan, prediction)
            case PrefillPlan():
                return self._readback.choose(plan, self._fill(plan), first_slot=plan.first_slot)
            case ScorePlan():
                return Scores(plan.rows, self.score(plan))
            case MixedPlan():
                raise NotImplementedError("torch runs no mixed plans")

    @undisturbed
    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        visual_query_BQD = shared(visual_query_BQD)
        num_pictures = len(visual_query_BQD)
        num_rows = self._shapes.rows(num_pictures, limit=max(num_pictures, self.config.num_slots))
        padding = visual_query_BQD[-1:].expand(num_rows - num_pictures, -1, -1)
        whole_BQD = torch.cat([visual_query_BQD, padding]).to(self._device, self.config.dtype)
        prefix = self._decoder.project_prefix(whole_BQD)
        return [Prefix(prefix.k[:, row : row + 1], prefix.v[:, row : row + 1]) for row in range(num_pictures)]

    def stored_prefix(self, k_ANQH: np.ndarray, v_ANQH: np.ndarray) -> Prefix:
        return Prefix(*(self._upload(part[:, None, self._heads]).to(self.config.dtype) for part in (k_ANQH, v_ANQH)))

    def empty_prefix(self, num_rows: int = 1) -> Prefix:
        shape = self.config.decoder.prefix_shape(num_rows)
        return Prefix(*(torch.zeros(shape, dtype=self.config.dtype, device=self._device) for _ in range(2)))

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
        return self._fill(PrefillPlan(rows, list(map(tuple, prompts)), prefixes, greedy, first_slot, pictures=pictures))

    @undisturbed
    def _fill(self, plan: PrefillPlan) -> Prediction:
        """The predictions after each prompt's last token. What the plan says is kept."""
        known = self._admit(plan)
        prediction = self._prefill_rest(plan, known) if any(known) else self._prefill_whole(plan)
        self._beginnings.keep(
            plan,
            lambda row, count: self._cache.read(plan.first_slot + row, num_places=count),
            start=self._start,
        )
        return prediction

    def _prefill_whole(self, plan: PrefillPlan) -> Prediction:
        prompts, first_slot, num_prompts = plan.prompts, plan.first_slot, len(plan.prompts)
        num_rows = self._shapes.rows(num_prompts, limit=self.config.num_slots - first_slot)
        length = self._shapes.prompt(max(map(len, prompts)), limit=self.config.context)
        distinct, own = zip(*_one_for_all(to_compute(prompts, plan.pictures, [0] * num_prompts)), strict=True)
        tokens = self._embedded(self._padded(distinct, num_rows=num_rows, width=length), own)
        num_tokens = num_rows * length
        key = "prefill", *tokens.shape, num_rows, length
        program = self._prompt_program(key, self._prefill_program(length), num_tokens=num_tokens)
        places_R = self._column([len(prompt) - 1 for prompt in prompts], num_rows=num_rows)
        slots = self._slots(first_slot, num_rows, num_tokens=num_tokens)
        return Prediction(*(part[:num_prompts] for part in program(tokens, places_R, slots)))

    def _prefill_rest(self, plan: PrefillPlan, known: Sequence[int]) -> Prediction:
        """As `_prefill_whole`, of prompts whose first `known` tokens are in their slots. It is not recorded."""
        prompts, first_slot, start = plan.prompts, plan.first_slot, self._start
        num_rows = self._shapes.rows(len(prompts), limit=self.config.num_slots - first_slot)
        rest, own = zip(*to_compute(prompts, plan.pictures, known), strict=True)
        width = self._shapes.prompt(max(map(len, rest)), limit=self.config.context)
        length = self._length(max(map(len, prompts)))
        tokens_RS = self._padded(rest, num_rows=num_rows, width=width)
        # Padding repeats a row's last token at its place.
        places = [range(start + count, start + len(prompt)) for prompt, count in zip(prompts, known, strict=True)]
        places_RS = self._padded(places, num_rows=num_rows, width=width)
        slots = slice(first_slot, first_slot + num_rows)
        view = DecodeView(*self._cache.layers(slots, length=length), positions_BS=places_RS, length=length)
        mask_RSP = torch.arange(length, device=self._device) <= places_RS[..., None]
        hidden_R1D = self._decoder(
            self._embedded(tokens_RS, own),
            places_RS,
            mask_RSP[:, None],
            Prefix(*(whole[:, slots] for whole in self._prefix)),
            view,
            places_B=self._column([len(row) - 1 for row in rest], num_rows=num_rows),
        )
        prediction = predict(self._decoder.logits(hidden_R1D[:, 0]))
        return Prediction(*(part[: len(prompts)] for part in prediction))

    def _slots(self, first: int, num_rows: int, *, num_tokens: int) -> slice | Tensor:
        """The slots of a prefill: a slice, or ids (R,) if they are an input of the program."""
        return slice(first, first + num_rows)

    def _prefill_program(self, length: int) -> PromptProgram:
        """A prefill with prompts of `length` tokens."""
        decoder, operators = self._decoder, self.operators
        start, cache, whole = self._start, self._cache, self._prefix
        needs_mask = start or not operators.knows_causal or decoder.config.windows or decoder.config.score_cap

        def program(tokens: Tensor, places_R: Tensor, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
            prefix, view = Prefix(whole.k[:, slots], whole.v[:, slots]), cache.prefill_view(slots)
            positions_1S = torch.arange(start, start + length, device=tokens.device)[None]
            mask_11SP = None
            if needs_mask:
                ones_SP = torch.ones(length, start + length, dtype=torch.bool, device=tokens.device)
                mask_11SP = ones_SP.tril(start)[None, None]
            hidden_R1D = decoder(tokens, positions_1S, mask_11SP, prefix, view, places_B=places_R)
            return predict(decoder.logits(hidden_R1D[:, 0]))

        return program

    def _prompt_program(self, key: Hashable, program: PromptProgram, *, num_tokens: int) -> PromptProgram:
        """What runs in place of a program of whole prompts; `key` is what its shapes and addresses depend on."""
        return program

    @undisturbed
    def decode(self, token_ids: Sequence[int] | Tensor, positions: Sequence[int]) -> Prediction:
        """Feed one token to each of slots 0..R-1 at its position; returns the predictions of the next tokens.

        If `token_ids` is a tensor, it is on the device.
        """
        self._cache.hold([self._start + position + 1 for position in positions])
        num_rows = self._shapes.step_rows(len(positions), limit=self.config.num_slots)
        length = self._length(max(positions) + 1)
        program = self._decode_program(num_rows, length)
        # A free slot gets a token at the first position after the past.
        positions_R = self._column(
            [self._start + position for position in positions], num_rows=num_rows, fill=self._start
        )
        tokens_R = token_ids if isinstance(token_ids, Tensor) else self._upload(token_ids)
        if num_rows > len(tokens_R):
            tokens_R = torch.cat([tokens_R, tokens_R[-1:].expand(num_rows - len(tokens_R))])
        return Prediction(*(part[: len(positions)] for part in program(tokens_R[:, None], positions_R)))

    def _fused_decoder(self, num_rows: int) -> FusedDecoder | None:
        """The fused operators, if they compute a step of so many rows. They alone read blocks without a copy."""
        is_faster = self._fused is not None and (self.config.block or num_rows <= self._fused.step.most_rows)
        return self._fused if is_faster else None

    def _decode_program(self, num_rows: int, length: int) -> DecodeProgram:
        """One step of slots 0..num_rows-1 that attends to positions 0..length-1. All its shapes are fixed."""
        decoder, store = self._decoder, self.operators.store
        slots = slice(0, num_rows)
        prefix = Prefix(self._prefix.k[:, :num_rows], self._prefix.v[:, :num_rows])
        if (fused := self._fused_decoder(num_rows)) is not None:
            every = self._cache.layers(slots, length=self.config.decoder.context)
            return lambda tokens_R1, positions_R: fused.run(tokens_R1[:, 0], positions_R, *every, prefix)
        layers, table_RT = self._cache.layers(slots, length=length)

        def program(tokens_R1: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
            positions_R1 = positions_R[:, None]
            mask_R11P = (torch.arange(length, device=positions_R.device) <= positions_R1)[:, None, None]
            view = DecodeView(layers, table_RT, positions_BS=positions_R1, length=length, store=store)
            hidden_R1D = decoder(tokens_R1, positions_R1, mask_R11P, prefix, view)
            logits_RV, best_R = predict(decoder.logits(hidden_R1D[:, 0]))
            return logits_RV, best_R

        return program

    @undisturbed
    def score(self, plan: ScorePlan) -> list[list[float]]:
        """Log-probability of each continuation of each row."""
        num_prompts = len(plan.rows)
        past, known = self._beginnings.before(plan, self._cache.past)
        start = self._start + known
        asked = zip(plan.continuations, to_compute(plan.prompts, plan.pictures, [known] * num_prompts), strict=True)
        questions = _one_for_all([(prompt, choices, own) for choices, (prompt, own) in asked])
        distinct = [lay_out(*question) for question in questions]
        layouts = distinct * (num_prompts // len(distinct))
        num_rows = self._shapes.rows(num_prompts, limit=max(self.config.num_slots, num_prompts))
        widest = max(len(layout.token_ids) for layout in distinct)
        width = self._shapes.prompt(widest, limit=max(self.config.context, widest))
        tokens_RS = self._padded([layout.token_ids for layout in distinct], num_rows=num_rows, width=width)
        tokens = self._embedded(tokens_RS, [layout.pictures for layout in distinct])
        positions_RS = self._padded(
            [layout_positions(layout, start=start) for layout in distinct], num_rows=num_rows, width=width
        )
        masks = [layout_mask(layout, width, start=start) for layout in distinct]
        mask_R1SP = self._upload(np.stack([*masks, *[masks[-1]] * (len(tokens_RS) - len(masks))]))[:, None]
        prefixes = [*plan.prefixes, *[plan.prefixes[-1]] * (num_rows - num_prompts)]
        prefix = _joined(prefixes)
        predictors = [(row, place) for row, layout in enumerate(layouts) for place in layout.predictors]
        num_targets = self._shapes.rows(len(predictors), limit=_MAX_TARGETS)
        rows_T, places_T = (self._column(column, num_rows=num_targets) for column in zip(*predictors, strict=True))
        targets_T = self._column([token for layout in layouts for token in layout.targets], num_rows=num_targets)
        recorder = Recorder(past)
        program = self._score_program(recorder)
        if not any(plan.kept):
            key = "score", *tokens.shape, *mask_R1SP.shape, num_rows, num_targets
            program = self._prompt_program(key, self._score_program(NoCache(past)), num_tokens=num_rows * width)
        (per_token_T,) = program(tokens, positions_RS, mask_R1SP, *prefix, rows_T, places_T, targets_T)
        self._beginnings.keep(plan, recorder.read, start=self._start)
        return sum_scores(per_token_T, layouts)

    def _score_program(self, cache: KVView) -> PromptProgram:
        """Log-probabilities (T,) of target tokens of laid-out continuations."""
        decoder = self._decoder

        def program(
            tokens: Tensor,
            positions_RS: Tensor,
            mask_R1SP: Tensor,
            k: Tensor,
            v: Tensor,
            rows_T: Tensor,
            places_T: Tensor,
            targets_T: Tensor,
        ) -> tuple[Tensor]:
            hidden_RSD = decoder(tokens, positions_RS, mask_R1SP, Prefix(k, v), cache)
            most = max(_LOGITS_AT_ONCE // decoder.config.vocab_size, 1)
            parts = zip(*(torch.split(whole_T, most) for whole_T in (rows_T, places_T, targets_T)), strict=True)
            found = [logprobs(decoder.logits(hidden_RSD[rows, places]), targets) for rows, places, targets in parts]
            return (torch.cat(found),)

        return program

    @torch.inference_mode()
    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self._cache.move(source, target, num_places=self._length(num_tokens))
        for whole in self._prefix:
            whole[:, target] = whole[:, source]
        self._readback.move(source, target)

    @torch.inference_mode()
    def clear(self, slot: int, *, position: int | None = None) -> None:
        self._cache.clear(slot, place=None if position is None else self._start + position)
        if position is None:
            for whole in self._prefix:
                whole[:, slot] = 0

    @torch.inference_mode()
    def kept(self, *, num_tokens: int) -> PastKeyValues:
        """Keys and values of the past and of the first `num_tokens` tokens of slot 0, as a past for other prompts."""
        past = self._cache.read(0, num_places=self._start + num_tokens)
        return PastKeyValues(*(part.float().cpu().numpy() for part in past))

    def reset(self) -> None:
        self._readback.forget()
        for slot in range(self.config.num_slots):
            self.clear(slot)
        self._cache.hold(())
        self._beginnings.clear()

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        started = time.perf_counter()
        num_slots, context = self.config.num_slots, self.config.context
        longest = min(prompt_tokens + new_tokens, context)
        rows, lengths = [num_slots], [longest]
        if self._shapes.are_few:
            rows = _each([self._shapes.step_rows(needed, limit=num_slots) for needed in range(1, num_slots + 1)])
            lengths = _each([self._length(needed) - self._start for needed in range(1, longest + 1)])
        sizes = self.config.decoder
        prefixes = self.project_prefix(torch.zeros(num_slots, sizes.num_queries, sizes.dim, device="cpu"))
        prompt = [0] * min(prompt_tokens, context)
        num_programs = 0
        for num_rows in rows:
            self.prefill([prompt] * num_rows, prefixes[:num_rows], first_slot=0)
            own_lengths = lengths if self._fused_decoder(num_rows) is None else lengths[:1]  # one serves all lengths
            for length in own_lengths:
                self.decode([0] * num_rows, [length - 1] * num_rows)
            num_programs += 1 + len(own_lengths)
        self.reset()
        self._backend.synchronise()
        return WarmUp(seconds=time.perf_counter() - started, programs=num_programs)

    def _length(self, num_tokens: int) -> int:
        """Number of cache places that a step attends to: the past and the following `num_tokens`, rounded up."""
        return self._shapes.length(self._start + num_tokens, limit=self.config.decoder.context)

    def _admit(self, plan: PrefillPlan) -> list[int]:
        """Let the slots of a plan have blocks for its prompts, their prefixes, and what is kept of the prompts.

        Returns how many tokens of each prompt are in its slot.
        """
        self._cache.hold([self._start + len(prompt) for prompt in plan.prompts], first_slot=plan.first_slot)
        slots = slice(plan.first_slot, plan.first_slot + len(plan.prefixes))
        for whole, part in zip(self._prefix, _joined(plan.prefixes), strict=True):
            whole[:, slots] = part
        return self._beginnings.restore(plan, self._cache.write)

    def _padded(self, rows: Sequence[Sequence[int]], *, num_rows: int, width: int) -> Tensor:
        """Ids of `num_rows` rows, or of the single row that stands for all, each padded to `width`."""
        filled = padded(rows, width)
        missing = num_rows - len(rows) if len(rows) > 1 else 0
        return self._upload([*filled, *[filled[-1]] * missing])

    def _embedded(self, tokens_RS: Tensor, pictures: Sequence[Pictures]) -> Tensor:
        """Ids of padded prompts; embeddings (R, S, D) instead if they have pictures."""
        if not any(pictures):
            return tokens_RS
        x_RSD = self._decoder.embed(tokens_RS)
        for x_SD, own in zip(x_RSD, pictures, strict=False):
            for picture in own:
                x_SD[picture.start : picture.stop] = shared(picture.embeddings_SD).to(x_SD)
        return x_RSD

    def _column(self, values: Sequence[int], *, num_rows: int, fill: int = 0) -> Tensor:
        return self._upload([*values, *[fill] * (num_rows - len(values))])


def _joined(prefixes: Sequence[Prefix]) -> Prefix:
    """The prefixes of several pictures as one."""
    return Prefix(*(torch.cat(parts, dim=1) for parts in zip(*prefixes, strict=True)))


def _one_for_all(values: Sequence[_Value]) -> Sequence[_Value]:
    """Only the first value if all are equal, so that the decoder computes once what does not depend on the picture."""
    return values[:1] if all(value == values[0] for value in values) else values


def _each(sizes: Sequence[int]) -> list[int]:
    """The distinct sizes, largest first, so that smaller programs reuse the memory of larger ones."""
    return sorted(set(sizes), reverse=True)
