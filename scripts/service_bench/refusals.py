"""Sends invalid requests to a server, and measures statuses, times and memory."""

import asyncio
import time
from contextlib import suppress
from typing import Any

from llama_adapter.app.serving.online.types import ServiceLimits
from scripts.common import tell
from scripts.service_bench import bad_files
from scripts.service_bench.exchange import exchange
from scripts.service_bench.load import warm_up
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.questions import Workload, captions
from scripts.service_bench.refused import Case, all_cases, allowed_hosts, chat, data_uri, posted
from scripts.service_bench.site import COMMAND, RedirectingSite

_SETTLE_S = 0.3  # wait before measuring the memory that a request leaves behind


def measure_refusals(settings: object) -> dict[str, Any]:
    """Send every case to one server, between questions about all samples."""
    questions = captions()
    known = Workload(questions, is_new=False)
    with RedirectingSite() as site:
        hosts = [flag for host in allowed_hosts(site.port) for flag in ("--allow-url-host", host)]
        with ServerProcess(*hosts, command=COMMAND) as server:
            asyncio.run(warm_up(server, known, number=len(questions)))
            resident_mb = server.resident_mb()
            rows = [_row(server, case) for case in all_cases(site.port)]
            asyncio.run(warm_up(server, known, number=len(questions)))
            resident_after_mb = server.resident_mb()
            rows.append(_row(server, _largest()))
    return {"rows": rows, "resident_mb": resident_mb, "resident_after_mb": resident_after_mb}


def _largest() -> Case:
    num_pixels = ServiceLimits().max_pixels
    return Case(
        name=f"not refused: the largest picture that is read, {num_pixels / 1e6:.0f} megapixels",
        pieces=lambda: posted(chat(data_uri(bad_files.largest_picture(num_pixels=num_pixels)))),
        status=200,
        code="",
    )


def _row(server: ServerProcess, case: Case) -> dict[str, Any]:
    pieces = case.pieces()
    before = server.resident_mb()
    with suppress(OSError):  # without permission to reset the peak, growth is measured from the peak so far
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
