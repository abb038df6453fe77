"""Collects what `llama-adapter bench --out` wrote into docs/performance.json, and writes docs/performance.md of it.

Usage: python -m scripts.bench_report [RESULT.json ...]

A result replaces the one of the same model, workload, type, device and threads. Without files only the page is written.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.measuring.bench_report import circumstance_lines, headline, number_types

DOCS = Path(__file__).resolve().parents[1] / "docs"
TARGETS = DOCS / "targets.md"  # kept by hand: what was aimed at and not reached, and why
STAGES = ("read", "encoder", "prefix", "prefill", "step", "rest")
Result = Mapping[str, Any]

INTRODUCTION = """\
# Performance

Measured by `llama-adapter bench`, which reads sample pictures, encodes and answers them through the same code as
`caption` and `ask`. This page is made by `python -m scripts.bench_report` of [performance.json](performance.json).

- **yesno**: a question with the choices Yes and No, scored in one pass. **caption**: 64 new tokens a picture (models
  with random weights never end early; the embedded model ends when it has said what it has to say).
- **random 160M**: a LLaMA of that size with random weights, an adapter in all layers but the first, behind ViT-L/14 and
  8 visual blocks. Its answers are nonsense, its speed is that of a trained one. At 160M the encoder is more than twice
  as large as the decoder, and takes most of the time, but for captions one by one.
- **of bandwidth, of matmul**: achieved over what was measured in the same run, on the same threads: the best of summing
  and of copying a buffer far larger than the caches, and the model's own linear layers, weights laid out as for the
  model, at 257 and 1,024 rows. Bytes and FLOPs are counted from the sizes (`roofline.py`): weights once a pass,
  keys and values, matrix products, the used half of causal attention.
- **bound by**: the largest share of the time. Memory or arithmetic count for as much of a call's time as their ceiling
  explains; what is left of all calls, and all that is neither call nor reading, is overhead.

![Time of a picture by stage, and shares of the ceilings, for random 160M in bfloat16](performance-160M.png)

(`llama-adapter bench --random 160M --workload caption --dtype bfloat16 --plot FILE.png`, two threads)

The machine is shared, and other programs ran beside: the load before each run is given, and how many processors the
run itself kept busy at each batch size, which is the number of threads where nobody took its place. Ceilings are from
the same minutes as the figures beside them. Where there was one round only, figures may be some per cent off.
"""


def main(files: Sequence[str]) -> None:
    place = DOCS / "performance.json"
    known = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else []
    results = {_key(result): result for result in known}
    for file in files:
        result = json.loads(Path(file).read_text(encoding="utf-8"))
        results[_key(result)] = result
    ordered = sorted(results.values(), key=_key)
    place.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    (DOCS / "performance.md").write_text(as_markdown(ordered), encoding="utf-8")


def as_markdown(results: Sequence[Result]) -> str:
    """The page: all results in one table, then each with its stages, its ceilings and its circumstances."""
    is_single = all(_threads(result) == 1 for result in results)
    lines = [
        INTRODUCTION,
        *(["Measured on one thread only, since the other processors were in use.", ""] if is_single else []),
        "| model | type | threads | workload | batch | pictures/s | tokens/s | p50 ms | p95 ms | bound by |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for result in results:
        start = f"| {result['model']} | {number_types(result)} | {_threads(result)} | {result['workload']} "
        lines += [
            f"{start}| {batch['batch_size']} | {batch['pictures_per_s']:,.2f} | {batch['tokens_per_s']:,.1f} "
            f"| {batch['latency_p50_ms']:,.0f} | {batch['latency_p95_ms']:,.0f} "
            f"| {batch['bound_by']} ({batch['bounds'][batch['bound_by']]:.0%}) |"
            for batch in result["batches"]
        ]
    lines += ["", TARGETS.read_text(encoding="utf-8").rstrip()]
    for result in results:
        lines += ["", *_section(result)]
    return "\n".join(lines) + "\n"


def _section(result: Result) -> list[str]:
    threads = f"{_threads(result)} thread{'s' if _threads(result) > 1 else ''}"
    lines = [
        f"## {result['model']}, {result['workload']}, {number_types(result)}, {threads}",
        "",
        f"{headline(result)}.",
        "",
        "| batch | " + " | ".join(STAGES) + " | encoder of matmul | prefill of matmul | decode step of bandwidth |",
        "| ---: " * (len(STAGES) + 4) + "|",
    ]
    for batch in result["batches"]:
        stages = " | ".join(f"{batch['stages_ms'][name]:,.2f}" for name in STAGES)
        shares = [
            _share(batch, "encoder", "matmul_share", "gflops_per_s", "GFLOP/s"),
            _share(batch, "prefill", "matmul_share", "gflops_per_s", "GFLOP/s"),
            _share(batch, "step", "bandwidth_share", "gbytes_per_s", "GB/s"),
        ]
        lines.append(f"| {batch['batch_size']} | {stages} | {' | '.join(shares)} |")
    return [*lines, "", "Stages in ms for each picture.", *(f"\n{line}." for line in circumstance_lines(result))]


def _share(batch: Result, program: str, share: str, rate: str, unit: str) -> str:
    one = batch["programs"].get(program)
    return "-" if one is None else f"{one[share]:.0%} ({one[rate]:,.1f} {unit})"


def _threads(result: Result) -> int:
    return int(result["circumstances"]["threads"])


def _key(result: Result) -> tuple[str, ...]:
    before, after = (
        [str(result[name]) for name in names]
        for names in (("model", "device", "workload"), ("mode", "operators", "vision"))
    )
    return (*before, number_types(result), *after, str(_threads(result)))


if __name__ == "__main__":
    main(sys.argv[1:])
