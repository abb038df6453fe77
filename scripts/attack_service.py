"""Attacks `llama-adapter serve` with slow pictures, and writes its part of docs/service.json and docs/service.md.

Usage: python -m scripts.attack_service [--kinds TEXT ...] [--seconds N] [--out FOLDER]

Servers are processes on loopback. The exit code is 1 if a good request got no answer or a wrong one.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.measuring.report import load_average
from scripts.bench_service import PACKAGES
from scripts.common import Tell, add_out, machine, parser_of, silent, tell
from scripts.pages.render import save_part
from scripts.service_bench.attack import attack
from scripts.service_bench.load import warm_up
from scripts.service_bench.process import ServerProcess
from scripts.service_bench.promises import own_answers
from scripts.service_bench.questions import Workload, captions
from scripts.service_bench.slow_files import KINDS

GOOD, ATTACKERS = 32, 8
CALM_S = 5.0


def measure(kinds: Sequence[str], *, attack_s: float, tell: Tell = silent) -> dict[str, Any]:
    """Attack a fresh server with each kind; all figures as JSON values."""
    load_before, questions = load_average(), captions()
    with Captioner.load() as captioner:
        expected = [text for text, _, _ in own_answers(captioner, questions)]
    rows = []
    for kind in kinds:
        workload = Workload(questions, is_new=True)
        with ServerProcess() as server:
            asyncio.run(warm_up(server, workload, number=len(questions)))
            row = asyncio.run(
                attack(
                    server,
                    workload,
                    slow=KINDS[kind](),
                    good=GOOD,
                    attackers=ATTACKERS,
                    calm_s=CALM_S,
                    attack_s=attack_s,
                    expected=expected,
                )
            )
        rows.append({"kind": kind} | row)
        tell(f"{kind}: {row}")
    return {
        "rows": rows,
        "good": GOOD,
        "attackers": ATTACKERS,
        "calm_s": CALM_S,
        "attack_s": attack_s,
        "largest_mb": max(len(KINDS[kind]()) for kind in kinds) / 1e6,
        "circumstances": machine(*PACKAGES, load_before=load_before),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", default=[], metavar="TEXT", help="kinds with this text (default: all)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack (default: %(default)g)")
    add_out(parser, "service")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if not options.kinds or any(text in kind for text in options.kinds)]
    if not kinds:
        parser.error(f"--kinds matches none of: {', '.join(KINDS)}")
    content = measure(kinds, attack_s=options.seconds, tell=tell)
    save_part("service", "attack", content, options.out)
    under_attack = [row["under_attack"] for row in content["rows"]]
    return int(any(figures["num_failed"] or figures["num_wrong"] for figures in under_attack))


if __name__ == "__main__":
    sys.exit(main())
