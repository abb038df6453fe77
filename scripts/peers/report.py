"""docs/peers.md of docs/peers.json: what was aimed at and reached, and all figures behind it. Measures nothing."""

from collections.abc import Iterator, Sequence

from scripts.peers.results import Results, Row
from scripts.peers.shares import OURS, share_of
from scripts.peers.sizes import JOB_ENDS, NUM_PROMPT_TOKENS
from scripts.peers.table import ENGINES
from scripts.peers.targets import TARGETS, Target, check

WANTED_SHARE = 0.8

INTRODUCTION = f"""\
# Beside other programs

Measured by `python -m scripts.bench_peers` on the CPU: our engine and others, the same random weights, the same shapes,
on one machine in turn. This page is made of [peers.json](peers.json).

- **In turn**: a round starts every engine once, each in a process of its own and one alive at a time, so that no
  engine's waiting threads disturb another. Figures are medians of rounds, with the least and the greatest behind them
  where there were several; what took long in the first round was not repeated.
- **decode**: {NUM_PROMPT_TOKENS} tokens of prompt, then greedy steps for all rows at once; the median step counts.
  Rows whose prompt was not computed for the prefill figure are copies of the first.
  **prefill**: prompts of {NUM_PROMPT_TOKENS} tokens to their first new token. A round calls a prefill, or an encoder,
  up to five times in a few seconds, and the median counts: without the first call where there were three or more, so
  that what is slow is measured cold.
- **ours** always computes the adapter, in all layers but the first; the others cannot, and have that much less to do.
  int8 is our 8-bit weights with activations quantised row by row; what is not a linear layer is float32.
- **hf**: Hugging Face transformers, the model called as its `generate` does, whose own work between the steps is left
  out. **llama.cpp**: through llama-cpp-python's batch API, each row a sequence with memory of its own; Q8_0 and Q4_0 as
  its own tool makes them. **onnxruntime**, **openvino**: the encoder as our ONNX file, int8 by their own tools.
- **job**: {len(JOB_ENDS)} pictures, from files to texts that end after {", ".join(map(str, JOB_ENDS[:-1]))} and
  {JOB_ENDS[-1]} tokens, through the captioner. **reference** is a loop as the reference's: float32, plain linear
  layers, the adapter's keys and values made anew at each step, the whole batch to the end of its longest caption.
- **vision**: CLIP's tower with all tokens, without the visual blocks, which the others do not know.
- **of the machine**: the larger of two shares: counted bytes over the bandwidth, the best of summing and copying a
  large buffer; counted FLOPs over the rate of the linear layers alone, laid out and computed as ours are, at 257 or
  1,024 rows, in the same number type. Both were measured in the same run. The second tells what all else costs beside
  the products, not how good the products are: for that, see the other programs.
"""
_UNITS = {"decode": "tokens/s", "prefill": "tokens/s", "vision": "pictures/s", "job": "pictures/s"}
_TITLES = {"decode": "Decode", "prefill": "Prefill", "vision": "Pictures", "job": "Caption jobs"}


def as_markdown(results: Results) -> str:
    """The page."""
    lines = [INTRODUCTION]
    for threads in sorted({row.threads for row in results.rows}):
        lines += _thread_section(results, threads=threads)
    lines += _missing(results)
    lines += ["## Circumstances", ""]
    lines += [f"- {_circumstances(name, results)}" for name in results.runs]
    return "\n".join(lines) + "\n"


def _thread_section(results: Results, *, threads: int) -> Iterator[str]:
    yield f"## {threads} thread{'s' if threads > 1 else ''}"
    yield ""
    yield from _targets(results, threads=threads)
    yield from _shares(results, threads=threads)
    sizes = dict.fromkeys(row.size for row in results.rows if row.threads == threads)
    for part in ("decode", "prefill", "vision", "job"):
        for size in sizes:
            if results.engines(part, size, threads=threads):
                yield from _figures(results, part=part, size=size, threads=threads)


