"""What docs/peers.md shows of docs/peers.json: targets, shares of the machine, tables by engine and batch size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.models.roofline import NumberSizes, Work, encoder_work, prefill_work, step_work
from llama_adapter.runtime.devices import DTYPES
from scripts.peers.results import Results, Row, from_json
from scripts.peers.sizes import JOB_ENDS, NUM_PROMPT_TOKENS, num_steps
from scripts.peers.table import ENGINES, Device, Engine
from scripts.peers.targets import TARGETS, check
from scripts.peers.weights import bare_tower, decoder_sizes

_FEW_BITS = {"int8": 1.0, "int4": 4.5 / 8}  # bytes of a weight; int4 has one 16-bit scale for 32 weights
_MOST = 0.7  # A figure counts as bound by a ceiling from this share on
WANTED_SHARE = 0.8
# Wanted shares of the bandwidth, for one row on two threads of a CPU.
WANTED_OF_BANDWIDTH = {"ours-float32": 0.9, "ours-bfloat16": 0.9, "ours-int8": 0.85, "ours-int4": 0.75}
PARTS = {
    "decode": ("Decode", "tokens/s"),
    "prefill": ("Prefill", "tokens/s"),
    "vision": ("Pictures", "pictures/s"),
    "job": ("Caption jobs", "pictures/s"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Shares of the ceilings of the same run. The bandwidth is the one between the steps if it was measured."""

    memory: float
    arithmetic: float

    @property
    def sentence(self) -> str:
        """A few words on what bounds a figure."""
        if max(self.memory, self.arithmetic) < _MOST:
            return f"neither: {self.memory:.0%} of bandwidth, {self.arithmetic:.0%} of matmul"
        if self.memory > self.arithmetic:
            return f"memory: {self.memory:.0%} of bandwidth"
        return f"arithmetic: {self.arithmetic:.0%} of matmul"


def share_of(row: Row, results: Results) -> Share | None:
    """The shares for one of our figures; None for other engines, or if its run measured no ceiling."""
    engine = _engine(row.part, row.engine, device=results.device)
    if engine is None or engine.program != "ours" or row.part not in ("decode", "prefill", "vision"):
        return None
    itemsize = DTYPES[engine.dtype].itemsize
    weight = head = _FEW_BITS.get(engine.precision, itemsize)
    settings = results.runs[row.run].get("settings", {})
    if engine.precision == "int4" and "int4_head" in settings:  # before, the head had 4 bits too
        head = _FEW_BITS[settings["int4_head"]]
    sizes = NumberSizes(weight, itemsize, head)
    read_row = results.find("ceiling", "read", row.size, batch=1, threads=row.threads, run=row.run)
    matmul_row = results.find("ceiling", engine.ceiling, row.size, batch=1, threads=row.threads, run=row.run)
    if read_row is None or matmul_row is None:
        return None
    work, seconds = _work(row, sizes, device=results.device)
    # The best rate of a ceiling counts, because slower rounds were disturbed.
    memory = work.bytes / seconds / max(read_row.rates)
    if row.per_byte_read is not None:
        memory = work.bytes * row.per_byte_read / row.batch
    return Share(memory=memory, arithmetic=work.flops / seconds / max(matmul_row.rates))


def _engine(part: str, name: str, *, device: Device) -> Engine | None:
    """The engine of a row; None for a ceiling."""
    wanted = ("decode" if part == "prefill" else part, name, device)
    return next((one for one in ENGINES if (one.section, one.name, one.device) == wanted), None)


def _work(row: Row, sizes: NumberSizes, *, device: Device) -> tuple[Work, float]:
    """The work of one call, and the seconds it took."""
    if row.part == "vision":
        return encoder_work(bare_tower(row.size), num_pictures=row.batch, sizes=sizes), row.batch / row.median
    config = decoder_sizes(row.size)
    if row.part == "prefill":
        lengths = [NUM_PROMPT_TOKENS] * row.batch
        work = prefill_work(config, lengths=lengths, num_logits=row.batch, sizes=sizes)
        return work, row.batch * NUM_PROMPT_TOKENS / row.median
    middle = NUM_PROMPT_TOKENS + num_steps(row.size, device=device) // 2
    return step_work(config, positions=[middle] * row.batch, sizes=sizes), row.batch / row.median


