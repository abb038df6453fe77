"""Names that vendors' programs know, from known_names.toml."""

import functools
import tomllib
from pathlib import Path


@functools.cache
def known_names(program: str) -> dict[str, frozenset[str]]:
    """The names that a program knows, by what they name."""
    tables = tomllib.loads(Path(__file__).with_name("known_names.toml").read_text(encoding="utf-8"))
    return {kind: frozenset(names.split()) for kind, names in tables[program].items()}
