"""Compares our engine with other programs, and writes docs/peers.json and docs/peers.md.

Usage: python -m scripts.bench_peers [--threads N] [--sizes 1B 160M ViT-L/14] [--sections decode job vision] ...

For another processor than that of docs/peers.md, `--processor zen4` makes the page docs/peers-zen4.md. With `--device
cuda --processor h100`, or `h200`, a GPU is measured. With `--on cpu` in addition, the CPU stands in for it, which only
shows that the code works.

Rows of earlier runs stay unless they are measured again. The extra `peers` installs the other programs. Missing
programs are listed on the page.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from scripts.common import DOCS, add_out, parser_of, positive, tell
from scripts.pages import render
from scripts.peers.gpus import gpu_here
from scripts.peers.results import PROCESSORS, Results, from_json, to_json
from scripts.peers.rounds import Plan, run_rounds
from scripts.peers.sizes import DECODERS, ENCODERS
from scripts.peers.table import DEVICES, engine_names

CHOICES = {
    "processor": PROCESSORS,
    "sizes": (*DECODERS, *ENCODERS),
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


def parse(arguments: Sequence[str] | None) -> tuple[Plan, Path]:
    """The plan, which has a flag for each field that is annotated with a help text, and the folder for the results."""
    parser = parser_of(__doc__)
    add_out(parser, "peers")
    hints = get_type_hints(Plan, include_extras=True)
    texts = {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}
    for name, text in texts.items():
        default: Any = getattr(Plan, name)
        several = isinstance(default, tuple)
        kind = type(default[0] if several else default)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=str if kind is str else positive(kind),
            nargs="+" if several else None,
            choices=CHOICES.get(name),
            help=f"{text} (default: {' '.join(map(str, default)) if several else default})",
        )
    options = parser.parse_args(arguments)
    given: dict[str, Any] = {name: getattr(options, name) for name in texts if getattr(options, name) is not None}
    given |= {name: tuple(several) for name, several in given.items() if isinstance(several, list)}
    return replace(Plan(), **given), options.out or DOCS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write. The exit code is 1 if no engine could be measured, 2 for invalid flags."""
    plan, folder = parse(arguments)
    nothing = Results(processor=plan.processor)
    if nothing.device != plan.device:
        tell(f"error: --processor {plan.processor or '(none)'} is no page of --device {plan.device}")
        return 2
    if plan.device != "cpu" and not plan.on and gpu_here() != plan.processor:
        tell(
            f"error: --processor {plan.processor}, and the GPU here is {gpu_here() or 'another, or missing'}; see --on"
        )
        return 2
    folder.mkdir(parents=True, exist_ok=True)  # an unwritable one fails before the measurements
    before = load(folder, nothing)
    measured = run_rounds(plan, tell=tell, keep=lambda results: save(before.merged(results), folder))
    return 0 if any(row.part != "ceiling" for row in measured.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
