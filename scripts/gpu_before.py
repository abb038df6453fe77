"""Runs the benchmark of another checkout, and adds its figures to the page here, as engines with `-before`.

Usage: python -m scripts.gpu_before CHECKOUT --processor h100 [--out FOLDER] [flags of its scripts.bench_peers]
"""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code is that of the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--processor", choices=GPUS, required=True)
    add_out(parser, "peers-GPU")
    options, flags = parser.parse_known_args(arguments)
    nothing, out = Results(processor=options.processor), options.out or DOCS
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.bench_peers", "--processor", options.processor, "--out", folder]
        code = subprocess.run([*command, *flags], cwd=options.checkout).returncode
        found = load(Path(folder), nothing)
    # Their shares are not on the page, because the work is counted as it is here.
    rows = tuple(replace(row, engine=f"{row.engine}-before") for row in found.rows if row.part != "ceiling")
    save(load(out, nothing).merged(replace(found, rows=rows, missing=())), out)
    return code


if __name__ == "__main__":
    sys.exit(main())
