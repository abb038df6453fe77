"""A folder of broken, hostile and unusual pictures, which is the same each time."""

from collections import Counter
from pathlib import Path

from tests.odd_pictures.bombs import bombs
from tests.odd_pictures.damaged import damaged
from tests.odd_pictures.entries import write_entries
from tests.odd_pictures.kinds import kinds
from tests.odd_pictures.samples import Expected, OddPicture

__all__ = ["Expected", "OddPicture", "write_odd_pictures"]


def write_odd_pictures(folder: Path) -> list[OddPicture]:
    """Write all of them into a new folder, and return for each what a reader should give.

    Some are no files: folders, links, a pipe, a socket. Names are unique, and some are not UTF-8.
    """
    folder.mkdir(parents=True)
    written = []
    for file in (*damaged(), *bombs(), *kinds()):
        path = folder / file.name
        path.write_bytes(file.content)
        written.append(OddPicture(path=str(path), expected=file.expected, why=file.why))
    written += write_entries(folder)
    twice = [name for name, count in Counter(picture.path for picture in written).items() if count > 1]
    assert not twice, f"names that stand for two files: {twice}"
    return written
