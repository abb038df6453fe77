"""The suffixes of picture files, and the ways to read them. Imports no Pillow, so that listing a folder is fast."""

from typing import Literal, get_args

Orientation = Literal["upright", "ignore"]  # the orientation that cameras store
Transparency = Literal["white", "ignore"]  # transparent pixels show white, or the colours that are stored for them
Reading = Literal["exact", "fast"]  # exactly the reference's pixels, or nearly the same in less time
Damaged = Literal["refuse", "answer"]  # pictures of which only a part can be decoded
WantedOrder = Literal["auto", "rgb", "bgr"]  # of the colours that a model reads; auto: as it was trained
PictureNote = Literal["damaged", "transparent"]  # what a record says about the pixels of its picture
PICTURE_NOTES: tuple[PictureNote, ...] = get_args(PictureNote)

# Pillow's names (JPEG includes MPO). Deliberately excluded are formats that start other programs (EPS, WMF), formats
# without a signature, for which other bytes could be taken (TGA, DIB), formats that contain a picture of undeclared
# size (ICO, ICNS), and scientific containers.
PICTURE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")

# Suffixes, in lower case, of the files that are read from a folder. A file that is named itself may have any suffix.
PICTURE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
        *(".png", ".apng", ".webp", ".gif", ".avif", ".avifs"),
        *(".bmp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    }
)

# Suffixes of pictures from phones, which need the extra `heif`. Without it, each such file in a folder gets an error.
PHONE_SUFFIXES = frozenset({".heic", ".heif", ".hif"})

# Suffixes of pictures that are not read: those in a folder are counted, since cameras write them beside others.
OTHER_SUFFIXES = (".jxl", ".jp2", ".psd", ".svg", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf")
