"""Data URIs are decoded exactly, within limits that are checked before decoding; others are refused."""

import asyncio
import base64
import tracemalloc
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.serving.http_api.errors import PictureRefusedError
from llama_adapter.app.serving.http_api.pictures import PictureSettings, read_picture
from tests.app.serving.http_api.requests import data_uri

SETTINGS = PictureSettings(max_picture_bytes=3000)
NOT_OPENED = (
    *("/etc/passwd", "assets/pictures/12-red-star.jpg", "../../secret-file", "C:\\secret-file", "", "\x00"),
    *("file:///etc/passwd", "file://localhost/etc/passwd", "FILE:/etc/passwd", "ftp://example.com/picture.png"),
    *("gopher://example.com:70/_", "javascript:alert(1)", "blob:https://example.com/1", "//example.com/picture.png"),
    *("iVBORw0KGgo=", " data:image/png;base64,AAAA"),
)


def read(url: str, *, settings: PictureSettings = SETTINGS) -> bytes:
    return asyncio.run(read_picture(url, settings=settings))


def refused(url: str, *, settings: PictureSettings = SETTINGS) -> PictureRefusedError:
    with pytest.raises(PictureRefusedError) as caught:
        read(url, settings=settings)
    return caught.value


@pytest.mark.parametrize(
    "head",
    [
        *("image/jpeg;base64", "IMAGE/PNG;BASE64", "image/jpg;base64", "image/svg+xml;base64", "image;base64"),
        *("image/png;charset=utf-8;base64", 'image/png;name="a b.png"; base64 ', ";charset=utf-8;base64"),
        *("application/octet-stream;base64", "text/html;base64", "image/a b;base64", ";base64", "base64"),
    ],
)
@pytest.mark.parametrize("scheme", ["data", "DATA", "Data"])
def test_any_media_type_is_read_and_left_to_the_decoder(scheme: str, head: str) -> None:
    assert read(f"{scheme}:{head},AAEC") == b"\0\1\2"


@given(
    st.binary(min_size=1, max_size=200), st.integers(1, 80), st.sampled_from(["\n", "\r\n", " ", "\t", "%0A", "%20"])
)
def test_base64_is_taken_as_programs_write_it(content: bytes, width: int, gap: str) -> None:
    plain = base64.b64encode(content).decode()
    safe = base64.urlsafe_b64encode(content).decode()
    for text in (plain, plain.rstrip("="), safe, safe.rstrip("="), quote(plain, safe="")):
        assert read(f"data:image/png;base64,{text}") == content
    lines = gap.join(plain[place : place + width] for place in range(0, len(plain), width))
    assert read(f"data:image/png;base64,{gap}{lines}{gap}") == content


@given(st.binary(min_size=1, max_size=200))
def test_without_base64_the_bytes_are_percent_encoded(content: bytes) -> None:
    assert read(f"data:image/png,{quote(content)}") == content


@pytest.mark.parametrize("gap", ["\n", ""])
@pytest.mark.parametrize("num_bytes", [*range(2 * 196_608 - 1, 2 * 196_608 + 4), 786_634, 786_635, 786_636])
def test_a_picture_of_several_pieces_is_put_together(num_bytes: int, gap: str) -> None:
    content = (bytes(range(251)) * 3135)[:num_bytes]  # the base64 of 2 pieces and a few bytes more or less, or of 4
    for text in (base64.b64encode(content).decode(), base64.urlsafe_b64encode(content).decode().rstrip("=")):
        url = "data:;base64," + gap.join(text[place : place + 75] for place in range(0, len(text), 75))
        assert read(url, settings=PictureSettings(max_picture_bytes=num_bytes)) == content
        too_small = PictureSettings(max_picture_bytes=num_bytes - 1)
        assert refused(url, settings=too_small).code == "image_file_too_large"


@pytest.mark.parametrize(
    ("code", "status", "urls"),
    [
        (
            "invalid_base64_image",
            400,
            [
                *(f"data:image/png;base64,{text}" for text in ("A", "AA=A", "AA==AA==", "AA*A", "ÄÄÄÄ", "%C3%84AA")),
                "data:image/png;base64,AAAA%",
                # Padding at the end of a piece of 262,144 characters, which is not the end of all.
                f"data:image/png;base64,{base64.b64encode(bytes(196_607)).decode()}AAAA",
            ],
        ),
        ("invalid_image_url", 400, ["data:", "data:image/png;base64", "data:" + "a" * 9000, *NOT_OPENED]),
        ("image_file_too_large", 413, [f"data:image/png,{'a' * 200_001}", f"data:;base64,{'%41' * 266_672}"]),
        ("empty_image_file", 400, [f"data:{end}" for end in ("image/png;base64,", ";base64,====", ";base64, \n", ",")]),
        (
            "image_host_not_allowed",
            400,
            ["http://example.com/a.png", "https://example.org/a.png", "HTTPS://EXAMPLE.ORG"],
        ),
    ],
)
def test_each_fault_of_a_url_has_its_code(code: str, status: int, urls: list[str]) -> None:
    for url in urls:
        error = refused(url, settings=PictureSettings(max_picture_bytes=200_000, allowed_hosts=("example.com",)))
        assert (error.code, error.http_status) == (code, status), url[:100]
        assert code != "invalid_image_url" or "data:image/png;base64" in error.message


def test_the_limit_is_exact_and_the_message_says_the_size() -> None:
    for num_bytes in (2998, 2999, 3000):
        assert len(read(data_uri(bytes(num_bytes)))) == num_bytes
    for num_bytes in (3001, 3002, 3003, 100_000):
        error = refused(data_uri(bytes(num_bytes)))
        assert (error.code, error.http_status, error.param) == ("image_file_too_large", 413, "messages")
        assert f"{num_bytes:,}" in error.message


def test_a_picture_beyond_the_limit_is_never_decoded_nor_copied() -> None:
    url = data_uri(bytes(10_000_000))
    tracemalloc.start()
    try:
        refused(url)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1_000_000


@pytest.mark.parametrize(
    "url",
    [
        *("https://user:secret@example.com/secret?secret=secret", "https://example.com/secret?secret#secret"),
        *("https://example.org@example.com:secret/", "file:///secret", "secret", "data:secret"),
        *("data:secret/secret;base64,secret*", "data:image/png;base64,secret=secret"),
    ],
)
def test_messages_repeat_no_payload_and_no_more_of_a_url_than_its_host(url: str) -> None:
    message = refused(url).message

    assert "secret" not in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_picture_bytes", 0), ("fetch_timeout_s", 0.0), ("allowed_hosts", ("127.0.0.1",)), ("allowed_hosts", ("*",))],
)
def test_invalid_settings_raise(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"max_picture_bytes|fetch_timeout_s|example\.com"):
        PictureSettings(**{"max_picture_bytes": 1, name: value})  # type: ignore[arg-type]
