"""Runs the benchmark of another checkout, and adds its figures to the page here, as engines with `-before`.

Usage: python -m scripts.gpu_before COMMIT CHECKOUT --processor h100 [--out FOLDER] [flags of its scripts.bench_peers]

Figures are added while it runs. COMMIT is what the page calls its code, which a copy with a patch does not know.
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.bench_peers import load, save
from scripts.common import DOCS, add_out, parser_of
from scripts.peers.gpus import GPUS
from scripts.peers.results import Results

_EVERY_S = 5.0
_OWN_S = 20.0  # of its `--limit`, to start both programs and to save


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code is that of the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("commit")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--processor", choices=GPUS, required=True)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for all of it")
    add_out(parser, "peers-GPU")
    options, flags = parser.parse_known_args(arguments)
    nothing, out = Results(processor=options.processor), options.out or DOCS
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.bench_peers", "--processor", options.processor, "--out", folder]
        command += ["--limit", f"{options.limit - _OWN_S:.0f}"]
        with subprocess.Popen([*command, *flags], cwd=options.checkout) as process:
            code = None
            while code is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(_EVERY_S)
                found = _renamed(load(Path(folder), nothing), commit=options.commit)
                save(load(out, nothing).merged(found), out)
    return code


def _renamed(found: Results, *, commit: str) -> Results:
    """The results as they are on the page here. Their shares are not: the work is counted as it is here."""
    return replace(
        found,
        runs={name: {**run, "commit": commit} for name, run in found.runs.items()},
        rows=tuple(replace(row, engine=f"{row.engine}-before") for row in found.rows if row.part != "ceiling"),
        missing=tuple(replace(one, engine=f"{one.engine}-before") for one in found.missing),
    )


if __name__ == "__main__":
    sys.exit(main())
