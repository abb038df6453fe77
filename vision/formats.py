"""Which files are taken for pictures, and how their names are shown. No Pillow here: listing a folder stays quick."""

import os

# Pillow's names (JPEG covers MPO). Left out on purpose: formats that start other programs (EPS, WMF), that have no
# signature, so that other bytes pass for them (TGA, DIB), that hide a picture of undeclared size (ICO, ICNS), and
# scientific containers.
PICTURE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")

# File names taken from a folder, lower case. A file named one by one may have any suffix.
PICTURE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
        *(".png", ".apng", ".webp", ".gif", ".avif", ".avifs"),
        *(".bmp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    }
)

# What phones write is not read here. Taken from a folder all the same, so that each says so and none is passed over.
PHONE_SUFFIXES = frozenset({".heic", ".heif"})


def shown_name(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """A file's name as text that any terminal, log or JSON file can take.

    Names are bytes on most systems: what is not UTF-8, and every control character, is shown as an escape.
    """
    name = os.fspath(path)
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate: the name of no file
        encoded = str(name).encode(errors="backslashreplace")
    text = encoded.decode(errors="backslashreplace")
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
