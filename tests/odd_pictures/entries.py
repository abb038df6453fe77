"""Entries of a folder that are not ordinary files with ordinary names: links, pipes, folders, and difficult names."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tests.odd_pictures.samples import Expected, OddPicture, sound_files

LARGE_BYTES = 300 * 2**20  # more than is read; the file is sparse and takes no disk space

_NAMES = (
    ("new\nline.png", "a line feed"),
    ("\x1b[31mred.png", "a terminal's escape"),
    ("-rf.png", "a dash in front"),
    ("#1.png", "looks like a comment"),
    (" spaces around .png", "spaces"),
    ("back\\slash.png", "a backslash"),
    ("[a-z]*?.png", "a pattern's characters"),
    ("{stem}.png", "a template's characters"),
    ("\u202egnp.txt.png", "written from right to left"),
    ("x" * 251 + ".png", "as long as a name can be"),
    (".hidden.png", "hidden"),
    ("UPPER.PNG", "a suffix in capitals"),
)


def write_entries(folder: Path) -> list[OddPicture]:
    """Create all of them."""
    png = sound_files()["png"]
    found = []
    for name, why in _NAMES:
        (folder / name).write_bytes(png)
        found.append(OddPicture(str(folder / name), "readable", f"its name: {why}"))
    for raw in (b"\xff\xfe.png", b"caf\xe9.png", b"\xed\xa0\x80.png"):
        path = os.path.join(os.fsencode(folder), raw)
        Path(os.fsdecode(path)).write_bytes(png)
        found.append(OddPicture(os.fsdecode(path), "readable", "its name is not UTF-8"))
    found += [OddPicture(str(folder / name), expected, why) for name, expected, why in _unusual(folder, png)]
    return found


def _unusual(folder: Path, png: bytes) -> Iterator[tuple[str, Expected, str]]:
    (folder / "folder.jpg").mkdir()
    yield "folder.jpg", "error", "a folder"
    (folder / "full-folder.png").mkdir()
    (folder / "full-folder.png" / "picture.png").write_bytes(png)
    yield "full-folder.png", "error", "a folder with a picture in it"
    (folder / "locked.png").write_bytes(png)
    (folder / "locked.png").chmod(0)
    yield "locked.png", "either", "may not be read, but by root"
    (folder / "aim.png").write_bytes(png)
    yield "aim.png", "readable", "what a link leads to"
    for name, target, expected, why in (
        ("link.png", "aim.png", "readable", "a link to a picture"),
        ("dangling.png", "nowhere.png", "error", "a link to nothing"),
        ("loop.png", "loop.png", "error", "a link to itself"),
        ("link-to-folder.png", "folder.jpg", "error", "a link to a folder"),
        ("null.png", "/dev/null", "error", "a link to a device"),
        ("zeros.png", "/dev/zero", "error", "a link to a device that never ends"),
        ("version.png", "/proc/version", "error", "a link to a file that cannot tell its size"),
    ):
        (folder / name).symlink_to(target)
        yield name, expected, why
    os.mkfifo(folder / "pipe.png")
    yield "pipe.png", "error", "a pipe that nobody writes to"
    os.mknod(folder / "socket.png", stat.S_IFSOCK | 0o600)
    yield "socket.png", "error", "a socket"
    with open(folder / "large.png", "wb") as file:
        file.write(png)
        file.truncate(LARGE_BYTES)
    yield "large.png", "error", "300 MiB, nearly all of it holes"
