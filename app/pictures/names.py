"""Names of pictures: as text, as keys, and as places."""

import hashlib
import os
from collections.abc import Callable


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


def place_of(path: str) -> str:
    """The path with its folder resolved. If the last part is a link, it is not resolved: it is a separate file.

    A path that no file can have, with a null character or a lone surrogate, is returned as it is.
    """
    folder, name = os.path.split(path)
    try:
        return os.path.join(os.path.realpath(folder), name)
    except ValueError:
        return path


class UniqueNames:
    """Gives each picture of an archive or a batch a unique name: `a.png`, then `a (2).png` for the next `a.png`."""

    def __init__(self, spelling: Callable[[str], str] = str) -> None:
        """Names are equal if `spelling` gives the same for them."""
        self._taken: set[int] = set()  # digests, because an archive may have millions of names
        self._numbers: dict[str, int] = {}  # by repeated name: the last number given
        self._spelling = spelling

    def take(self, name: str) -> str:
        """The name, or the next numbered one if an earlier picture has it."""
        spelt = self._spelling(name)
        candidate, number = name, self._numbers.get(spelt, 1)
        while (digest := name_key(self._spelling(candidate))) in self._taken:
            number += 1
            stem, suffix = os.path.splitext(name)
            candidate = f"{stem} ({number}){suffix}"
        if candidate != name:
            self._numbers[spelt] = number
        self._taken.add(digest)
        return candidate
