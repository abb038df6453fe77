"""What the export commands say: paths on stdout as data, all else on stderr as lines for people."""

import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llama_adapter.app.terminal.run_guarded import forget_stdout
from llama_adapter.app.terminal.stderr_lines import say
from llama_adapter.runtime.graphs.lint import Complaint
from llama_adapter.vision.export import Parity


def tell(line: str, since: float | None = None) -> None:
    """A line on stderr, with the seconds since then."""
    say(line if since is None else f"{line} ({time.perf_counter() - since:.1f} s)")


def give(line: str) -> None:
    """A line on stdout at once; who reads it may have gone away, the files are still wanted."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        forget_stdout()


def told_complaints(complaints: Sequence[Complaint]) -> Iterator[str]:
    """Lines for people."""
    if not complaints:
        yield "lint: no complaints; names and opsets of the operators are those that ATC knows"
    for complaint in complaints:
        yield f"lint {complaint.level}: {complaint.sentence} ({complaint.count} x); hint: {complaint.hint}"


def told_parity(parity: Parity) -> str:
    """A line for people, with the verdict first."""
    pictures = "1 picture" if parity.num_pictures == 1 else f"{parity.num_pictures} pictures"
    return (
        f"{'same results as torch' if parity.ok else 'other results than torch'}: largest difference "
        f"{parity.max_abs:.1e} of {parity.tolerance:.1e} allowed, mean {parity.mean_abs:.1e}, "
        f"least cosine {parity.cosine_min:.7f}, over {pictures}"
    )


def told_next(encoder: str | Path, *flags: str) -> str:
    """What to do with the file: a command line."""
    return f"next: llama-adapter caption PICTURE --encoder {shlex.join([str(encoder), *flags])}"
