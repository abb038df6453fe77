"""Names of pictures: as text, as records had them once, and which file such an old name means. Imports no model."""

import os
from functools import lru_cache


def name_as_text(name: str) -> str:
    r"""A name where only text can be, such as in a prompt: each byte that is not UTF-8 becomes an escape (`\xff`)."""
    try:
        return os.fsencode(name).decode(errors="backslashreplace")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return name.encode(errors="backslashreplace").decode()


def escaped_name(name: str) -> str:
    r"""A name as records of earlier versions have it: with an escape for everything that Python calls unprintable.

    Among that are characters that are ordinary in names, such as U+202F (as `\u202f`). Two names may share this form.
    """
    if name.isprintable():
        return name
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in name_as_text(name)
    )


def place_of(path: str) -> str:
    """The one way to write a path. Not what it links to: a link is a file beside that, in the folder of the link."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def find_escaped(name: str) -> str:
    """The path that `name` is the `escaped_name` of, looked for in the file system; `name` where there is none.

    So it is too where there is a file of this very name, or where two names share the escaped form.
    """
    if "\\" not in name or os.path.lexists(name):
        return name
    folder, base = os.path.split(name)
    if folder not in ("", os.sep):
        folder = find_escaped(folder)
    try:
        changed_ns = os.stat(folder or os.curdir).st_mtime_ns
        true = _true_names(os.path.abspath(folder), changed_ns).get(base, base)
    except (OSError, ValueError):
        return name
    found = os.path.join(folder, true)
    return found if os.path.lexists(found) else name


@lru_cache(maxsize=64)
def _true_names(folder: str, changed_ns: int) -> dict[str, str]:
    """The names in a folder that have another escaped form, by that, without those that share one."""
    found: dict[str, str] = {}
    shared = set()
    for name in os.listdir(folder):
        escaped = escaped_name(name)
        if escaped != name and found.setdefault(escaped, name) != name:
            shared.add(escaped)
    return {escaped: name for escaped, name in found.items() if escaped not in shared}
