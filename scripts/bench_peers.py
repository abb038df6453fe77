"""Compares our engine with other programs, and writes docs/peers.json and docs/peers.md.

Usage: python -m scripts.bench_peers [--threads N] [--sizes 1B 160M ViT-L/14] [--sections decode job vision sight] ...

For another processor than that of docs/peers.md, `--processor zen4` makes the page docs/peers-zen4.md. With `--device
cuda --processor h100`, or `h200`, a GPU is measured. With `--on cpu` in addition, the CPU stands in for it, which only
shows that the code works.

Rows of earlier runs stay unless they are measured again. The extra `peers` installs the other programs. Missing
programs are listed on the page.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.bench import parse_settings
from scripts.common import tell
from scripts.pages import render
from scripts.peers.gpus import gpu_here
from scripts.peers.results import PROCESSORS, Results, from_json, to_json
from scripts.peers.rounds import Plan, run_rounds
from scripts.peers.sizes import DECODERS, ENCODERS, SIGHTS
from scripts.peers.table import DEVICES, engine_names

CHOICES = {
    "processor": PROCESSORS,
    "sizes": (*DECODERS, *ENCODERS, *SIGHTS),
    "sections": Plan.sections,
    "device": DEVICES,
    "engines": engine_names(),
}


def load(folder: Path, nothing: Results) -> Results:
    """Read what `save` wrote for the same processor; returns `nothing` if there is no file."""
    return from_json(render.read(nothing.page, folder)) if (folder / f"{nothing.page}.json").is_file() else nothing


def save(results: Results, folder: Path) -> None:
    """Write the figures and their page."""
    render.save(results.page, to_json(results), folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write. The exit code is 1 if no engine could be measured, 2 for invalid flags."""
    quick = Plan(sections=("decode",), sizes=("tiny",), rounds=1)
    plan, folder, _ = parse_settings(__doc__, arguments, page="peers", full=Plan(), quick=quick, choices=CHOICES)
    nothing = Results(processor=plan.processor)
    if nothing.device != plan.device:
        tell(f"error: --processor {plan.processor or '(none)'} is no page of --device {plan.device}")
        return 2
    if plan.device != "cpu" and not plan.on and gpu_here() != plan.processor:
        tell(
            f"error: --processor {plan.processor}, and the GPU here is {gpu_here() or 'another, or missing'}; see --on"
        )
        return 2
    before = nothing if folder is None else load(folder, nothing)

    def keep(results: Results) -> None:
        if folder is not None:
            save(before.merged(results), folder)

    measured = run_rounds(plan, tell=tell, keep=keep)
    return 0 if any(row.part != "ceiling" for row in measured.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
