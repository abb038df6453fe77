"""Which files are pictures, by suffix. Imports no Pillow, so that listing a folder is quick."""

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

# Written by phones, and read with the extra `heif`. Without it each one in a folder gets its error.
PHONE_SUFFIXES = frozenset({".heic", ".heif"})
