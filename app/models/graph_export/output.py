"""Output of the export commands (paths on stdout, messages on stderr), and a check that a path is writable."""

import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.lint import Complaint
from llama_adapter.runtime.terminal.run_guarded import forget_stdout
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import counted

if TYPE_CHECKING:  # it imports torch, which `export om` does without
    from llama_adapter.vision.export import Parity


def tell(line: str, since: float | None = None) -> None:
    """Print a line on stderr, with the seconds since `since`, a time of `time.perf_counter`."""
    say(line if since is None else f"{line} ({time.perf_counter() - since:.1f} s)")


def give(line: str) -> None:
    """Print a line on stdout and flush. If the reader of the pipe is gone, the export continues."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        forget_stdout()


def told_complaints(complaints: Sequence[Complaint]) -> Iterator[str]:
    """One line for each complaint of the lint."""
    if not complaints:
        yield "lint: no complaints; ATC knows the operators in this opset"
    for complaint in complaints:
        yield f"lint {complaint.level}: {complaint.sentence} ({complaint.count} x); hint: {complaint.hint}"


def told_parity(parity: "Parity") -> str:
    """The result of a comparison as one line, which begins with the verdict."""
    return (
        f"{'same results as torch' if parity.ok else 'other results than torch'}: largest difference "
        f"{parity.max_abs:.1e} of {parity.tolerance:.1e} allowed, mean {parity.mean_abs:.1e}, "
        f"least cosine {parity.cosine_min:.7f}, over {counted(parity.num_pictures, 'picture')}"
    )


def told_next(encoder: str | Path, *flags: str) -> str:
    """A line that suggests the next command for the file."""
    return f"next: llama-adapter caption PICTURE --encoder {shlex.join([str(encoder), *flags])}"


def check_place(target: Path, *, shown: str, is_folder: bool = False) -> None:
    """Raise GraphError if `target` cannot be created. Called before minutes of work; leaves no files behind.

    `target` is a file, or with `is_folder` a folder, which may exist.
    """
    folder = next(parent for parent in Path(os.path.abspath(target)).parents if parent.exists())
    try:
        if target.is_dir() and not is_folder:
            raise IsADirectoryError(0, "it is a folder")
        os.rmdir(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=folder))
    except OSError as error:
        raise GraphError(f"`{shown}` cannot be written: {error.strerror}", hint="name another place as --out") from None
