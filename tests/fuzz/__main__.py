"""`python -m tests.fuzz run --minutes 30 [--target NAME]`, and `python -m tests.fuzz replay TARGET FILE...`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.campaign import run_campaign
from tests.fuzz.findings import finding_of
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS


def main(given: Sequence[str] | None = None) -> int:
    """Returns 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="fuzz for some minutes, targets in turn")
    run.add_argument("--minutes", type=float, default=30.0)
    one_of_them = {"choices": TARGETS, "metavar": "TARGET"}
    run.add_argument("--target", action="append", default=[], help="only this one; may be repeated", **one_of_them)
    run.add_argument("--folder", type=Path, default=Path(".fuzz"), help="where findings and what is learnt are kept")
    replay = commands.add_parser("replay", help="run files of inputs through a target")
    replay.add_argument("target", **one_of_them)
    replay.add_argument("files", nargs="+", type=Path)
    commands.add_parser("list", help="the targets")
    arguments = parser.parse_args(given)
    if arguments.command == "list":
        for target in TARGETS.values():
            print(f"{target.name:20} {target.about}")
        return 0
    if arguments.command == "replay":
        return _replay(TARGETS[arguments.target], arguments.files)
    if not arguments.minutes > 0:
        parser.error(f"--minutes must be above 0, got {arguments.minutes}")
    chosen = [TARGETS[name] for name in arguments.target] or list(TARGETS.values())
    return run_campaign(chosen, minutes=arguments.minutes, folder=arguments.folder.resolve())


def _replay(target: Target, files: list[Path]) -> int:
    num_found = 0
    for path in files:
        found, outcome = finding_of(target, path.read_bytes())
        print(f"{path}: {outcome if found is None else f'finding: {found.signature}'}")
        if found is not None:
            num_found += 1
            print(found.told)
    return 1 if num_found else 0


if __name__ == "__main__":
    sys.exit(main())
