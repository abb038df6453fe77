"""Only damage of the pixels refuses a picture; valid files of kinds that are not read have errors of their own."""

import struct
import zlib
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from llama_adapter.vision.containers import bare_picture
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.not_read import rare_kind
from llama_adapter.vision.preprocess import preprocess
from tests.bad_files import chunk as sound_chunk
from tests.odd_pictures.damaged import png_chunks
from tests.odd_pictures.rare import RareFile, bmp, jpeg_of_kind, rare_files
from tests.odd_pictures.samples import saved, scene, sound_files

PNG = sound_files()["png"]
LONG = zlib.compress(b"a" * 1_200_000)  # more than Pillow reads
JPEGS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "progressive": {"progressive": True},
    "full colour": {"subsampling": 0, "quality": 100},
    "restarts": {"restart_marker_blocks": 3},
    "progressive with restarts": {"restart_marker_rows": 1, "progressive": True},
}


def chunk(kind: bytes, body: bytes, *, is_sound: bool = True) -> bytes:
    whole = sound_chunk(kind, body)
    return whole if is_sound else whole[:-1] + bytes([whole[-1] ^ 1])


def with_data(change: Any) -> bytes:
    """The PNG with other compressed pixels, whose chunk has the right checksum."""
    [(_, start, end)] = [found for found in png_chunks(PNG) if found[0] == b"IDAT"]
    return PNG[:start] + chunk(b"IDAT", change(PNG[start + 8 : end - 4])) + PNG[end:]


def pixels(data: bytes, **options: Any) -> np.ndarray:
    return np.asarray(load_picture(data, **options).image.convert("RGB"))


def is_refused(data: bytes, **options: Any) -> bool:
    try:
        load_picture(data, **options)
    except PictureError as error:
        return error.code == "truncated"
    return False


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        chunk(b"zTXt", b"k\0\0" + LONG),
        chunk(b"iTXt", b"k\0\1\0\0\0" + LONG),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + LONG),
        b"".join(chunk(b"zTXt", b"%d\0\0" % number + LONG) for number in range(70)),
        chunk(b"zTXt", b"k\0\5no method"),
        chunk(b"tEXt", b"k\0words", is_sound=False),
        chunk(b"iCCP", b"k\0\0" + LONG),
        chunk(b"iCCP", b"k"),
        chunk(b"iCCP", b"k\0\7not zlib"),
        *(chunk(kind, b"ab") for kind in (b"gAMA", b"cHRM", b"pHYs", b"sRGB", b"eXIf", b"acTL", b"fcTL", b"fdAT")),
        chunk(b"eXIf", b"II*\0\xff\xff\xff\x7f"),
        chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + b"\1\x12" * 40),
        chunk(b"eXIf", b"MM", is_sound=False),
        chunk(b"tRNS", bytes(6), is_sound=False),
        chunk(b"abCd", b"\xff" * 100, is_sound=False),
    ],
    ids=lambda extra: str(extra[4:20]),
)
def test_no_chunk_beside_the_pixels_of_a_png_refuses_it(extra: bytes, at_end: bool) -> None:
    at = len(PNG) - 12 if at_end else next(png_chunks(PNG))[2]

    loaded = load_picture(PNG[:at] + extra + PNG[at:])

    assert np.array_equal(np.asarray(loaded.image), np.asarray(scene()))
    assert loaded.notes == ()


def test_the_orientation_of_a_png_is_kept_beside_damage() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    png = saved(scene(), "PNG", exif=exif)
    at = next(png_chunks(png))[2]

    loaded = load_picture(png[:at] + chunk(b"zTXt", b"k\0\0" + LONG) + png[at:])

    assert loaded.image.size == (64, 96)


