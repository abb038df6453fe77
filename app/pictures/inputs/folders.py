"""Files and folders: the pictures in a folder, and paths that match a rule, found lazily and in natural order."""

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from llama_adapter.app.pictures.inputs.items import LeftOut, PictureInput
from llama_adapter.vision.formats import OTHER_SUFFIXES, PHONE_SUFFIXES, PICTURE_SUFFIXES

ANY_DEPTH = "**"
_THUMBNAILS = frozenset(  # folders of NAS systems and of archives that macOS made, in lower case
    (
        *("@eadir", "#recycle", "@recycle", "#snapshot", "@recently-snapshot", "@__thumb", "@tmp"),
        *("$recycle.bin", "lost+found", "__macosx"),
    )
)
_SUFFIXES = PICTURE_SUFFIXES | PHONE_SUFFIXES
_RUNS = re.compile(r"[0-9]+|[^0-9]+")
_Positions = frozenset[int]  # indices of the parts of a rule that an entry of a folder may match
_Matches = Iterator[tuple[str, bool, _Positions]]  # path, whether it matches, and the positions inside it


def file_input(path: str, *, root: str | None = None, found_in: tuple[str, ...] = ()) -> PictureInput:
    """The item of a file, which need not exist."""
    return PictureInput(source=path, label=path, root=root, found_in=found_in)


def folder_inputs(folder: str, *, recursive: bool, left_out: LeftOut | None = None) -> Iterator[PictureInput]:
    """The pictures in a folder, in natural order (pic_2 before pic_10). `recursive` descends, but follows no links.

    Files with a suffix of `PICTURE_SUFFIXES` or `PHONE_SUFFIXES` are pictures; case is ignored, and hidden files are
    left out. If there are none, or the folder cannot be listed, it is itself the only item: reading it gives the error,
    so that a job neither stops nor skips it silently. `left_out` counts folders of thumbnails and `OTHER_SUFFIXES`.
    """
    found_any = False
    for picture, folders in walk(folder, _BELOW if recursive else _INSIDE, left_out=left_out):
        found_any = True
        yield file_input(picture, root=folder, found_in=folders)
    if not found_any:
        yield file_input(folder, root=folder)


def count_in_sub_folders(folder: str, *, searched: Container[str], at_most: int) -> int:
    """The number of pictures that `recursive` would add to a folder.

    Pictures in folders that were `searched` themselves are not counted. Counting ends at `at_most`.
    """
    found = (1 for _, folders in walk(folder, _BELOW) if folders[1:] and folders[-1] not in searched)
    return sum(islice(found, at_most))


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a circular link
        return False


def is_thumbnail_folder(name: str) -> bool:
    """Whether a system keeps thumbnails, deleted files or metadata in folders of this name."""
    return name.lower() in _THUMBNAILS


