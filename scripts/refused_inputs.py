"""Sends a server what it has to refuse, and writes statuses, times and memory to docs/service.json and docs/service.md.

Usage: python -m scripts.refused_inputs [--out FOLDER]

The exit code is 1 when a request was not refused as it should be.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llama_adapter.app.measuring.circumstances import load_average
from llama_adapter.app.online.types import ServiceLimits
from scripts.bench_service import DOCS, here, write
from scripts.service_bench import bad_files
from scripts.service_bench.client import ask_once
from scripts.service_bench.exchange import exchange
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import captions
from scripts.service_bench.refused import Case, all_cases, allowed_hosts, chat, data_uri, posted
from scripts.service_bench.site import RedirectingSite

SITE = ("-m", "scripts.service_bench.site")
LARGEST = "not refused: the largest picture that is read"
_SETTLE_S = 0.3  # until memory that a request leaves behind is given back, if it is


def measure(*, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Every case at one server, as JSON values."""
    load_before = load_average()
    with RedirectingSite() as site:
        hosts = [flag for host in allowed_hosts(site.port) for flag in ("--allow-url-host", host)]
        cases = all_cases(site.port)
        with ServerProcess(*hosts, command=SITE) as server:
            asyncio.run(ask_all_pictures(server))
            resident_mb = server.resident_mb()
            rows = [_row(server, case, tell=tell) for case in cases]
            asyncio.run(ask_all_pictures(server))
            resident_after_mb = server.resident_mb()
            rows.append(_row(server, _largest(), tell=tell))
    return {
        "rows": rows,
        "resident_mb": resident_mb,
        "resident_after_mb": resident_after_mb,
        "circumstances": here(load_before=load_before),
    }


async def ask_all_pictures(server: ServerProcess) -> None:
    """Good requests; raises RuntimeError unless all are answered."""
    for question in captions():
        reply = await ask_once(server.host, server.port, question.body(stream=False), timeout_s=60)
        if reply.outcome != "answered":
            raise RuntimeError(f"A good request was not answered: {reply.status} {reply.code}")


def _largest() -> Case:
    num_pixels = ServiceLimits().max_pixels
    return Case(
        name=f"{LARGEST}, {num_pixels / 1e6:.0f} megapixels",
        pieces=lambda: posted(chat(data_uri(bad_files.largest_picture(num_pixels=num_pixels)))),
        status=200,
        code="",
    )


def _row(server: ServerProcess, case: Case, *, tell: Callable[[str], None]) -> dict[str, Any]:
    pieces = case.pieces()
    if isinstance(pieces, list):
        pieces = list(pieces)  # made before the clock runs
    before = server.resident_mb()
    with suppress(OSError):  # where it may not be reset, growth is that over the peak so far
        server.forget_peak()
    peak_before = server.peak_mb()
    came = exchange(server.host, server.port, pieces)
    peak = server.peak_mb()
    time.sleep(_SETTLE_S)
    is_right = (came.status, came.code) == (case.status, case.code)
    tell(f"{'ok' if is_right else 'WRONG'}: {case.name}: {came.status} {came.code} {came.message}")
    return {
        "name": case.name,
        "status": came.status,
        "code": came.code,
        "is_right": is_right,
        "ms": came.ms,
        "peak_mb": max(0.0, peak - peak_before),
        "left_mb": server.resident_mb() - before,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, tell and write; 1 when something was not refused as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of service.json and service.md (default: docs)")
    options = parser.parse_args(arguments)
    content = measure(tell=lambda line: print(line, file=sys.stderr, flush=True))
    options.out.mkdir(parents=True, exist_ok=True)
    write("refusals", content, options.out)
    return 0 if all(row["is_right"] for row in content["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