def _targets(results: Results, *, threads: int) -> Iterator[str]:
    reached = [check(target, results, threads=threads) for target in TARGETS]
    measured = [one for one in reached if one.ratio is not None]
    if not measured:
        return
    num_met = sum(one.is_met is True for one in measured)
    yield f"{num_met} of {len(measured)} targets are met; {len(reached) - len(measured)} more were not measured."
    yield ""
    yield "| figure | ours | over | wanted | reached | | what bounds ours |"
    yield "| --- | --- | --- | ---: | ---: | --- | --- |"
    for one in measured:
        assert one.ours is not None
        assert one.peer is not None
        bound = "" if one.is_met else _bound(one.ours, results)
        mark = "met" if one.is_met else "**missed**"
        aside = "" if one.is_interleaved else " (another run)"
        yield (
            f"| {_name(one.target)} | {one.target.ours} | {one.peer.engine}{aside} | {one.target.wanted:.1f}x "
            f"| {one.ratio:.2f}x | {mark} | {bound} |"
        )
    yield ""


def _shares(results: Results, *, threads: int) -> Iterator[str]:
    """Decoding alone by memory, prefill and pictures by arithmetic: both are to be near the machine's limit."""
    lines = []
    for row in results.rows:
        share = share_of(row, results) if row.threads == threads else None
        if share is None or (row.part == "decode" and (row.batch, row.size) != (1, "1B")):
            continue
        part = share.memory if row.part == "decode" else share.arithmetic
        what = "bandwidth" if row.part == "decode" else "matmul"
        mark = "met" if part >= WANTED_SHARE else "**missed**"
        name = f"{row.size} {row.part}, batch {row.batch}"
        beside = f"matmul {share.arithmetic:.0%}" if row.part == "decode" else f"bandwidth {share.memory:.0%}"
        lines.append(f"| {name} | {row.engine} | {WANTED_SHARE:.0%} of {what} | {part:.0%} | {mark} | {beside} |")
    if lines:
        yield "| figure | ours | wanted | reached | | beside it |"
        yield "| --- | --- | ---: | ---: | --- | --- |"
        yield from (*lines, "")
    ceilings = [row for row in results.rows if row.part == "ceiling" and row.threads == threads]
    for run in dict.fromkeys(row.run for row in ceilings):
        told = "; ".join(_ceiling(row) for row in ceilings if row.run == run)
        yield f"Ceilings of the run of {run}, the best of its rounds: {told}."
        yield ""


def _figures(results: Results, *, part: str, size: str, threads: int) -> Iterator[str]:
    """All engines at all batch sizes, and ours over each of the others."""
    engines = results.engines(part, size, threads=threads)
    batches = sorted({row.batch for row in results.rows if (row.part, row.size, row.threads) == (part, size, threads)})
    yield f"### {_TITLES[part]}, {size}, {threads} thread{'s' if threads > 1 else ''}"
    yield ""
    yield f"{_UNITS[part]}, medians (least to greatest of the rounds)."
    yield ""
    yield "| engine | " + " | ".join(f"batch {batch}" for batch in batches) + " | of the machine |"
    yield "| --- |" + " ---: |" * len(batches) + " --- |"
    for engine in engines:
        rows = [results.find(part, engine, size, batch=batch, threads=threads) for batch in batches]
        shares = [share_of(row, results) for row in rows if row is not None]
        told = ", ".join(f"{max(share.memory, share.arithmetic):.0%}" for share in shares if share is not None)
        yield f"| {engine}{_note(part, engine)} | " + " | ".join(map(_rate, rows)) + f" | {told} |"
    yield ""
    yield from _ratios(results, part=part, size=size, threads=threads, batches=batches)
    if part == "job":
        yield from _job_details(results, size=size, threads=threads)


