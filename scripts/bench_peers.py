"""Compares our engine with other programs, and writes docs/peers.json and docs/peers.md.

Usage: python -m scripts.bench_peers [--threads N] [--sizes 1B 160M ViT-L/14] [--sections decode job vision] ...

Rows of earlier runs stay unless they are measured again. The extra `peers` installs the other programs. Missing ones
are listed on the page.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.common import positive, tell
from scripts.pages.render import DOCS, render
from scripts.peers.results import Results, load, save
from scripts.peers.rounds import Plan, run_rounds
from scripts.peers.sizes import DECODERS, ENCODERS
from scripts.peers.table import engine_names

FLAGS: dict[str, dict[str, Any]] = {  # by the fields of `Plan`
    "threads": {"type": positive(int), "help": "of every engine"},
    "sizes": {"nargs": "+", "choices": (*DECODERS, *ENCODERS), "help": "of models"},
    "sections": {"nargs": "+", "choices": Plan.sections, "help": "what is measured"},
    "engines": {"nargs": "+", "choices": engine_names(), "help": "only these (None: all)"},
    "batch_sizes": {"nargs": "+", "type": positive(int), "help": "of steps, pictures"},
    "prefill_batch_sizes": {"nargs": "+", "type": positive(int), "help": "of prefill"},
    "rounds": {"type": positive(int), "help": "each round starts every engine once"},
    "budget_s": {"type": positive(float), "help": "seconds for the repetitions of one figure"},
    "long_s": {"type": positive(float), "help": "seconds; figures that take longer are measured in one round only"},
    "work": {"help": "working folder"},
}


def main(arguments: Sequence[str]) -> int:
    """Measure and write. The exit code is 1 if no engine could be measured, 2 for invalid flags."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_peers",
        description=(__doc__ or "").partition("Usage:")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, options in FLAGS.items():
        flag = name.removesuffix("_s").replace("_", "-")
        parser.add_argument(f"--{flag}", dest=name, default=getattr(Plan, name), **options)
    parser.add_argument("--out", type=Path, default=DOCS / "peers.json", help="results; the page is written beside it")
    given = parser.parse_args(arguments)
    values: dict[str, Any] = {name: getattr(given, name) for name in FLAGS}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    before = load(given.out)

    def keep(results: Results) -> None:
        save(before.merged(results), given.out)

    measured = run_rounds(Plan(**values), tell=tell, keep=keep)
    page = render("peers", json.loads(given.out.read_text(encoding="utf-8")))
    given.out.with_suffix(".md").write_text(page, encoding="utf-8")
    return 0 if any(row.part != "ceiling" for row in measured.rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
