"""Wraps an encoder and a runner, and records the time and the work of each call."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from llama_adapter.app.models.roofline import (
    NumberSizes,
    Work,
    encoder_work,
    prefill_work,
    prefix_work,
    step_work,
    weight_bytes,
)
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, Plan, Result, Runner, ScorePlan
from llama_adapter.vision.backends.base import VisionBackend, VisualQuery
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.pixels import PixelRule

Program = Literal["encoder", "prefix", "prefill", "mixed", "step"]
PROGRAMS: tuple[Program, ...] = ("encoder", "prefix", "prefill", "mixed", "step")


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a program: the number of pictures or rows, the seconds until the device was done, and the work."""

    program: Program
    num_rows: int
    seconds: float
    work: Work


@dataclass(kw_only=True, slots=True)
class Meter:
    """Records calls. It waits for the device before and after each call."""

    synchronise: Callable[[], None]
    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def note(self, program: Program, num_rows: int, work: Work) -> Iterator[None]:
        """Record the body of the context as one call."""
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
    def pixels(self) -> PixelRule:
        return self._inner.pixels

    def encode(self, pixels_BHWC: np.ndarray) -> VisualQuery:
        work = encoder_work(self._config, num_pictures=len(pixels_BHWC), sizes=self._sizes)
        with self._meter.note("encoder", len(pixels_BHWC), work):
            return self._inner.encode(pixels_BHWC)

    def close(self) -> None:
        self._inner.close()


class MeteredRunner:
    """A runner with a meter that uses only `num_slots` slots, so that one runner serves every batch size."""

    def __init__(self, inner: Runner, *, meter: Meter, num_slots: int, sizes: NumberSizes) -> None:
        if not 1 <= num_slots <= inner.config.num_slots:
            raise ValueError(f"num_slots must lie in 1..{inner.config.num_slots}, got {num_slots}")
        self._inner, self._meter, self._sizes = inner, meter, sizes
        self.config = replace(inner.config, num_slots=num_slots)
        self.operators_name, self.runs_mixed = inner.operators_name, inner.runs_mixed
        # These are not measured.
        self.empty_prefix, self.stored_prefix = inner.empty_prefix, inner.stored_prefix
        self.move, self.clear, self.reset, self.warm_up = inner.move, inner.clear, inner.reset, inner.warm_up

    def project_prefix(self, visual_query_BQD: Any) -> list[Prefix]:
        num_pictures = len(visual_query_BQD)
        work = prefix_work(self.config.decoder, num_pictures=num_pictures, sizes=self._sizes)
        with self._meter.note("prefix", num_pictures, work):
            return self._inner.project_prefix(visual_query_BQD)

    def run(self, plan: Plan) -> Result:
        """Run a plan, and record its program together with the choice of tokens."""
        if not plan.rows:
            return self._inner.run(plan)
        program: Program = "step" if isinstance(plan, DecodePlan) else "prefill"
        if isinstance(plan, MixedPlan):
            program = "mixed"
        with self._meter.note(program, len(plan.rows), self._work(plan)):
            return self._inner.run(plan)

    def _work(self, plan: Plan) -> Work:
        decoder, num_rows = self.config.decoder, len(plan.rows)
        if isinstance(plan, MixedPlan):
            both = self._work(plan.decode) + self._work(plan.prefill)
            return Work(both.flops, both.bytes - weight_bytes(decoder, sizes=self._sizes))  # the weights are read once
        if isinstance(plan, DecodePlan):
            return step_work(decoder, positions=plan.positions, sizes=self._sizes)
        lengths, num_logits = [len(prompt) for prompt in plan.prompts], num_rows
        if isinstance(plan, ScorePlan):
            # The last token of a continuation is not an input, and each of its tokens needs logits.
            continuations = [[len(ids) for ids in row] for row in plan.continuations]
            lengths = [length + sum(row) - len(row) for length, row in zip(lengths, continuations, strict=True)]
            num_logits = sum(map(sum, continuations))
        continued = plan.continuations if isinstance(plan, ScorePlan) else [()] * num_rows
        asked = list(zip(plan.prompts, continued, strict=True))
        equal_rows = all(row == asked[0] for row in asked)
        return prefill_work(decoder, lengths=lengths, num_logits=num_logits, sizes=self._sizes, equal_rows=equal_rows)
