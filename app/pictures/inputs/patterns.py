"""Patterns with `*`, `?`, `[...]` and `**`, expanded lazily and in natural order."""

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from llama_adapter.app.pictures.inputs.archives import is_archive_name
from llama_adapter.app.pictures.inputs.folders import has_picture_suffix, is_folder, is_thumbnail_folder, natural_key

_ANY_DEPTH = "**"
_WILDCARDS = frozenset("*?[")
_Positions = frozenset[int]  # indices of the parts of the pattern that an entry of a folder may match


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
    compiled = _Compiled.of(pattern)
    open_folders = [_matches("/" if pattern.startswith("/") else "", compiled, compiled.closed({0}))]
    while open_folders:
        for path, is_match, positions in open_folders[-1]:
            if is_match:
                yield path
            if positions:
                open_folders.append(_matches(path, compiled, positions))
                break
        else:
            open_folders.pop()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    parts: tuple[str | re.Pattern[str], ...]  # a text matches only itself; `**` matches any number of folders
    takes_files: bool
    takes_folders: bool
    takes_any_suffix: bool

    @classmethod
    def of(cls, pattern: str) -> "_Compiled":
        texts = [text for text in pattern.split("/") if text]
        if texts[-1] == _ANY_DEPTH:
            texts.append("*")
        tail = re.split(r"[*?\]]", texts[-1])
        return cls(
            parts=tuple(_compile(text) for text in texts),
            takes_files=not pattern.endswith("/"),
            takes_folders=pattern.endswith("/") or _ANY_DEPTH not in texts,
            takes_any_suffix=len(tail) == 1 or "." in tail[-1],
        )

    def closed(self, positions: Iterable[int]) -> _Positions:
        """The positions, and those after each `**`, which may match no folder at all."""
        reached = set(positions)
        for position, part in enumerate(self.parts):
            if position in reached and part == _ANY_DEPTH:
                reached.add(position + 1)
        return frozenset(reached)

    def lone_name(self, positions: _Positions) -> str | None:
        """The only name that can match; None if several can."""
        part = self.parts[next(iter(positions))] if len(positions) == 1 else None
        return part if isinstance(part, str) else None

    def step(self, positions: _Positions, name: str, *, is_folder: bool, is_link: bool) -> tuple[bool, _Positions]:
        """Whether an entry matches the whole pattern, and the positions that entries inside it may match."""
        is_end, following = False, set[int]()
        for position in positions:
            part = self.parts[position]
            if is_folder and part != name and is_thumbnail_folder(name):
                continue
            if part == _ANY_DEPTH:
                if is_folder and not is_link and not name.startswith("."):
                    following.add(position)
            elif part == name if isinstance(part, str) else part.fullmatch(name):
                if position == len(self.parts) - 1:
                    is_end = True
                elif is_folder:
                    following.add(position + 1)
        return is_end and self._takes(name, is_folder=is_folder), self.closed(following)

    def _takes(self, name: str, *, is_folder: bool) -> bool:
        if is_folder:
            return self.takes_folders
        return self.takes_files and (self.takes_any_suffix or has_picture_suffix(name) or is_archive_name(name))


def _compile(text: str) -> str | re.Pattern[str]:
    if text == _ANY_DEPTH or _WILDCARDS.isdisjoint(text):
        return text
    return re.compile(("" if text.startswith(".") else r"(?!\.)") + fnmatch.translate(text))


def _matches(folder: str, compiled: _Compiled, positions: _Positions) -> Iterator[tuple[str, bool, _Positions]]:
    """Entries of a folder that match or may contain matches: path, whether it matches, and the positions inside it."""
    names: list[str] = []
    steps: dict[str, tuple[bool, _Positions]] = {}  # only for folders; a file has nothing inside
    try:
        for name, is_one, is_link in _entries(folder, compiled.lone_name(positions)):
            is_match, following = compiled.step(positions, name, is_folder=is_one, is_link=is_link)
            if is_match or following:
                names.append(name)
            if following:
                steps[name] = is_match, following
    except OSError:
        yield folder or ".", True, frozenset()
        return
    names.sort(key=natural_key)
    for name in names:
        is_match, following = steps.get(name, (True, frozenset()))
        yield os.path.join(folder, name), is_match, following


def _entries(folder: str, lone_name: str | None) -> Iterator[tuple[str, bool, bool]]:
    """Names in a folder, each with whether it is a folder and whether it is a link."""
    if lone_name is not None:
        path = os.path.join(folder, lone_name)
        if os.path.lexists(path):
            yield lone_name, os.path.isdir(path), os.path.islink(path)
        return
    with os.scandir(folder or ".") as listing:
        for entry in listing:
            yield entry.name, is_folder(entry), entry.is_symlink()
