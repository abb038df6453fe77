"""Valid files of unsupported kinds are distinguished from damaged ones: each message names the kind and a remedy."""

import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.not_read import rare_kind
from llama_adapter.vision.preprocess import preprocess
from tests.odd_pictures.rare import RareFile, bmp, jpeg_of_kind, rare_files, tiff
from tests.odd_pictures.samples import sound_files

RARE = [file for file in rare_files() if not file.is_read]
CUT = [file for file in RARE if file.name.endswith((".jpg", ".tif", ".bmp", "apple.png")) and "array" not in file.name]


def refusal(data: bytes) -> PictureError:
    with pytest.raises(PictureError) as caught:
        preprocess(load_picture(data, name="a.picture").image)
    return caught.value


@pytest.mark.parametrize("file", RARE, ids=lambda file: file.name)
def test_a_whole_file_of_a_rare_kind_is_unsupported_and_named(file: RareFile) -> None:
    error = refusal(file.content)
    assert error.code == "unsupported"
    assert error.message.startswith("`a.picture` is ")
    assert file.kind in error.message


@pytest.mark.parametrize("file", CUT, ids=lambda file: file.name)
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_a_rare_file_that_ends_early_is_truncated(file: RareFile, part: float) -> None:
    assert refusal(file.content[: int(len(file.content) * part)]).code == "truncated"


def test_data_that_do_not_decompress_are_damaged_where_the_compression_is_decoded() -> None:
    with Image.open(BytesIO(sound_files()["tif"])) as image:
        start = image.tag_v2[273][0]  # type: ignore[attr-defined]
    content = bytearray(sound_files()["tif"])
    content[start : start + 400] = b"\xff" * 400
    assert refusal(bytes(content)).code == "truncated"


def test_a_tiff_whose_strips_lie_outside_is_truncated() -> None:
    content = tiff(preprocess(Image.new("RGB", (9, 9))).astype("f4"))
    assert refusal(content).code == "unsupported"
    assert refusal(content[:-1]).code == "truncated"
    for tag in (256, 273, 279):
        for kind in (2, 5, 6, 7, 8, 9, 11, 12):  # texts, fractions, signed numbers and floats where sizes belong
            odd = content.replace(struct.pack("<HH", tag, 4), struct.pack("<HH", tag, kind))
            assert odd != content
            assert rare_kind(odd, was_opened=False) is None


def test_a_tiff_with_a_tag_outside_is_truncated() -> None:
    content = tiff(np.ones((9, 9, 3), "f4"))
    at = content.index(struct.pack("<HHI", 258, 3, 3)) + 8
    assert refusal(content).code == "unsupported"
    assert refusal(content[:at] + struct.pack("<I", len(content) - 5) + content[at + 4 :]).code == "truncated"


@pytest.mark.parametrize(
    "content",
    [
        b"II*\0",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff",
        b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0" + b"\xff" * 8 + bytes(60),
        b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHII", 256, 4, 2**32 - 1, 8),
        b"\xff\xd8\xff\xc1\0",
        b"\xff\xd8\xff\xff\xff\xff",
        b"\xff\xd8" + b"\xff\xe0\0\0" * 9,
        b"BM" + bytes(12) + b"\x28\0\0\0",
    ],
)
def test_headers_that_lead_nowhere_name_no_kind(content: bytes) -> None:
    assert rare_kind(content, was_opened=False) is None
    assert rare_kind(content, was_opened=True) is None


def test_a_rare_picture_is_named_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "twelve bits.jpg"
    path.write_bytes(jpeg_of_kind(0xC1, bits=12))
    with pytest.raises(PictureError, match=r"twelve bits\.jpg` is a sequential JPEG") as caught:
        load_picture(path)
    assert len(caught.value.digest) == 64


def test_text_that_begins_with_the_letters_of_a_bmp_is_no_picture() -> None:
    assert refusal(b"BM" + b"are letters " * 20).code == "not_a_picture"
    assert refusal(bmp(bits=64)[:40]).code == "not_a_picture"  # the header is cut off, so that nothing identifies a BMP
