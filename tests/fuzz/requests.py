"""What clients and visitors send: addresses of pictures, and zips of pictures."""

import base64
import contextlib
import io
import zipfile
from urllib.parse import unquote_to_bytes

from llama_adapter.app.pictures.inputs.urls import FetchError, PictureUrl
from llama_adapter.app.serving.http_api.errors import PictureRefusedError
from llama_adapter.app.serving.http_api.pictures import PictureSettings, read_picture
from llama_adapter.app.serving.web.archive import Archive, ArchiveLimits
from llama_adapter.vision.errors import PictureError
from tests.fuzz.mutators import either, mutated_bytes, mutated_zip
from tests.fuzz.target import Target, event_loop, refused, written


def picture_url(data: bytes) -> str:
    """The URL of a picture in a message part: data URIs and addresses. No host is allowed, so nothing is fetched."""
    try:
        url = data.decode(errors="surrogatepass")
    except UnicodeDecodeError:
        url = data.decode("latin-1")
    try:
        parsed = PictureUrl.parse(url)
        assert f"{parsed.host}{parsed.target}".isascii()
        assert 0 <= parsed.port < 65536
        assert PictureUrl.parse(str(parsed)) == parsed
    except FetchError:
        pass
    try:
        picture = event_loop().run_until_complete(read_picture(url, settings=PictureSettings(max_picture_bytes=10_000)))
    except PictureRefusedError as error:
        return refused(error)
    assert 0 < len(picture) <= 10_000
    raw = unquote_to_bytes(url.partition(",")[2])
    plain = raw.translate(bytes.maketrans(b"-_", b"+/"), b" \t\r\n\f=")
    assert picture == raw or picture == base64.b64decode(plain + b"=" * (-len(plain) % 4))
    return "ok"


def upload_zip(data: bytes) -> str:
    """A zip of pictures that was dropped on the page."""
    limits = ArchiveLimits(max_entry_bytes=100_000, max_entries=50, max_total_bytes=2**20, max_directory_bytes=2**16)
    try:
        archive = Archive(written("pictures.zip", data), name="pictures.zip", limits=limits)
    except PictureError as error:
        return refused(error)
    with contextlib.closing(archive):
        names = [entry.name for entry in archive.pictures]
        assert len(set(names)) == len(names) <= limits.max_entries
        assert not any(name.startswith("/") or ".." in name.split("/") for name in names)
        assert all(isinstance(note, str) for note in archive.notes())
        total, outcomes = 0, set()
        for entry in archive.pictures:
            try:
                content = archive.read(entry)
                total += len(content)
                assert len(content) <= limits.max_entry_bytes
                outcomes.add("ok")
            except PictureError as error:
                outcomes.add(error.code)
                refused(error, is_shown=False)
        assert total <= limits.max_total_bytes
    return f"ok {min(len(names), 9)} {sorted(outcomes)}"


def _zips() -> dict[str, bytes]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a.png", "b/é.jpg", "../../c.gif", "notes.txt", ".hidden.png", "C:\\d.bmp", "a.PNG", "e.zip"):
            archive.writestr(zipfile.ZipInfo(name), name.encode() * 50)
    return {"small": packed.getvalue()}


_URLS = {
    "data": b"data:image/png;base64,aGVsbG8=",
    "http": b"https://example.com:8443/a%20b.png?c=d",
    "parameters": b"data:image/jpeg;charset=utf-8;base64,AAAA",
}
_mutate_url = mutated_bytes(
    *b"data: image/png ;base64, = == http:// HTTPS:// @ [::1] : # ?".split(),
    *b"\\ %00 127.0.0.1 xn-- \xe3\x80\x82 file:// . 0x7f.1".split(),
    *(b"\r\n", b"\x00"),
)
_mutate_zip = either(
    mutated_zip({"": mutated_bytes()}, names=("a.png", "/a.png", "..\\..\\x.png", "\0.png", "x" * 300 + ".png")),
    mutated_bytes(b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06"),
)
TARGETS = (
    Target("picture-url", picture_url, lambda: _URLS, _mutate_url),
    Target("upload-zip", upload_zip, _zips, _mutate_zip),
)
