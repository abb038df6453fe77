"""The goals of a round on a GPU, each beside what the newest figures reach: those of the newest run of each engine."""

from dataclasses import dataclass
from typing import Literal

from scripts.peers.report import share_of
from scripts.peers.results import Results, Row
from scripts.peers.table import LARGE_JOBS, tuned

LARGE_JOB = 2000  # pictures


@dataclass(frozen=True, slots=True)
class Goal:
    """What one of our `engines` must reach at every batch size: a share of a ceiling, a rate, or a ratio of rates.

    A ratio is over the best of `over`, at the same batch size or at `over_batch`.
    """

    name: str
    wanted: float
    unit: Literal["of bandwidth", "of matmul", "pictures/s", "x"]
    part: str
    size: str
    batches: tuple[int, ...]
    engines: tuple[str, ...]
    over: tuple[str, ...] = ()
    over_batch: int = 0


_BFLOAT16, _INT8, _INT4 = map(tuned, ("ours-bfloat16", "ours-int8", "ours-int4"))
_PLAIN = _BFLOAT16[:1]
_JOBS = tuple(name for name in LARGE_JOBS if name.startswith(_PLAIN))
_FEWER_BITS = tuple(name for name in LARGE_JOBS if name not in _JOBS)
_JOB = "job", "7B+ViT-L/14", (LARGE_JOB,)
_STEP, _STEP_1B, _PREFILL = ("decode", "7B"), ("decode", "1B"), ("prefill", "7B")
_PICTURES = "vision", "ViT-L/14", (1, 5, 16, 64, 256)
_TOWER = (*_PICTURES[:2], _PICTURES[2][2:])
_FEW_ROWS, _MORE_ROWS = (1, 5, 16), (1, 5, 16, 64)
_HF, _COMPILED = ("hf-bfloat16",), ("hf-bfloat16-compiled",)
GOALS = (
    Goal("captions of 38 tokens by 7B in bfloat16", 250, "pictures/s", *_JOB, _JOBS),
    Goal("the same in fewer bits", 350, "pictures/s", *_JOB, _FEWER_BITS),
    Goal("the same in bfloat16, over the reference's loop of 64", 10, "x", *_JOB, _JOBS, ("reference-float16",), 64),
    Goal("decode of 7B in bfloat16", 0.85, "of bandwidth", *_STEP, _MORE_ROWS, _BFLOAT16),
    Goal("decode of 1B in bfloat16", 0.78, "of bandwidth", *_STEP_1B, _MORE_ROWS, _BFLOAT16),
    Goal("decode of 7B in int8", 0.75, "of bandwidth", *_STEP, (1,), _INT8),
    Goal("decode of 7B in int4", 0.70, "of bandwidth", *_STEP, (1,), _INT4),
    Goal("decode of 7B in int4, over bfloat16", 3, "x", *_STEP, _FEW_ROWS, _INT4, _PLAIN),
    Goal("prefill of 7B in bfloat16", 0.65, "of matmul", *_PREFILL, (5, 16, 64), _BFLOAT16),
    Goal("prefill of 7B in int8, over bfloat16", 1, "x", *_PREFILL, (16, 64), _INT8, _PLAIN),
    Goal("prefill of 7B in int4, over bfloat16", 1, "x", *_PREFILL, (16, 64), _INT4, _PLAIN),
    Goal("ViT-L/14 in bfloat16", 0.6, "of matmul", *_TOWER, _PLAIN),
    Goal("ViT-L/14 in float16", 0.6, "of matmul", *_TOWER, ("ours-float16",)),
    Goal("ViT-L/14 in bfloat16, over Hugging Face", 1, "x", *_PICTURES, _PLAIN, _HF + _COMPILED),
    Goal("the same in float16", 1, "x", *_PICTURES, ("ours-float16",), ("hf-float16", "hf-float16-compiled")),
    *(
        goal
        for size in ("7B", "1B")
        for goal in (
            Goal(f"decode of {size} in bfloat16, over Hugging Face", 1.8, "x", "decode", size, (1,), _PLAIN, _HF),
            Goal("the same, over its compiled steps", 1, "x", "decode", size, _FEW_ROWS, _PLAIN, _COMPILED),
            Goal(f"prefill of {size} in bfloat16, over Hugging Face", 1, "x", "prefill", size, _FEW_ROWS, _PLAIN, _HF),
        )
    ),
    Goal("decode of 1B in bfloat16, over llama.cpp", 1, "x", *_STEP_1B, _FEW_ROWS, _PLAIN, ("llama.cpp-bf16",)),
    Goal("the same in int8, over its Q8_0", 1, "x", *_STEP_1B, _FEW_ROWS, _INT8, ("llama.cpp-q8_0",)),
    Goal("the same in int4, over its Q4_0", 1.15, "x", *_STEP_1B, (1,), _INT4, ("llama.cpp-q4_0",)),
    Goal("the same with more rows", 2, "x", *_STEP_1B, (5, 16), _INT4, ("llama.cpp-q4_0",)),
)


def reached(goal: Goal, results: Results) -> dict[str, str]:
    """A row of the page: the goal, and the engine with most of its figures and, of several, the best worst one."""
    rows = {engine: [_newest(goal, engine, batch, results) for batch in goal.batches] for engine in goal.engines}
    values = {
        engine: [None if row is None else _value(goal, row, results) for row in found] for engine, found in rows.items()
    }
    known = {engine: [value for value in found if value is not None] for engine, found in values.items()}
    best = max(goal.engines, key=lambda engine: (len(known[engine]), min(known[engine], default=0.0)))
    runs = {row.run: results.runs[row.run].get("commit") for row in rows[best] if row is not None}
    whole = "met" if len(known[best]) == len(goal.batches) else "open"
    return {
        "name": goal.name,
        "batches": " / ".join(map(str, goal.batches)),
        "wanted": _text(goal, goal.wanted) + ("" if goal.unit == "x" else f" {goal.unit}"),
        "reached": " / ".join(_text(goal, value) for value in values[best]),
        "verdict": "**missed**" if min(known[best], default=goal.wanted) < goal.wanted else whole,
        "engine": best if runs else "-",
        "measured": "; ".join(f"{run[:10]}, {commit or 'unknown'}" for run, commit in sorted(runs.items())) or "-",
    }


def _newest(goal: Goal, engine: str, batch: int, results: Results) -> Row | None:
    """The engine's row of the newest run, with any number of threads."""
    wanted = goal.part, engine, goal.size, batch
    rows = (row for row in results.rows if (row.part, row.engine, row.size, row.batch) == wanted)
    return max(rows, key=lambda row: row.run, default=None)


def _value(goal: Goal, row: Row, results: Results) -> float | None:
    """The figure in the goal's unit; None if what it is compared with was not measured."""
    if goal.unit == "pictures/s":
        return row.median
    if goal.unit == "x":
        others = (_newest(goal, engine, goal.over_batch or row.batch, results) for engine in goal.over)
        rates = [other.median for other in others if other is not None]
        return row.median / max(rates) if rates else None
    if (share := share_of(row, results)) is None:
        return None
    return share.memory if goal.unit == "of bandwidth" else share.arithmetic


def _text(goal: Goal, value: float | None) -> str:
    """The figure, rounded; down if it looked like the goal that it misses."""
    if value is None:
        return "-"
    scale = 1 if goal.unit == "pictures/s" else 100
    whole = round(scale * value)
    if value < goal.wanted:
        whole = min(whole, round(scale * goal.wanted) - 1)
    return f"{whole}" if scale == 1 else f"{whole / 100:.2f}x" if goal.unit == "x" else f"{whole}%"
