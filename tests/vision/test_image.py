"""Reading pictures: good files are decoded; bad files raise a `PictureError` with a code."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from llama_adapter.runtime.extras import install_hint
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision import image as vision_image
from llama_adapter.vision.errors import PICTURE_ERROR_CODES, PictureError
from llama_adapter.vision.files import DEFAULT_MAX_PIXELS
from llama_adapter.vision.formats import PICTURE_FORMATS, PICTURE_SUFFIXES
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.pixels import PixelRule
from llama_adapter.vision.preprocess import preprocess
from tests.bad_files import chunk, png
from tests.odd_pictures.rare import tiff
from tests.odd_pictures.samples import saved, scene

HEIC_BEGINNING = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"
GOLDEN = Path(__file__).parents[1] / "golden"


def asymmetric(width: int = 31, height: int = 17) -> Image.Image:
    """A picture that looks different in each of the eight orientations."""
    return scene(width=width, height=height)


def refusal(source: Any, **options: Any) -> PictureError:
    with pytest.raises(PictureError) as caught:
        load_picture(source, **options)
    assert caught.value.code in PICTURE_ERROR_CODES
    assert caught.value.message == str(caught.value)
    assert caught.value.message.isprintable()
    return caught.value


# Good pictures


@pytest.mark.parametrize("make_source", [str, Path, Path.read_bytes, os.fsencode], ids=["str", "Path", "bytes", "fs"])
def test_a_file_gives_its_pixels_and_the_digest_of_its_bytes(make_source: Callable[[Path], Any]) -> None:
    path = GOLDEN / "images" / "gradient_640x360.png"
    source = make_source(path)
    if make_source is os.fsencode:  # a path object may give bytes, while plain bytes are the content of a file
        source = type("BytesPath", (), {"__fspath__": lambda self: os.fsencode(path)})()
    loaded = load_picture(source)
    assert loaded.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (loaded.width, loaded.height) == loaded.image.size == (640, 360)
    assert np.array_equal(np.asarray(loaded.image), np.asarray(Image.open(path)))


@pytest.mark.parametrize("kind", PICTURE_FORMATS)
def test_every_listed_format_is_read(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    loaded = load_picture(saved(asymmetric(), kind, **options))
    assert loaded.image.size == (31, 17)
    difference = np.asarray(loaded.image.convert("RGB")).astype(int) - np.asarray(asymmetric())
    if kind not in ("JPEG", "AVIF", "GIF"):
        assert not difference.any()
    else:
        assert np.abs(difference).mean() < 40


def packed_12_bits(values: np.ndarray[Any, Any]) -> bytes:
    pairs = values.reshape(-1, 2).astype(np.uint32)
    return b"".join(int(one << 12 | two).to_bytes(3, "big") for one, two in pairs)


@pytest.mark.parametrize("as_pillow_s", [False, True])
@pytest.mark.parametrize(("bits", "photometric"), [(16, 1), (16, 0), (12, 1)])
def test_grey_of_12_bits_and_grey_that_is_white_at_zero_are_read_as_viewers_show_them(
    bits: int, photometric: int, as_pillow_s: bool
) -> None:
    grey = np.linspace(0, 255, 48, dtype=np.uint8).reshape(6, 8, 1)
    stored = grey.astype("<u2") * 257
    data = tiff(stored if photometric else 65535 - stored, photometric=photometric)
    if bits == 12:
        packed = packed_12_bits(stored >> 4)
        data = tiff(stored, bits=12)[: -stored.nbytes].replace(struct.pack("<I", stored.nbytes), struct.pack("<I", 72))
        data += packed
    loaded = load_picture(Image.open(BytesIO(data)) if as_pillow_s else data)
    assert np.array_equal(np.asarray(loaded.image) >> 8, grey[..., 0])


def test_what_is_cut_off_a_tiff_whose_zero_is_white_is_white() -> None:
    stored = np.full((6, 8, 1), 256, "<u2")
    cut = tiff(stored, photometric=0, num_strips=6)[: -stored.nbytes // 3]
    answered = load_picture(cut, damaged="answer")
    assert answered.notes == ("damaged",)
    assert np.asarray(answered.image)[:, 0].tolist() == [65279] * 4 + [65535] * 2


def test_names_that_are_not_utf8_are_opened_and_shown(tmp_path: Path) -> None:
    directory = os.fsencode(tmp_path)
    raw = directory + b"/caf\xe9\n.png"
    try:
        with open(raw, "wb") as file:
            file.write(saved(asymmetric(), "PNG"))
    except OSError:
        pytest.skip("this file system takes no such names")
    assert load_picture(os.fsdecode(raw)).image.size == (31, 17)
    assert r"caf\xe9\n-" in refusal(os.fsdecode(raw[:-4] + b"-")).message


def test_the_first_frame_of_an_animation_is_read() -> None:
    frames = [Image.new("RGB", (12, 8), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert load_picture(data).image.convert("RGB").getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.parametrize("orientation", [*range(10), 65535])  # from 1 to 8 they are known
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_or_ignored_as_asked(kind: str, orientation: int) -> None:
    upright = np.asarray(asymmetric())
    undo = {
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),  # stored rotated left, to be shown rotated right
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    stored = Image.fromarray(np.ascontiguousarray(undo.get(orientation, np.array)(upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, dict[str, Any]] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}
    data = saved(stored, kind, exif=exif, **options.get(kind, {}))
    as_stored, as_meant = load_picture(data, orientation="ignore"), load_picture(data)
    assert as_stored.image.size == stored.size
    assert as_meant.image.size == (as_meant.width, as_meant.height) == (31, 17)
    tolerance = 12 if kind == "JPEG" else 0
    assert np.abs(np.asarray(as_stored.image).astype(int) - np.asarray(stored)).max() <= tolerance
    assert np.abs(np.asarray(as_meant.image).astype(int) - upright).max() <= tolerance
    assert as_stored.digest == as_meant.digest


def test_pil_images_get_a_digest_of_their_pixels_and_are_turned_upright() -> None:
    image = asymmetric()
    digest = load_picture(image).digest
    assert load_picture(image.copy()).digest == digest
    changed = image.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    reshaped = Image.frombytes("RGB", (17, 31), image.tobytes())
    palette = image.quantize(8)
    repainted = palette.copy()
    repainted.putpalette([255 - value for value in palette.getpalette() or []])
    clear = palette.copy()
    clear.info["transparency"] = 3
    digests = [load_picture(other).digest for other in (image, changed, reshaped, palette, repainted, clear)]
    assert len(set(digests)) == len(digests)
    with Image.open(GOLDEN / "images" / "exif6_160x120.jpg") as stored:
        assert load_picture(stored, orientation="ignore").image.size == (160, 120)
        assert load_picture(stored).image.size == (120, 160)


# Bad files


def test_paths_without_a_file_or_content_folders_pipes_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    file = tmp_path / "file.png"
    file.write_bytes(b"x")
    dangling = tmp_path / "link.png"
    dangling.symlink_to(tmp_path / "gone.png")
    names = ["", tmp_path / "none.png", file / "below.png", dangling, "null\0character", "n" * 5000, "lone \ud800"]
    for name in names:
        assert refusal(name).code == "missing"

    pipe, empty = tmp_path / "pipe.png", tmp_path / "empty.png"
    os.mkfifo(pipe)
    empty.touch()
    for path in (tmp_path, pipe, "/dev/zero", "/dev/tty"):
        if Path(path).exists():
            assert refusal(path).code == "not_a_file"
    assert refusal(empty).code == refusal(b"").code == "empty"


def test_a_pipe_that_replaces_a_file_after_the_check_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, file = tmp_path / "pipe.png", tmp_path / "file.png"
    os.mkfifo(pipe)
    file.write_bytes(b"x")
    monkeypatch.setattr(os, "stat", lambda path, real=os.stat: real(file))
    assert refusal(pipe).code == "not_a_file"


def test_errors_of_the_system_are_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    assert refusal(tmp_path / "a.png").code == "unreadable"
    path = tmp_path / "picture.png"
    path.write_bytes(saved(asymmetric(), "PNG"))
    for error in (PermissionError(13, "Permission denied"), OSError(5, "Input/output error")):

        def refuse(*args: Any, error: OSError = error) -> int:
            raise error

        monkeypatch.setattr(os, "open", refuse)
        assert refusal(path).code == "unreadable"


@pytest.mark.parametrize(
    ("data", "code", "word"),
    [
        (b"404: Not Found\n", "not_a_picture", "plain text"),
        (b"P", "not_a_picture", "plain text"),
        (b"P3\n2 2\n255\n1 2 3", "truncated", ""),
        (b"/* XPM */\nstatic char *a[] = {", "unsupported", "an XPM picture"),
        (b"SIMPLE  =                    T / Standard FITS".ljust(80), "unsupported", "a FITS picture"),
        (b"SIMPLE = plain\n", "not_a_picture", "plain text"),
        (b"#define a_width 8\n#define a_height 8\n", "unsupported", "an XBM picture"),
        (b"BMW is a maker of cars", "not_a_picture", "plain text"),
        ("P6 ist größer als ein Bild".encode("cp1252"), "not_a_picture", "plain text"),
        ("\ufeff<html>".encode("utf-16-le"), "not_a_picture", "web page"),
        (b"/annex/objects/SHA256E-s12--ab.jpg\n", "not_a_picture", "git-annex"),
        (bytes(1000), "not_a_picture", "of no known format"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "not_a_picture", "of no known format"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "not_a_picture", "Git LFS"),
        (b'{"error": "not found"}', "not_a_picture", "JSON"),
        (b'\xef\xbb\xbf [{"message": 1}]', "not_a_picture", "JSON"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "not_a_picture", "XML"),
        (b"<Error><Code>NoSuchKey</Code></Error>", "not_a_picture", "XML"),
        (b"<head><title>502 Bad Gateway</title></head>", "not_a_picture", "web page"),
        (b"<html><svg></svg></html>", "not_a_picture", "web page"),
        (b"PK\x03\x04" + bytes(60), "not_a_picture", "archive (zip)"),
        (bytes(257) + b"ustar\x0000" + bytes(300), "not_a_picture", "archive (tar)"),
        (b"\x1f\x8b\x08" + bytes(60), "not_a_picture", "archive (gzip)"),
        (b"\x1a\x45\xdf\xa3" + bytes(60), "unsupported", "video"),
        (b"RIFF\x10\0\0\0AVI LIST", "unsupported", "video"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "not_a_picture", "web page"),
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "unsupported", "SVG"),
        (b"%PDF-1.7\n", "unsupported", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unsupported", "PostScript"),
        (b"\0\0\0\x18ftypisom\0\0\2\0isomiso2", "unsupported", "video"),
        (b"\0\0\0\x18ftypcrx \0\0\0\1crx isom", "unsupported", "a raw file of a camera"),
        (b"FUJIFILMCCD-RAW 0201", "unsupported", "a raw file of a camera"),
        (b"IIRO\x08\0\0\0", "unsupported", "a raw file of a camera"),
        (b"IIU\0\x18\0\0\0", "unsupported", "a raw file of a camera"),
        (b"FOVb\1\0\2\0", "unsupported", "a raw file of a camera"),
        (bytes(128) + b"DICM\2\0\0\0", "unsupported", "a DICOM picture"),
        (b"icns\0\0\x10\0ic07", "unsupported", "an icon file"),
        (b"\0\0\1\0\1\0\x10\x10\0\0\1\0 \0h\4\0\0", "unsupported", "icon"),
        (b"\x89PNG\r\n\x1a\n", "truncated", "PNG"),
        (b"\xff\xd8\xff", "truncated", "JPEG"),
        (b"GIF89a", "truncated", "GIF"),
        (b"RIFF\x10", "truncated", "WEBP"),
    ],
)
def test_other_bytes_get_their_code(data: bytes, code: str, word: str) -> None:
    error = refusal(data)
    assert (error.code, word in error.message) == (code, True)


def test_heic_picture_without_its_extra_is_unsupported_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    vision_image._reads_heic.cache_clear()

    error = refusal(HEIC_BEGINNING)

    vision_image._reads_heic.cache_clear()
    assert error.code == "unsupported"
    assert install_hint("heif") in error.message


@pytest.mark.parametrize("orientation", [1, 6])
def test_heic_picture_is_read_upright_with_its_extra(orientation: int) -> None:
    import pillow_heif

    exif = Image.Exif()
    exif[0x0112] = orientation
    rows, columns = np.mgrid[0:40, 0:64]
    stored = Image.fromarray(np.stack([rows * 4, columns * 2, rows + columns], axis=-1).astype(np.uint8))
    written = BytesIO()
    pillow_heif.from_pillow(stored).save(written, quality=-1, exif=exif.tobytes())
    data = written.getvalue()
    upright = stored if orientation == 1 else stored.transpose(Image.Transpose.ROTATE_270)

    loaded = load_picture(data)

    assert (loaded.width, loaded.height) == upright.size
    difference = np.abs(np.asarray(loaded.image, dtype=float) - np.asarray(upright, dtype=float))
    assert difference.mean() < 3  # colours are stored at half the resolution
    assert loaded.digest == hashlib.sha256(data).hexdigest()
    assert {refusal(cut).code for cut in (HEIC_BEGINNING, data[: len(data) // 2])} == {"truncated"}
    assert refusal(data, max_pixels=64 * 40 - 1).code == "too_large"


def test_other_objects_and_pictures_without_pixels_are_unsupported_and_truncated_ones_refused() -> None:
    for source in (None, 5, ["a.png"], object()):
        assert refusal(source).code == "unsupported"
    assert refusal(Image.new("RGB", (0, 7))).code == "unsupported"

    data = (GOLDEN / "images" / "shapes_200x300.jpg").read_bytes()
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert refusal(Image.open(BytesIO(data[: len(data) // 2]))).code == "truncated"


@pytest.mark.parametrize("kind", PICTURE_FORMATS)
def test_cut_off_files_are_refused_or_complete(kind: str) -> None:
    data = saved(asymmetric(64, 48), kind)
    whole, codes = preprocess(load_picture(data).image), []
    for length in sorted({*range(1, len(data), max(1, len(data) // 40)), len(data) - 1}):
        try:
            result = preprocess(load_picture(data[:length]).image)
            assert np.array_equal(result, whole)  # the file was cut after the pixels
        except PictureError as error:
            codes.append(error.code)
    assert set(codes) <= {"truncated", "not_a_picture"}
    assert len(codes) >= 25
    assert refusal(data[: len(data) // 2]).code == "truncated"


class ReadSeekTell:
    """A file with what Pillow needs, and no `closed`."""

    def __init__(self, data: bytes) -> None:
        file = BytesIO(data)
        self.read, self.seek, self.tell = file.read, file.seek, file.tell


def test_an_image_from_a_file_without_closed_is_decoded() -> None:
    data = saved(scene(width=31, height=17), "PNG")
    loaded = load_picture(Image.open(ReadSeekTell(data)))  # type: ignore[arg-type]
    assert np.array_equal(np.asarray(loaded.image), np.asarray(Image.open(BytesIO(data))))


# Transparency


def disc(*, colour: tuple[int, ...] = (255, 0, 0)) -> tuple[Image.Image, Image.Image]:
    """A disc on transparent black, with soft edges, and on white."""
    alpha = Image.radial_gradient("L").resize((60, 60)).point(lambda value: max(0, min(255, 4 * (150 - value))))
    clear = Image.new("RGBA", alpha.size, (0, 0, 0, 0))
    clear.paste(colour, mask=alpha.point(lambda value: 255 * (value > 0)))
    clear.putalpha(alpha)
    white = Image.new("RGB", alpha.size, "white")
    white.paste(colour, mask=alpha)
    return clear, white


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "LA", "La", "PA", "RGBa", "PIL image"])
def test_a_transparent_picture_is_on_white_as_in_viewers(kind: str) -> None:
    clear, white = disc(colour=(0, 0, 0) if "L" in kind else (255, 0, 0))
    if kind in ("LA", "La"):
        clear = clear.convert("LA").convert(kind)
    elif kind in ("PA", "RGBa"):
        clear = clear.convert(kind)
    is_file = kind in PICTURE_FORMATS
    source = saved(clear, kind, **({"lossless": True} if kind == "WEBP" else {})) if is_file else clear

    shown, stored = load_picture(source), load_picture(source, transparency="ignore")

    difference = np.abs(preprocess(shown.image).astype(int) - preprocess(white))
    assert difference.max() <= (2 if kind == "RGBa" else 0)  # premultiplied colours are rounded
    assert shown.notes == stored.notes == ("transparent",)
    assert shown.digest == stored.digest
    assert np.array_equal(preprocess(stored.image), preprocess(clear))
    assert not np.array_equal(preprocess(stored.image), preprocess(white))


@pytest.mark.parametrize("kind", ["GIF", "PNG"])
@pytest.mark.parametrize("place", [0, 1])
def test_transparent_colours_of_a_palette_show_white(kind: str, place: int) -> None:
    image = Image.new("P", (40, 30), place)
    image.putpalette([0, 0, 0, 9, 9, 9, 255, 0, 0])
    image.paste(2, (10, 10, 30, 20))
    white = Image.new("RGB", (40, 30), "white")
    white.paste((255, 0, 0), (10, 10, 30, 20))

    data = saved(image, kind, transparency=place)

    assert np.array_equal(preprocess(load_picture(data).image), preprocess(white))
    assert load_picture(saved(image, kind)).notes == ()


@pytest.mark.parametrize(
    ("depth", "colours", "values", "clear"),
    [
        (1, 0, (0, 1), 1),
        (2, 0, (0, 2), 2),
        (4, 0, (0, 9), 9),
        (8, 0, (0, 200), 200),
        (16, 0, (0, 513), 513),
        (8, 2, (0, 77), 77),
        (16, 2, (0, 0x4D4D), 0x4D4D),
        (16, 4, (0, 0), None),
        (16, 6, (0, 0), None),
    ],
)
def test_each_depth_of_a_transparent_png_shows_white(
    depth: int, colours: int, values: tuple[int, int], clear: int | None
) -> None:
    """The left half is black, and the right one transparent."""
    channels = {0: 1, 2: 3, 4: 1, 6: 3}[colours]
    rows = np.repeat(np.array([values] * 8), 16, axis=1)[..., None].repeat(channels, axis=-1)
    if clear is None:
        opaque = np.repeat([[65535, 0]] * 8, 16, axis=1)[..., None]
        rows = np.concatenate([rows, opaque], axis=-1)
    flat = rows.reshape(8, -1)
    if depth < 8:
        bits = (flat[..., None] >> np.arange(depth - 1, -1, -1)) & 1
        packed = np.packbits(bits.reshape(8, -1).astype(np.uint8), axis=1)
    else:
        packed = flat.astype(">u2" if depth == 16 else np.uint8).view(np.uint8)
    key = b"" if clear is None else chunk(b"tRNS", struct.pack(">H", clear) * channels)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 32, 8, depth, colours, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in packed)))
    loaded = load_picture(b"\x89PNG\r\n\x1a\n" + head + key + data + chunk(b"IEND", b""))

    assert loaded.notes == ("transparent",)
    shown = preprocess(loaded.image, rule=PixelRule(image_size=8))  # the middle: the border of the halves
    assert (shown[:, 0] < 30).all()
    assert (shown[:, -1] > 225).all()


def test_an_opaque_picture_with_alpha_stays_as_it_is() -> None:
    opaque = asymmetric().convert("RGBA")
    loaded = load_picture(saved(opaque, "PNG"))
    assert (loaded.image.mode, loaded.notes) == ("RGBA", ())
    assert np.array_equal(preprocess(loaded.image), preprocess(asymmetric()))


# Bombs


@pytest.mark.parametrize(("width", "height"), [(60000, 60000), (20000, 8000), (2**31 - 1, 1), (1, 200_000_000)])
def test_a_header_claiming_too_many_pixels_is_refused_before_decoding(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(image: Image.Image) -> None:
        raise AssertionError("decoding began")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    assert width * height > DEFAULT_MAX_PIXELS
    assert refusal(png(width=width, height=height)).code == "too_large"


def test_the_pixel_limit_counts_what_it_says(tmp_path: Path) -> None:
    image = asymmetric(20, 10)
    for source in (image, saved(image, "PNG")):
        assert load_picture(source, max_pixels=200).width == 20
        assert refusal(source, max_pixels=199).code == "too_large"

    data = bytearray(saved(Image.new("P", (10, 10)), "GIF"))
    frame = data.index(b",")
    data[frame + 5 : frame + 9] = struct.pack("<HH", 65535, 65535)
    assert refusal(bytes(data)).code == "too_large"


def test_the_byte_limit_is_compared_with_the_disk_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    with open(path, "wb") as file:
        file.truncate(2**40)  # a sparse file: it takes no disk space, but reading it would never end
    assert refusal(path).code == "too_large"
    data = saved(asymmetric(), "PNG")
    path.write_bytes(data)
    for source in (path, data):
        assert load_picture(source, max_bytes=len(data)).width == 31
        assert refusal(source, max_bytes=len(data) - 1).code == "too_large"


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="needs a file that cannot tell its size")
def test_a_file_without_a_size_is_read_and_limited() -> None:
    assert refusal("/proc/version").code == "not_a_picture"
    assert refusal("/proc/version", max_bytes=10).code == "too_large"


def test_running_out_of_memory_is_the_pictures_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhaust(image: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", exhaust)
    assert refusal(saved(asymmetric(), "PNG")).code == "too_large"


# Other guarantees


def test_an_unknown_orientation_rule_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="upright or ignore"):
        load_picture(asymmetric(), orientation="sideways")  # type: ignore[arg-type]


def test_formats_that_are_read_are_registered_and_few_others() -> None:
    """In a process of its own, because this one has saved pictures, which registers all formats."""
    program = (
        "import json; from PIL import Image; from llama_adapter.vision.image import _available_formats\n"
        "found = _available_formats(), list(Image.OPEN); Image.init(); print(json.dumps((*found, list(Image.OPEN))))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    read, registered, known = json.loads(ran.stdout)
    assert read == [name for name in PICTURE_FORMATS if name in known]
    assert {*registered} == {*read, "DIB"} < {*known}

    Image.init()
    assert {Image.EXTENSION[suffix] for suffix in PICTURE_SUFFIXES} <= {*PICTURE_FORMATS, "MPO"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain.png", "plain.png"),
        ("été 图.png", "été 图.png"),
        (b"\xff.png", r"\xff.png"),
        ("a\x1b[31m\n", r"a\x1b[31m\n"),
        ("\udcff.png", r"\xff.png"),
        ("half \ud83d.png", r"half \ud83d.png"),
        ("\x7f\x9b\u2028\u202egnp\u2066", r"\x7f\x9b\u2028\u202egnp\u2066"),
        *((f"9.41{space}AM.png", f"9.41{space}AM.png") for space in "\u202f\u00a0\u3000\u2009"),
        ("می\u200cخواهم 👨\u200d👩\u200d👧.png", "می\u200cخواهم 👨\u200d👩\u200d👧.png"),
    ],
)
def test_names_are_shown_without_control_characters(name: str | bytes, shown: str) -> None:
    assert shown_name(name) == shown


# Reduced decoding


def jpeg(width: int, height: int, *, mode: str = "RGB", **options: Any) -> bytes:
    rows, columns = np.mgrid[0:height, 0:width]
    waves = 127 + 60 * np.sin(rows / 40) + 60 * np.cos(columns / 55)
    return saved(Image.fromarray(waves.astype(np.uint8)).convert(mode), "JPEG", quality=95, **options)


@pytest.mark.parametrize(
    ("mode", "size", "expected"),
    [
        ("RGB", (1600, 1200), (800, 600)),
        ("L", (1600, 1200), (800, 600)),
        ("RGB", (1900, 2200), (475, 550)),
        ("RGB", (895, 3000), (895, 3000)),
        ("RGB", (100, 80), (100, 80)),
    ],
)
def test_a_jpeg_is_decoded_at_less_than_its_size_where_both_sides_stay_long_enough(
    mode: str, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    data = jpeg(*size, mode=mode)
    whole, less = load_picture(data), load_picture(data, least_side=448)

    assert whole.image.size == size
    assert less.image.size == expected
    assert (less.width, less.height) == size
    assert less.image.mode == mode
    assert less.digest == whole.digest
    shrunk = np.asarray(whole.image.resize(expected, Image.Resampling.BOX), dtype=int)
    assert np.abs(shrunk - np.asarray(less.image, dtype=int)).mean() < 1.5


def test_jpegs_decoded_at_less_than_their_size_are_turned_upright_others_whole_and_damaged_ones_refused() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6

    loaded = load_picture(jpeg(1600, 1200, exif=exif), least_side=448)
    assert loaded.image.size == (600, 800)
    assert (loaded.width, loaded.height) == (1200, 1600)

    assert load_picture(jpeg(1600, 1200, mode="CMYK"), least_side=448).image.size == (1600, 1200)
    assert refusal(jpeg(1600, 1200)[:2000], least_side=448).code == "truncated"