@pytest.mark.parametrize("kind", [b"IHDR", b"IDAT"])
def test_a_wrong_checksum_of_pixels_is_damage(kind: bytes) -> None:
    changed = bytearray(PNG)
    changed[next(end for found, _, end in png_chunks(PNG) if found == kind) - 1] ^= 1

    assert is_refused(bytes(changed))
    answered = load_picture(bytes(changed), damaged="answer")
    assert np.array_equal(np.asarray(answered.image), np.asarray(scene()))
    assert answered.notes == ("damaged",)

    changed = with_data(lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert is_refused(changed)
    assert load_picture(changed, damaged="answer").notes == ("damaged",)


# Of one and of four components: one scan, and scans of each component.
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, "RGB") for kind in JPEGS),
        *((kind, mode) for kind in ("baseline", "progressive with restarts") for mode in ("L", "CMYK")),
    ],
)
def test_a_jpeg_needs_its_scans_and_not_its_end(kind: str, mode: str) -> None:
    whole = saved(scene(width=137, height=75).convert(mode), "JPEG", **JPEGS[kind])
    expected = pixels(whole)

    near_end = len(whole) * 9 // 10
    for length in (*range(4, near_end, 23), *range(near_end, len(whole))):
        cut = whole[:length]
        if length < near_end:
            assert is_refused(cut), length
        elif length >= len(whole) - 2 or not is_refused(cut):  # the last bytes may make no difference
            assert np.array_equal(pixels(cut), expected), length
    assert np.array_equal(pixels(whole[:-2] + bytes(500)), expected)  # a disk filled the end with zeros


def test_damaged_metadata_of_a_jpeg_is_left_out() -> None:
    jpeg = sound_files()["jpg"]
    for marker, body in ((0xE2, b"ICC_PROFILE\0"), (0xE2, b"MPF\0II*\0"), (0xED, b"Photoshop 3.0\08BIM"), (0xFE, b"")):
        segment = struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body
        assert np.array_equal(pixels(jpeg[:2] + segment + jpeg[2:]), pixels(jpeg))


def test_a_webp_needs_neither_padding_nor_metadata_nor_further_frames() -> None:
    exif = scene().getexif()
    exif[0x010F] = "Camera"
    for lossless in (False, True):
        pixels_alone = saved(scene(), "WEBP", lossless=lossless)
        expected = pixels(pixels_alone)
        length = int.from_bytes(pixels_alone[16:20], "little")
        assert is_refused(pixels_alone[: 20 + length - 1])
        assert np.array_equal(pixels(pixels_alone[: 20 + length]), expected)
        whole = saved(scene(), "WEBP", lossless=lossless, exif=exif.tobytes())
        for cut in range(1, len(whole) - whole.index(b"EXIF") + 1):
            assert np.array_equal(pixels(whole[:-cut]), expected), cut

    whole = saved(scene(), "WEBP", save_all=True, append_images=[scene().rotate(90)], lossless=True)
    second = whole.rindex(b"ANMF")

    for cut in (second, second + 20, len(whole) - 20):
        assert np.array_equal(pixels(whole[:cut]), np.asarray(scene()))
    assert is_refused(whole[: second - 40])


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp"])
@pytest.mark.parametrize("before", [b"\n", b"\xef\xbb\xbf", b"<br />\n<b>Warning</b>: headers\n", bytes(4096)])
def test_bytes_around_a_picture_are_left_out(suffix: str, before: bytes) -> None:
    data = sound_files()[suffix]
    assert np.array_equal(pixels(before + data + Random(1).randbytes(300)), pixels(data))


