"""Names of pictures: as text, as keys, and in the escaped form of earlier versions."""

import hashlib
import os
from functools import lru_cache


def name_as_text(name: str) -> str:
    r"""A name as valid text, for prompts: each byte that is not UTF-8 becomes an escape (`\xff`)."""
    try:
        return os.fsencode(name).decode(errors="backslashreplace")
    except UnicodeEncodeError:  # a lone surrogate that does not represent a byte
        return name.encode(errors="backslashreplace").decode()


def name_key(name: str) -> int:
    """64 bits of a digest of a name or another text."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def picture_key(name: str) -> int:
    """As `name_key`, but the same for spellings of a path, such as `./a.png`. Links are not resolved."""
    return name_key(name if "://" in name or "\0" in name else os.path.abspath(name))


def escaped_name(name: str) -> str:
    r"""A name in the form of earlier versions: every character that Python considers unprintable is escaped.

    That includes ordinary characters such as U+202F (`\u202f`). Two names may have the same escaped form.
    """
    if name.isprintable():
        return name
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in name_as_text(name)
    )


def place_of(path: str) -> str:
    """The path with its folder resolved. If the last part is a link, it is not resolved: it is a separate file.

    A path that no file can have, with a null character or a lone surrogate, is returned as it is.
    """
    folder, name = os.path.split(path)
    try:
        return os.path.join(os.path.realpath(folder), name)
    except ValueError:
        return path


def find_escaped(name: str) -> str:
    """The existing path whose `escaped_name` is `name`.

    Returns `name` itself if there is no such path, if a file with exactly this name exists, or if two files have the
    same escaped form.
    """
    if "\\" not in name or os.path.lexists(name):
        return name
    found = os.sep if name.startswith(os.sep) else ""
    for part in filter(None, name.split(os.sep)):
        place = os.path.join(found, part)
        if "\\" in part and not os.path.lexists(place):
            try:
                names = _true_names(os.path.abspath(found), os.stat(found or os.curdir).st_mtime_ns)
            except (OSError, ValueError):
                return name
            place = os.path.join(found, names.get(part, part))
        found = place
    return found if os.path.lexists(found) else name


@lru_cache(maxsize=64)
def _true_names(folder: str, changed_ns: int) -> dict[str, str]:
    """Names in a folder, by their escaped form; only names whose escaped form differs and is unique."""
    found: dict[str, str] = {}
    shared = set()
    for name in os.listdir(folder):
        escaped = escaped_name(name)
        if escaped != name and found.setdefault(escaped, name) != name:
            shared.add(escaped)
    return {escaped: name for escaped, name in found.items() if escaped not in shared}
