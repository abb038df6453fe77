"""What a mixed step saves: prefill of one prompt and decode step of the other rows, in one program or in two."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from llama_adapter.app.captioning.parts import Parts
from llama_adapter.llm.prompt import format_prompt
from llama_adapter.llm.runners.base import DecodePlan, MixedPlan, PrefillPlan
from scripts.common import in_turn

_HALF_ANSWER = 17  # tokens after a row's prompt: half of a mean caption of 4 to 64 tokens


def measure_mixed_step(parts: Parts, *, rows: int, rounds: int) -> dict[str, Any] | None:
    """Median milliseconds of each program with `rows` slots in use; None if the runner has no mixed steps."""
    runner = parts.runner
    if not runner.runs_mixed:
        return None
    prompt = tuple(parts.model.tokenizer.encode(format_prompt(parts.info.default_prompt)))
    decode = DecodePlan(range(rows - 1), [len(prompt) + _HALF_ANSWER] * (rows - 1), [None] * (rows - 1))
    prefill = PrefillPlan([rows - 1], [prompt], [runner.empty_prefix()], [None], first_slot=rows - 1)
    ways: dict[str, Callable[[], object]] = {
        "prefill_ms": lambda: runner.run(prefill),
        "step_ms": lambda: runner.run(decode),
        "mixed_ms": lambda: runner.run(MixedPlan(decode, prefill)),
    }

    def timed(way: str) -> float:
        started = time.perf_counter()
        ways[way]()
        parts.backend.synchronise()
        return (time.perf_counter() - started) * 1e3

    taken = in_turn(ways, timed, rounds=5 * rounds + 1)
    medians_ms = {way: statistics.median(times_ms[1:]) for way, times_ms in taken.items()}  # first round: warm-up
    runner.reset()
    return {"rows": rows, "prompt_tokens": len(prompt), **medians_ms}
