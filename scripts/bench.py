"""What every benchmark does: parse its flags, measure its parts, add the circumstances, and write its page."""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

from llama_adapter.app.jobs.report import circumstances, load_average
from scripts.common import DOCS, add_out, parser_of
from scripts.pages.render import save, save_part

Measure = Callable[[Any], dict[str, Any]]  # settings -> figures as JSON values
Settings = TypeVar("Settings")


def parse_settings(
    doc: str | None,
    arguments: Sequence[str] | None,
    *,
    page: str,
    full: Settings,
    quick: Settings,
    choices: Mapping[str, Collection[str]] | None = None,
    parts: Collection[str] = (),
) -> tuple[Settings, Path | None, list[str]]:
    """Parse `--quick`, `--out`, `--part`, and a flag for each setting that is annotated with a help text.

    Returns the settings, the folder for the results, and the chosen parts. The folder is created here, so that an
    unwritable path fails before the measurements. It is None with `--quick` and without `--out`.
    """
    parser = parser_of(doc)
    parser.add_argument("--quick", action="store_true", help="a small run that only shows that it works")
    add_out(parser, page)
    if parts:
        parser.add_argument("--part", choices=parts, action="append", help="may be repeated (default: all)")
    flags = flags_of(type(full))
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


def flags_of(settings: type) -> dict[str, str]:
    """The help text of each field whose type is `Annotated[type, text]`, by its name."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if get_origin(hint) is Annotated}


def run_bench(
    doc: str | None,
    arguments: Sequence[str] | None,
    *,
    measure: Measure | Mapping[str, Measure],
    page: str,
    packages: Sequence[str] | Mapping[str, Sequence[str]] = (),
    **options: Any,
) -> dict[str, Any]:
    """Parse flags, measure, and write the page or its parts; returns the figures, by part if `measure` has parts.

    Each measurement is called with the settings. The circumstances of the machine and the versions of `packages` (of
    every part, or by part) are added to its figures. `options` are passed to `parse_settings`. Raises
    PackageNotFoundError before the first measurement.
    """
    parts = measure if isinstance(measure, Mapping) else {"": measure}
    names = tuple(filter(None, parts))
    settings, folder, chosen = parse_settings(doc, arguments, page=page, parts=names, **options)
    chosen = chosen or [""]
    needed = packages if isinstance(packages, Mapping) else dict.fromkeys(chosen, packages)
    versions = {name: {package: metadata.version(package) for package in needed.get(name, ())} for name in chosen}
    figures: dict[str, Any] = {}
    for name in chosen:
        load_before = load_average()
        figures[name] = parts[name](settings)
        about = figures[name]["circumstances"] = circumstances(load_before=load_before)
        about["versions"] |= versions[name]
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