def _ratios(results: Results, *, part: str, size: str, threads: int, batches: Sequence[int]) -> Iterator[str]:
    engines = results.engines(part, size, threads=threads)
    ours = [engine for engine in engines if engine in OURS]
    others = [engine for engine in engines if engine not in OURS]
    if not ours or not others:
        return
    yield f"Ours over theirs, batch {' / '.join(map(str, batches))}."
    yield ""
    yield "| over | " + " | ".join(ours) + " |"
    yield "| --- |" + " ---: |" * len(ours)
    for other in others:
        cells = []
        for engine in ours:
            ratios = []
            for batch in batches:
                mine, theirs = (results.find(part, one, size, batch=batch, threads=threads) for one in (engine, other))
                ratios.append("-" if mine is None or theirs is None else f"{mine.median / theirs.median:.2f}")
            cells.append(" / ".join(ratios))
        yield f"| {other} | " + " | ".join(cells) + " |"
    yield ""


def _job_details(results: Results, *, size: str, threads: int) -> Iterator[str]:
    rows = [row for row in results.rows if (row.part, row.size, row.threads) == ("job", size, threads)]
    reference = next((row for row in rows if row.engine.startswith("reference")), None)
    for row in rows:
        same = ""
        if reference is not None and row.engine == "ours-float32":
            same = f"; captions {'equal' if row.answers == reference.answers else 'not all equal'} to the reference's"
        yield f"- {row.engine}: {row.batch / row.median:.2f} s, {_stages(row)}{same}"
    yield ""


def _missing(results: Results) -> Iterator[str]:
    if not results.missing:
        return
    yield "## Not measured"
    yield ""
    for one in results.missing:
        yield f"- {one.engine}, {one.size} ({one.section}, threads: {one.threads}): {one.problem}, {one.reason}"
    yield ""


def _circumstances(name: str, results: Results) -> str:
    run = results.runs[name]
    versions = {**run.get("versions", {}), **run.get("peers", {})}
    settings = run.get("settings", {})
    told = ", ".join(f"{package} {version}" for package, version in versions.items())
    load = " ".join(map(str, run.get("load_before") or ["unknown"]))
    return (
        f"{name}: {run.get('cpu', 'unknown processor')}, {run.get('threads', '?')} of {run.get('num_cpus', '?')} CPUs, "
        f"load before the run {load}; rounds: {settings.get('rounds', '?')}, flash attention of llama.cpp: "
        f"{settings.get('flash', '?')}; {told}" + (f"; commit {run['commit']}" if run.get("commit") else "")
    )


def _bound(row: Row, results: Results) -> str:
    if row.part == "job":
        return _stages(row)
    share = share_of(row, results)
    return "no ceiling measured" if share is None else share.sentence


def _stages(row: Row) -> str:
    total = sum(row.stages_s.values())
    longest = sorted(row.stages_s.items(), key=lambda stage: -stage[1])[:3]
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in longest) if total else ""


def _name(target: Target) -> str:
    return f"{target.size} {target.part}, batch {target.batch}"


def _rate(row: Row | None) -> str:
    if row is None:
        return "-"
    spread = f" ({_number(min(row.rates))} to {_number(max(row.rates))})" if len(row.rates) > 1 else " (one round)"
    return f"{_number(row.median)}{spread}"


def _number(rate: float) -> str:
    return f"{rate:,.2f}" if rate < 10 else f"{rate:,.1f}" if rate < 1000 else f"{rate:,.0f}"


def _ceiling(row: Row) -> str:
    unit = "GB/s" if row.engine == "read" else "GFLOP/s"
    return f"{row.size} {row.engine} {max(row.rates) / 1e9:,.0f} {unit}"


def _note(part: str, engine: str) -> str:
    section = "decode" if part == "prefill" else part
    notes = [one.note for one in ENGINES if (one.section, one.name) == (section, engine) and one.note]
    return f" ({notes[0]})" if notes else ""
