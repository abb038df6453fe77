"""Packages of other programs, imported only when needed."""

import importlib
from importlib import metadata
from typing import Any


class MissingPackage(Exception):
    """A peer cannot be measured here; the message says why."""


def require(module: str, *, package: str, hint: str = "install the extra `peers`") -> Any:
    """The imported module. Raises MissingPackage, with a hint, if its package is missing or broken."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(f"{package} cannot be imported ({error}): {hint}") from error


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
