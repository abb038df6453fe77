"""Names of pictures: as text, as keys, and as places."""

import hashlib
import os


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
