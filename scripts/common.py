"""What benchmarks share: flags, progress on stderr, circumstances, rounds in turn, sample pictures."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from llama_adapter.app.measuring.report import circumstances
from llama_adapter.app.models.resources import sample_pictures
from scripts.pages.render import DOCS, save, save_part

ROOT = Path(__file__).resolve().parents[1]
Tell = Callable[[str], None]
Way = TypeVar("Way")
Result = TypeVar("Result")
Settings = TypeVar("Settings")


def tell(line: str) -> None:
    """Progress for a person, on stderr."""
    print(line, file=sys.stderr, flush=True)


def silent(line: str) -> None:
    """No progress."""


def sample_files() -> list[Path]:
    """The sample pictures, by name."""
    return sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))


def in_turn(ways: Iterable[Way], measure: Callable[[Way], Result], *, rounds: int) -> dict[Way, list[Result]]:
    """Results of each way, one per round. All ways run in each round, so that a slow minute affects all of them."""
    results: dict[Way, list[Result]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, found in results.items():
            found.append(measure(way))
    return results


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process, all threads together. Raises OSError if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_mib(pid: int, name: str = "VmRSS") -> float:
    """Resident memory of a process, or another size in /proc/PID/status. Raises OSError if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


def machine(*packages: str, load_before: list[float] | None) -> dict[str, Any]:
    """The circumstances with OMP_NUM_THREADS, and the versions of `packages` too."""
    about = circumstances(load_before=load_before)
    about["versions"] |= {name: metadata.version(name) for name in packages}
    return about | {"omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset")}


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_out(parser: argparse.ArgumentParser, page: str, *, default: Path | None = DOCS) -> None:
    """`--out`, the folder of the results."""
    parser.add_argument(
        "--out", type=Path, default=default, help=f"folder of {page}.json and {page}.md (default: docs)"
    )


def parse_settings(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    page: str,
    full: Settings,
    quick: Settings,
    flags: Mapping[str, str],
) -> tuple[argparse.Namespace, Settings, Path | None]:
    """Parse `--quick`, `--out` and a flag for each of `flags`, which maps fields of the settings to help texts.

    Returns all options, the settings, and the folder for the results, which is made here so that a wrong one fails
    before an hour of measuring. The folder is None with `--quick` and without `--out`.
    """
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that it works")
    add_out(parser, page, default=None)
    for name, text in flags.items():
        value = getattr(full, name)
        several = isinstance(value, tuple)
        shown = " ".join(map(str, value)) if several else value
        parser.add_argument(
            f"--{name}",
            type=positive(type(value[0] if several else value)),
            nargs="+" if several else None,
            help=f"{text} (default: {shown})",
        )
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in flags if getattr(options, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    folder = options.out or (None if options.quick else DOCS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    chosen: Any = quick if options.quick else full
    return options, dataclasses.replace(chosen, **given), folder


def run_bench(
    doc: str | None,
    arguments: Sequence[str] | None,
    *,
    measure: Callable[..., dict[str, Any]],
    page: str,
    part: str | None = None,
    **options: Any,
) -> None:
    """Parse flags, call `measure(settings, tell=tell)`, and write the page or its `part`; `options` as above."""
    _, settings, folder = parse_settings(parser_of(doc), arguments, page=page, **options)
    save_results(page, measure(settings, tell=tell), folder, part=part)


def save_results(page: str, content: dict[str, Any], folder: Path | None, *, part: str | None = None) -> None:
    """Write the results, or a part of them, and the page; without a folder nothing."""
    if folder is not None:
        save(page, content, folder) if part is None else save_part(page, part, content, folder)


def positive(kind: type[float]) -> Callable[[str], float]:
    """The type of an option that is a number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number
