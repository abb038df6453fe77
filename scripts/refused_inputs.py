"""Sends invalid requests to a server, and writes statuses, times and memory to docs/service.json and docs/service.md.

Usage: python -m scripts.refused_inputs [--out FOLDER]

The exit code is 1 if a request gets another status or code than expected.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llama_adapter.app.measuring.report import load_average
from llama_adapter.app.online.types import ServiceLimits
from scripts.bench_service import PACKAGES
from scripts.common import Tell, add_out, machine, parser_of, silent, tell
from scripts.pages.render import save_part
from scripts.service_bench import bad_files
from scripts.service_bench.client import ask_once
from scripts.service_bench.exchange import exchange
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import captions
from scripts.service_bench.refused import Case, all_cases, allowed_hosts, chat, data_uri, posted
from scripts.service_bench.site import RedirectingSite

SITE = ("-m", "scripts.service_bench.site")
LARGEST = "not refused: the largest picture that is read"
_SETTLE_S = 0.3  # before memory left by a request is measured


def measure(*, tell: Tell = silent) -> dict[str, Any]:
    """Send every case to one server; all figures as JSON values."""
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
        "circumstances": machine(*PACKAGES, load_before=load_before),
    }


async def ask_all_pictures(server: ServerProcess) -> None:
    """Ask about all samples. Raises RuntimeError unless all are answered."""
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


def _row(server: ServerProcess, case: Case, *, tell: Tell) -> dict[str, Any]:
    pieces = case.pieces()
    if isinstance(pieces, list):
        pieces = list(pieces)  # made before the clock starts
    before = server.resident_mb()
    with suppress(OSError):  # without permission to reset it, growth is that over the peak so far
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
    """Send and write; 1 if an answer is not as expected."""
    parser = parser_of(__doc__)
    add_out(parser, "service")
    options = parser.parse_args(arguments)
    content = measure(tell=tell)
    save_part("service", "refusals", content, options.out)
    return 0 if all(row["is_right"] for row in content["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
