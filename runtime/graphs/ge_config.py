"""`config.ini` of MindSpore Lite: options of the context and of the graph engine (GE) on Ascend chips."""

import os
import re
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.known_names import known_names
from llama_adapter.runtime.settings.setting import nearest

FILE: Final = "config.ini"
CONTEXT: Final = "ascend_context"
GE_SECTIONS: Final = ("ge_global_options", "ge_session_options", "ge_graph_options")
# Recommended by MindSpore's guide; formatMode for the Atlas 800T A2 only.
RECOMMENDED: Final[Mapping[str, Mapping[str, str]]] = {
    CONTEXT: {"plugin_custom_ops": "All", "provider": "ge"},
    "ge_session_options": {
        "ge.externalWeight": "1",
        "ge.exec.formatMode": "1",
        "ge.exec.atomicCleanPolicy": "1",
        "ge.event": "notify",
        "ge.exec.staticMemoryPolicy": "2",
        "ge.exec.precision_mode": "must_keep_origin_dtype",
    },
}
_NAMES: Final = known_names("mindspore")


@dataclass(frozen=True, kw_only=True, slots=True)
class GeConfig:
    """A `config.ini`: sections with their options."""

    path: str
    sections: Mapping[str, Mapping[str, str]]

    @property
    def provider(self) -> str:
        """The runtime of graphs on the chip: `ge`, or empty for ACL."""
        return self.sections.get(CONTEXT, {}).get("provider", "")

    @property
    def ge_options(self) -> dict[str, dict[str, str]]:
        """The options of the graph engine in the form that MindSpore's context expects."""
        levels = {"global": GE_SECTIONS[0], "session": GE_SECTIONS[1]}
        return {level: dict(self.sections[section]) for level, section in levels.items() if section in self.sections}


def read_ge_config(path: str | os.PathLike[str]) -> GeConfig:
    """Read a `config.ini`. Warns about unknown sections and options, which are passed on.

    Raises UsageError for a file that cannot be read, and for a line that is not a section, option or comment.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"The configuration `{path}` cannot be read: {reason}") from None
    sections: dict[str, dict[str, str]] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith(("#", ";")):
            continue
        place = f"`{path}`, line {number}"
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
            sections.setdefault(section, {})
            known = {CONTEXT, *GE_SECTIONS, *_NAMES["other_sections"]}
            if section not in known:
                warnings.warn(f"{place}: no section `{section}` is known{_similar(section, known)}", stacklevel=2)
            continue
        key, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not key:
            raise UsageError(f"{place} is neither `[section]` nor `option=value`: {line!a}")
        if not section:
            raise UsageError(f"{place}: the option `{key}` comes before the first section")
        if key in sections[section]:
            raise UsageError(f"{place}: the option `{key}` is set twice")
        options = _NAMES[CONTEXT] if section == CONTEXT else _NAMES["ge"] if section in GE_SECTIONS else None
        if options is not None and key not in options:
            warnings.warn(f"{place}: `{section}` has no known option `{key}`{_similar(key, options)}", stacklevel=2)
        sections[section][key] = value
    return GeConfig(path=str(path), sections=sections)


def recommended_ge_config() -> str:
    """The text of a `config.ini` for an Atlas 800T A2."""
    lines = []
    for section, options in RECOMMENDED.items():
        lines += [f"[{section}]", *(f"{key}={value}" for key, value in options.items()), ""]
    return "\n".join(lines)


def _similar(name: str, known: Set[str]) -> str:
    similar = nearest(name, sorted(known), cutoff=0.6)
    return f"; `{similar}` may be meant" if similar else ""
