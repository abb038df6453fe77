"""Patterns with `*`, `?`, `[...]` and `**`, expanded lazily and in natural order."""

import fnmatch
import os
import re
from collections.abc import Iterator

from llama_adapter.app.pictures.inputs.archives import is_archive_name
from llama_adapter.app.pictures.inputs.folders import ANY_DEPTH, Rule, has_picture_suffix, walk

_WILDCARDS = frozenset("*?[")


def is_pattern(name: str) -> bool:
    """Whether a name has wildcards, and no file with exactly this name exists."""
    return not _WILDCARDS.isdisjoint(name) and not os.path.lexists(name)


def fixed_folder(pattern: str) -> str:
    """The folder before the first part with a wildcard."""
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if not _WILDCARDS.isdisjoint(part))
    return "/".join(parts[:first]) or ("/" if pattern.startswith("/") else ".")


def expand_pattern(pattern: str) -> Iterator[str]:
    """Paths that a pattern matches, each once, in natural order.

    As in shells, case matters, `*` and `?` match no slash, and a hidden name matches only a part that begins with a
    dot. `**` matches any number of folders, including none, but no hidden folders and no links. Unlike in shells, files
    need the suffix of a picture or an archive, unless the pattern ends in a suffix. A pattern with `**` matches folders
    only if it ends in a slash, because their pictures would be found twice otherwise. A folder that cannot be listed is
    itself yielded.
    """
    return (path for path, _ in walk("/" if pattern.startswith("/") else "", _rule(pattern)))


def _rule(pattern: str) -> Rule:
    texts = [text for text in pattern.split("/") if text]
    if texts[-1] == ANY_DEPTH:
        texts.append("*")
    is_for_folders, tail = pattern.endswith("/"), re.split(r"[*?\]]", texts[-1])
    takes_any_suffix = len(tail) == 1 or "." in tail[-1]

    def takes_file(name: str) -> bool:
        return not is_for_folders and (takes_any_suffix or has_picture_suffix(name) or is_archive_name(name))

    return Rule(
        parts=tuple(map(_compiled, texts)),
        takes_file=takes_file,
        takes_folders=is_for_folders or ANY_DEPTH not in texts,
    )


def _compiled(text: str) -> str | re.Pattern[str]:
    if text == ANY_DEPTH or _WILDCARDS.isdisjoint(text):
        return text
    return re.compile(("" if text.startswith(".") else r"(?!\.)") + fnmatch.translate(text))
