"""Shared code of benchmarks: flags, progress on stderr, circumstances, rounds in turn, sample pictures."""

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from llama_adapter.app.jobs.report import circumstances, load_average
from llama_adapter.app.models.resources import sample_pictures
from scripts.pages.render import DOCS, save, save_part

ROOT = Path(__file__).resolve().parents[1]
Tell = Callable[[str], None]
Measure = Callable[[Any], dict[str, Any]]  # settings -> figures as JSON values
Way = TypeVar("Way")
Result = TypeVar("Result")
Settings = TypeVar("Settings")


def tell(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


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


def caption_command(folder: Path, out: Path) -> list[str]:
    """The command that captions the pictures of a folder, as process arguments."""
    return [sys.executable, "-m", "llama_adapter", "caption", str(folder), "--out", str(out)]


def watched_job(folder: Path, out: Path, flags: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """Run a job in a process. Yields the process id and the number of records, 50 times a second and at the end.

    Raises RuntimeError if the job fails.
    """
    num_records, offset, is_running = 0, 0, True
    command = [*caption_command(folder, out), "--quiet", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while is_running:
            is_running = process.poll() is None
            if out.exists():
                with open(out, "rb") as file:
                    file.seek(offset)
                    new = file.read()
                num_records, offset = num_records + new.count(b"\n"), offset + len(new)
            yield process.pid, num_records
            time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"the job ended with exit code {process.returncode}")


def process_cpu_s(pid: int) -> float:
    """Processor seconds of a process, all threads together. Raises OSError if it has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_mib(pid: int, name: str = "VmRSS") -> float:
    """Resident memory of a process, or another size in /proc/PID/status. Raises OSError if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_out(parser: argparse.ArgumentParser, page: str, *, default: Path | None = DOCS) -> None:
    """`--out`, the folder of the results."""
    parser.add_argument(
        "--out", type=Path, default=default, help=f"folder of {page}.json and {page}.md (default: docs)"
    )


def parse_settings(
    doc: str | None,
    arguments: Sequence[str] | None,
    *,
    page: str,
    full: Settings,
    quick: Settings,
    flags: Mapping[str, str],
    choices: Mapping[str, Collection[str]] | None = None,
    parts: Collection[str] = (),
) -> tuple[Settings, Path | None, list[str]]:
    """Parse `--quick`, `--out`, `--part`, and a flag for each of `flags`: names of settings, and help texts.

    Returns the settings, the folder for the results, and the chosen parts. The folder is created here, so that an
    unwritable path fails before the measurements. It is None with `--quick` and without `--out`.
    """
    parser = parser_of(doc)
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that it works")
    add_out(parser, page, default=None)
    if parts:
        parser.add_argument("--part", choices=parts, action="append", help="may be repeated (default: all)")
    for name, text in flags.items():
        value = getattr(full, name)
        several = isinstance(value, tuple)
        kind = type(value[0] if several else value)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind if kind is str or issubclass(kind, Path) else positive(kind),
            nargs="+" if several else None,
            choices=(choices or {}).get(name),
            help=f"{text} (default: {' '.join(map(str, value)) if several else value})",
        )
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in flags if getattr(options, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    folder = options.out or (None if options.quick else DOCS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    chosen: Any = quick if options.quick else full
    return dataclasses.replace(chosen, **given), folder, (options.part if parts else None) or list(parts)


def run_bench(
    doc: str | None,
    arguments: Sequence[str] | None,
    *,
    measure: Measure | Mapping[str, Measure],
    page: str,
    packages: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Parse flags, measure, and write the page or its parts; returns the figures, by part if `measure` has parts.

    Each measurement is called with the settings. The circumstances of the machine and the versions of `packages` are
    added to its figures. `options` are passed to `parse_settings`.
    """
    parts = measure if isinstance(measure, Mapping) else {"": measure}
    names = tuple(filter(None, parts))
    settings, folder, chosen = parse_settings(doc, arguments, page=page, parts=names, **options)
    figures: dict[str, Any] = {}
    for name in chosen or [""]:
        load_before = load_average()
        figures[name] = parts[name](settings)
        about = figures[name]["circumstances"] = circumstances(load_before=load_before)
        about["versions"] |= {package: metadata.version(package) for package in packages}
        if folder is not None:
            save_part(page, name, figures[name], folder) if name else save(page, figures[name], folder)
    return figures if names else figures[""]


def positive(kind: type[float]) -> Callable[[str], float]:
    """The type of an option that is a number above 0."""

    def number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return number