def page_context(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the template; `figures` is the content of peers.json."""
    results = from_json(figures)
    return {
        "num_prompt_tokens": NUM_PROMPT_TOKENS,
        "job_ends": JOB_ENDS,
        "processor": results.processor,
        "device": results.device,
        "page": results.page,
        "sections": [_section(results, threads) for threads in sorted({row.threads for row in results.rows})],
        "missing": results.missing,
        "runs": {
            name: {"settings": {}, **run, "packages": {**run.get("versions", {}), **run.get("peers", {})}}
            for name, run in results.runs.items()
        },
    }


def _section(results: Results, threads: int) -> dict[str, Any]:
    rows = [row for row in results.rows if row.threads == threads]
    reached = [check(target, results, threads=threads) for target in TARGETS if results.device == "cpu"]
    sizes = dict.fromkeys(row.size for row in rows)
    return {
        "threads": threads,
        "targets": [(one, _bound(one.ours, results)) for one in reached if one.ratio is not None and one.ours],
        "num_unmeasured": sum(one.ratio is None for one in reached),
        "shares": list(_shares(rows, results)) if results.device == "cpu" else [],
        "ceilings": [row for row in rows if row.part == "ceiling"],
        "tables": [
            _table(results, part, size, threads=threads)
            for part in PARTS
            for size in sizes
            if results.engines(part, size, threads=threads)
        ],
    }


def _shares(rows: Sequence[Row], results: Results) -> Iterator[dict[str, Any]]:
    """Decode (1B and 7B, batch 1) is compared with the bandwidth, prefill and pictures with matrix products."""
    for row in rows:
        share = share_of(row, results)
        if share is None or (row.part == "decode" and (row.batch != 1 or row.size not in ("1B", "7B"))):
            continue
        both = [("bandwidth", share.memory), ("matmul", share.arithmetic)]
        (name, reached), beside = both if row.part == "decode" else both[::-1]
        is_of_bandwidth = row.part == "decode" and row.threads == 2
        wanted = WANTED_OF_BANDWIDTH[row.engine] if is_of_bandwidth else WANTED_SHARE
        yield {"row": row, "of": name, "wanted": wanted, "reached": reached, "beside": beside}


def _table(results: Results, part: str, size: str, *, threads: int) -> dict[str, Any]:
    """All engines at all batch sizes, ratios of ours to each of the others, and the stages of jobs."""
    names = results.engines(part, size, threads=threads)
    there = [row for row in results.rows if (row.part, row.size, row.threads) == (part, size, threads)]
    batches = sorted({row.batch for row in there})
    rows = {name: [results.find(part, name, size, batch=batch, threads=threads) for batch in batches] for name in names}
    engines = {name: _engine(part, name, device=results.device) for name in names}
    ours = [name for name, engine in engines.items() if engine is not None and engine.program == "ours"]
    return {
        "title": PARTS[part][0],
        "unit": PARTS[part][1],
        "size": size,
        "batches": batches,
        "engines": [
            {
                "name": name,
                "note": "" if engine is None else engine.note,
                "rows": rows[name],
                "shares": [share for row in rows[name] if row is not None and (share := share_of(row, results))],
            }
            for name, engine in engines.items()
        ],
        "ours": ours,
        "has_errors": any(row.error for row in there),
        "ratios": {
            other: [[_ratio(mine, theirs) for mine, theirs in zip(rows[one], rows[other], strict=True)] for one in ours]
            for other in names
            if other not in ours
        },
        "jobs": [(row, _stages(row), _same_answers(row, there)) for row in there if part == "job"],
    }


def _ratio(mine: Row | None, theirs: Row | None) -> float | None:
    return None if mine is None or theirs is None else mine.median / theirs.median


def _same_answers(row: Row, rows: Sequence[Row]) -> bool | None:
    """Whether our float32 engine gives the reference's captions; None for other engines."""
    reference = next((one for one in rows if one.engine.startswith("reference")), None)
    return None if reference is None or row.engine != "ours-float32" else row.answers == reference.answers


def _bound(row: Row | None, results: Results) -> str:
    if row is None or row.part == "job":
        return "" if row is None else _stages(row)
    share = share_of(row, results)
    return "no ceiling measured" if share is None else share.sentence


def _stages(row: Row) -> str:
    total = sum(row.stages_s.values())
    longest = sorted(row.stages_s.items(), key=lambda stage: -stage[1])[:3]
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in longest) if total else ""
