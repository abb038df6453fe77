"""An encoder and an executor that record the time and the work of each call."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from llama_adapter.app.measuring.roofline import NumberSizes, Work, encoder_work, prefill_work, prefix_work, step_work
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.adapter import Prefix
from llama_adapter.llm.runners.eager import Executor, ScoreRow, WarmUp
from llama_adapter.llm.runners.prediction import Prediction
from llama_adapter.runtime.devices.transfer import Transfer
from llama_adapter.runtime.operators.base import Operators
from llama_adapter.vision.backends.base import VisionBackend
from llama_adapter.vision.config import VisionConfig

Program = Literal["encoder", "prefix", "prefill", "step"]
PROGRAMS: tuple[Program, ...] = ("encoder", "prefix", "prefill", "step")


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a program: its pictures or rows, seconds until the device was done, and its work."""

    program: Program
    num_rows: int
    seconds: float
    work: Work


@dataclass(kw_only=True, slots=True)
class Meter:
    """Records calls; waits for the device before and after each."""

    synchronise: Callable[[], None]
    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def note(self, program: Program, num_rows: int, work: Work) -> Iterator[None]:
        """Records the body as one call."""
        self.synchronise()
        started = time.perf_counter()
        yield
        self.synchronise()
        self.calls.append(Call(program, num_rows, time.perf_counter() - started, work))


class MeteredVision:
    """A vision backend with a meter."""

    def __init__(self, inner: VisionBackend, *, meter: Meter, config: VisionConfig, sizes: NumberSizes) -> None:
        self._inner, self._meter, self._config, self._sizes = inner, meter, config, sizes

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def image_size(self) -> int:
        return self._inner.image_size

    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        work = encoder_work(self._config, num_pictures=len(pixels_BHWC), sizes=self._sizes)
        with self._meter.note("encoder", len(pixels_BHWC), work):
            return self._inner.encode(pixels_BHWC)

    def close(self) -> None:
        self._inner.close()


class MeteredExecutor:
    """An executor with a meter and `num_slots` of its slots, so that one executor serves every batch size."""

    def __init__(self, inner: Executor, *, meter: Meter, num_slots: int, sizes: NumberSizes) -> None:
        if not 1 <= num_slots <= inner.num_slots:
            raise ValueError(f"num_slots must lie in 1..{inner.num_slots}, got {num_slots}")
        self._inner, self._meter, self._sizes = inner, meter, sizes
        self.num_slots = num_slots

    @property
    def config(self) -> DecoderConfig:
        return self._inner.config

    @property
    def operators(self) -> Operators:
        return self._inner.operators

    @property
    def queued(self) -> bool:
        return self._inner.queued

    @property
    def transfer(self) -> Transfer:
        return self._inner.transfer

    def project_prefix(self, visual_query_BQD: Tensor) -> list[Prefix]:
        num_pictures = len(visual_query_BQD)
        work = prefix_work(self.config, num_pictures=num_pictures, sizes=self._sizes)
        with self._meter.note("prefix", num_pictures, work):
            return self._inner.project_prefix(visual_query_BQD)

    def prefill(self, prompts: Sequence[Sequence[int]], prefixes: Sequence[Prefix], *, first_slot: int) -> Prediction:
        with self._note_prefill([len(prompt) for prompt in prompts], num_logits=len(prompts)):
            return self._inner.prefill(prompts, prefixes, first_slot=first_slot)

    def score(self, rows: Sequence[ScoreRow]) -> list[list[float]]:
        # The last token of a continuation is not fed, and each of its tokens needs its own logits.
        lengths = [len(row.prompt_ids) + sum(len(ids) - 1 for ids in row.continuations) for row in rows]
        with self._note_prefill(lengths, num_logits=sum(len(ids) for row in rows for ids in row.continuations)):
            return self._inner.score(rows)

    def decode(self, token_ids: Sequence[int] | Tensor, positions: Sequence[int]) -> Prediction:
        work = step_work(self.config, positions=positions, sizes=self._sizes)
        with self._meter.note("step", len(positions), work):
            return self._inner.decode(token_ids, positions)

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self._inner.move(source, target, num_tokens=num_tokens)

    def clear(self, slot: int, *, position: int | None = None) -> None:
        self._inner.clear(slot, position=position)

    def warm_up(self, *, prompt_tokens: int, new_tokens: int) -> WarmUp:
        return self._inner.warm_up(prompt_tokens=prompt_tokens, new_tokens=new_tokens)

    def _note_prefill(self, lengths: Sequence[int], *, num_logits: int) -> AbstractContextManager[None]:
        work = prefill_work(self.config, lengths=lengths, num_logits=num_logits, sizes=self._sizes)
        return self._meter.note("prefill", len(lengths), work)