@pytest.mark.parametrize("head", [b"PK\x03\x04", b"%PDF-1.7\n", b"ID3\x04", b"\0\0\0\x18ftypmp42", b"\x1f\x8b\x08\0"])
def test_a_picture_within_another_file_is_not_taken_for_it(head: bytes) -> None:
    with pytest.raises(PictureError) as caught:
        load_picture(head + bytes(100) + sound_files()["jpg"])
    assert caught.value.code in ("unsupported", "not_a_picture")


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "bmp"])
def test_the_part_that_can_be_decoded_is_answered_if_asked(suffix: str) -> None:
    whole = sound_files()[suffix]
    cut = whole[: len(whole) * 3 // 4]

    assert is_refused(cut)
    answered = load_picture(cut, damaged="answer")
    assert answered.notes == ("damaged",)
    assert answered.image.size == (96, 64)
    is_right = (np.asarray(answered.image.convert("RGB")) == pixels(whole)).all(axis=(1, 2))
    assert 10 < is_right.sum() < 64
    image = Image.open(BytesIO(cut))
    assert load_picture(image, damaged="answer").notes == ("damaged",)
    assert is_refused(whole[:60], damaged="answer")
    assert load_picture(whole, damaged="answer").notes == ()
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_a_progressive_jpeg_is_answered_from_the_scans_it_has() -> None:
    whole = saved(scene(), "JPEG", progressive=True, quality=95)
    cut = whole[: len(whole) // 2]
    assert is_refused(cut)
    difference = np.abs(pixels(cut, damaged="answer").astype(int) - pixels(whole))
    assert 0 < difference.mean() < 40


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp"])
def test_a_flipped_byte_is_refused_or_read_as_pillow_reads_it(suffix: str) -> None:
    """Where the file is read, and Pillow reads it too, both see the same pixels."""
    data, randomness, num_read = sound_files()[suffix], Random(2), 0
    for _ in range(300):
        changed = bytearray(data)
        changed[randomness.randrange(8, len(data))] ^= randomness.randrange(1, 256)
        try:
            ours = load_picture(bytes(changed), transparency="ignore").image
        except PictureError:
            continue
        try:
            theirs = Image.open(BytesIO(changed))
            theirs.load()
        except Exception:  # Pillow refuses what is outside the pixels
            continue
        num_read += 1
        assert np.array_equal(np.asarray(ours.convert("RGB")), np.asarray(theirs.convert("RGB")))
    assert num_read > 5


def test_files_that_are_whole_stay_as_they_are() -> None:
    for suffix in ("jpg", "gif", "webp", "bmp", "tif"):
        data = sound_files()[suffix]
        assert bare_picture(data) == (data, "")


# Valid files of kinds that are not read

RARE = [file for file in rare_files() if not file.is_read]


def refusal(data: bytes) -> PictureError:
    with pytest.raises(PictureError) as caught:
        preprocess(load_picture(data, name="a.picture").image)
    return caught.value


@pytest.mark.parametrize("file", [file for file in RARE if file.kind], ids=lambda file: file.name)
def test_a_whole_file_of_a_rare_kind_is_unsupported_and_named(file: RareFile) -> None:
    error = refusal(file.content)
    assert error.code == "unsupported"
    assert error.message.startswith("`a.picture` is ")
    assert file.kind in error.message


@pytest.mark.parametrize("part", [0.5, 0.9])
@pytest.mark.parametrize(
    "file", [file for file in RARE if file.name.endswith((".jpg", "apple.png"))], ids=lambda file: file.name
)
def test_a_rare_file_that_ends_early_is_truncated(file: RareFile, part: float) -> None:
    assert refusal(file.content[: int(len(file.content) * part)]).code == "truncated"


@pytest.mark.parametrize("file", [file for file in RARE if not file.kind], ids=lambda file: file.name)
def test_a_tiff_or_bmp_that_is_not_decoded_is_damaged_or_rare(file: RareFile) -> None:
    error = refusal(file.content)
    assert error.code == "truncated"
    assert f"is cut off, damaged or a rare kind of {'TIFF' if file.name.endswith('.tif') else 'BMP'} (" in error.message
    has_right_rows = file.name.endswith("-cut.bmp")
    assert is_refused(file.content, damaged="answer") != has_right_rows


@pytest.mark.parametrize(
    "content", [b"\xff\xd8\xff\xc1\0", b"\xff\xd8\xff\xff\xff\xff", b"\xff\xd8" + b"\xff\xe0\0\0" * 9]
)
def test_headers_that_lead_nowhere_name_no_kind(content: bytes) -> None:
    assert rare_kind(content) is None


def test_a_rare_picture_is_named_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "twelve bits.jpg"
    path.write_bytes(jpeg_of_kind(0xC1, bits=12))
    with pytest.raises(PictureError, match=r"twelve bits\.jpg` is a sequential JPEG") as caught:
        load_picture(path)
    assert len(caught.value.digest) == 64


def test_text_that_begins_with_the_letters_of_a_bmp_is_no_picture() -> None:
    assert refusal(b"BM" + b"are letters " * 20).code == "not_a_picture"
    assert refusal(bmp(bits=64)[:40]).code == "not_a_picture"  # the header is cut off, so that nothing identifies a BMP