def has_picture_suffix(name: str) -> bool:
    """Whether a file counts as a picture when folders, patterns and archives are searched."""
    return os.path.splitext(name)[1].lower() in _SUFFIXES


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Which paths below a folder are found. Folders of thumbnails are not searched unless a part is their name."""

    parts: tuple[str | re.Pattern[str], ...]  # a text matches only itself; `**` matches any number of folders
    takes_file: Callable[[str], bool]  # by its name
    takes_folders: bool

    def closed(self, positions: Iterable[int]) -> _Positions:
        """The positions, and those after each `**`, which may match no folder at all."""
        reached = set(positions)
        for position, part in enumerate(self.parts):
            if position in reached and part == ANY_DEPTH:
                reached.add(position + 1)
        return frozenset(reached)

    def lone_name(self, positions: _Positions) -> str | None:
        """The only name that can match; None if several can."""
        part = self.parts[next(iter(positions))] if len(positions) == 1 else None
        return part if isinstance(part, str) else None

    def step(self, positions: _Positions, name: str, *, is_folder: bool, is_link: bool) -> tuple[bool, _Positions]:
        """Whether an entry matches the whole rule, and the positions that entries inside it may match."""
        last = len(self.parts) - 1
        if not is_folder:
            return last in positions and self.takes_file(name) and _fits(name, self.parts[last]), frozenset()
        is_end, following = False, set[int]()
        for position in positions:
            part = self.parts[position]
            if part != name and is_thumbnail_folder(name):
                continue
            if part == ANY_DEPTH:
                if not is_link and not name.startswith("."):
                    following.add(position)
            elif _fits(name, part):
                if position == last:
                    is_end = True
                else:
                    following.add(position + 1)
        return is_end and self.takes_folders, self.closed(following)


def _fits(name: str, part: str | re.Pattern[str]) -> bool:
    return name == part if isinstance(part, str) else part.fullmatch(name) is not None


_VISIBLE = re.compile(r"(?!\.).*", re.DOTALL)
_INSIDE = Rule(parts=(_VISIBLE,), takes_file=has_picture_suffix, takes_folders=False)
_BELOW = Rule(parts=(ANY_DEPTH, _VISIBLE), takes_file=has_picture_suffix, takes_folders=False)


def walk(start: str, rule: Rule, *, left_out: LeftOut | None = None) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Paths that match a rule, each with the chain of folders that contain it. `start` may be "", the current folder.

    A folder that cannot be listed is itself yielded. `left_out` counts folders of thumbnails and `OTHER_SUFFIXES`.
    """
    open_folders: list[tuple[tuple[str, ...], _Matches]]
    open_folders = [((start,), _matches(start, rule, rule.closed({0}), left_out=left_out))]
    while open_folders:
        folders, matches = open_folders[-1]
        for path, is_match, positions in matches:
            if is_match:
                yield path, folders if path != folders[-1] else folders[:-1]
            if positions:
                open_folders.append(((*folders, path), _matches(path, rule, positions, left_out=left_out)))
                break
        else:
            open_folders.pop()


def _matches(folder: str, rule: Rule, positions: _Positions, *, left_out: LeftOut | None) -> _Matches:
    """Entries of a folder that match or may contain matches."""
    names: list[str] = []  # only of these, because a folder may have millions of other files
    steps: dict[str, tuple[bool, _Positions]] = {}  # only for folders; a file has nothing inside
    try:
        for name, is_one, is_link in _entries(folder, rule.lone_name(positions)):
            is_match, following = rule.step(positions, name, is_folder=is_one, is_link=is_link)
            if is_match or following:
                names.append(name)
            elif left_out is not None and is_one and is_thumbnail_folder(name) and rule.parts[0] == ANY_DEPTH:
                left_out.add("folders of thumbnails", os.path.join(folder, name))
            elif left_out is not None and not is_one and name[0] != "." and name.lower().endswith(OTHER_SUFFIXES):
                left_out.add("pictures of kinds that are not read", os.path.join(folder, name))
            if following:
                steps[name] = is_match, following
    except OSError:  # the folder itself becomes the item; reading it gives the error
        yield folder or ".", True, frozenset()
        return
    names.sort(key=natural_key)
    for name in names:
        is_match, following = steps.get(name, (True, frozenset()))
        yield os.path.join(folder, name), is_match, following


def _entries(folder: str, lone_name: str | None) -> Iterator[tuple[str, bool, bool]]:
    """Names in a folder, each with whether it is a folder and, if so, whether it is a linked one."""
    if lone_name is not None:
        path = os.path.join(folder, lone_name)
        if os.path.lexists(path):
            yield lone_name, os.path.isdir(path), os.path.islink(path)
        return
    with os.scandir(folder or ".") as listing:
        for entry in listing:
            is_one = is_folder(entry)
            yield entry.name, is_one, is_one and entry.is_symlink()


def natural_key(name: str) -> str:
    """Sort key that compares runs of digits as numbers and ignores the case of letters; the name itself breaks ties.

    The key is a single string to save memory, as a folder may have millions of names. A number becomes a null
    character, its length and its digits. Two null characters end the name.
    """
    return f"{_RUNS.sub(_comparable, name)}\0\0{name}"


def _comparable(run: re.Match[str]) -> str:
    text = run[0]
    if text[0] not in "0123456789":
        return text.casefold()
    digits = text.lstrip("0")
    return f"\0{chr(len(digits) + 1)}{digits}"
