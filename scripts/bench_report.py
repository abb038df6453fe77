"""Collects results of `llama-adapter bench --out` in docs/performance.json, and writes docs/performance.md.

Usage: python -m scripts.bench_report [RESULT.json ...]

A result replaces an earlier one with the same model, workload, type, device and threads. Without files, only the page
is written.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_adapter.app.jobs.report import numbers
from scripts.pages import render

Result = Mapping[str, Any]


def main(files: Sequence[str]) -> None:
    """Merge the files into the figures, and write both files."""
    given = [json.loads(Path(file).read_text(encoding="utf-8")) for file in files]
    results = {_key(result): result for result in [*render.read("performance"), *given]}
    render.save("performance", [results[key] for key in sorted(results)])


def _key(result: Result) -> tuple[str, ...]:
    model, device, workload, *others = (
        str(result[name]) for name in ("model", "device", "workload", "mode", "operators", "vision")
    )
    types, threads = numbers(result["dtype"], result["precision"]), str(result["circumstances"]["threads"])
    return (model, device, workload, types, *others, threads)


if __name__ == "__main__":
    main(sys.argv[1:])
