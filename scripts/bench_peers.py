"""Compares our engine with other programs, and writes docs/peers.json and docs/peers.md.

Usage: python -m scripts.bench_peers [--threads N] [--sizes 1B 160M ViT-L/14] [--sections decode job vision] ...

Rows of earlier runs stay unless they are measured again; `--report` only renders the page. The extra `peers` installs
the other programs. Missing ones are listed on the page.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from scripts.common import tell
from scripts.pages.render import DOCS, render
from scripts.peers.results import Results, load, save
from scripts.peers.rounds import Plan, run_rounds
from scripts.peers.sizes import DECODERS, ENCODERS
from scripts.peers.table import Section, engine_names

SECTIONS: tuple[Section, ...] = tuple(one for one in get_args(Section) if one != "machine")


def main(arguments: Sequence[str]) -> int:
    """Measure and write. The exit code is 1 if no engine could be measured, 2 for invalid flags."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    try:
        plan = _plan(given)
    except ValueError as error:
        parser.error(str(error))
    out = Path(given.out)
    before = load(out)

    def keep(results: Results) -> None:
        save(before.merged(results), out)

    measured = Results()
    if not given.report:
        measured = run_rounds(plan, tell=tell, keep=keep)
    page = render("peers", json.loads(out.read_text(encoding="utf-8")))
    out.with_suffix(".md").write_text(page, encoding="utf-8")
    return 0 if given.report or any(row.part != "ceiling" for row in measured.rows) else 1


def build_parser() -> argparse.ArgumentParser:
    """All flags; the defaults are those of `Plan`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_peers",
        description=(__doc__ or "").partition("Usage:")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=Plan.threads, help="of every engine")
    sizes = ["1B", "160M", "ViT-L/14"]
    parser.add_argument("--sizes", nargs="+", choices=(*DECODERS, *ENCODERS), default=sizes, help="of models")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what is measured")
    parser.add_argument(
        "--engines", nargs="+", choices=engine_names(), help="only these (default: all but the slow variants)"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=list(Plan.batch_sizes), help="of steps, pictures")
    parser.add_argument(
        "--prefill-batch-sizes", nargs="+", type=int, default=list(Plan.prefill_batch_sizes), help="of prefill"
    )
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="each round starts every engine once")
    parser.add_argument("--budget", type=float, default=Plan.budget_s, help="seconds for the repetitions of one figure")
    parser.add_argument(
        "--long",
        type=float,
        default=Plan.long_s,
        help="seconds; figures that take longer are measured in one round only",
    )
    parser.add_argument("--flash", choices=("auto", "on", "off"), default=Plan.flash, help="attention of llama.cpp")
    parser.add_argument(
        "--work", default=str(Path(tempfile.gettempdir()) / "llama-adapter-peers"), help="working folder"
    )
    parser.add_argument("--out", default=str(DOCS / "peers.json"), help="results; the page is written beside this file")
    parser.add_argument("--report", action="store_true", help="measure nothing, render the page of the known results")
    return parser


def _plan(given: argparse.Namespace) -> Plan:
    return Plan(
        sections=tuple(given.sections),
        sizes=tuple(given.sizes),
        engines=None if given.engines is None else tuple(given.engines),
        batch_sizes=tuple(given.batch_sizes),
        prefill_batch_sizes=tuple(given.prefill_batch_sizes),
        rounds=given.rounds,
        threads=given.threads,
        work=given.work,
        budget_s=given.budget,
        long_s=given.long,
        flash=given.flash,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
