"""HTTP: any request and body gets an answer in OpenAI's form, and never a 5xx status."""

import asyncio
import base64
import contextlib
import io
import json
import zipfile
from functools import cache
from random import Random
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.types import Message

from llama_adapter.app.pictures.inputs.urls import FetchError, PictureUrl
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api
from llama_adapter.app.serving.http_api.errors import PictureRefusedError
from llama_adapter.app.serving.http_api.guards import GuardSettings
from llama_adapter.app.serving.http_api.metrics import Metrics
from llama_adapter.app.serving.http_api.pictures import PictureSettings, read_picture
from llama_adapter.app.serving.online.request_handle import Ask, RequestHandle
from llama_adapter.app.serving.web.archive import Archive, ArchiveLimits
from llama_adapter.vision.errors import PictureError
from tests.app.serving.http_api.live import StubService, answer
from tests.app.serving.http_api.requests import EXAMPLE_PICTURE, chat, image, json_schema, user
from tests.fuzz.mutators import either, mutated_bytes, mutated_json, mutated_lines, mutated_zip, words
from tests.fuzz.target import Target, event_loop, refused, written

_CHAT, _RESPONSES = "/v1/chat/completions", "/v1/responses"
_KEY = "secret-key"


class _AnyAnswer(StubService):
    """Answers with the first of the choices, if the request has choices."""

    def submit(self, ask: Ask) -> RequestHandle:
        text = next(iter(ask.task.continuations), "red")
        self.on_submit = lambda handle: handle.deliver(answer(text))
        return super().submit(ask)


@cache
def _service() -> StubService:
    return _AnyAnswer()


@cache
def _application() -> Any:
    settings = ApiSettings(guards=GuardSettings(max_body_bytes=2**20))
    return create_api(_service(), settings=settings, metrics=Metrics())  # type: ignore[arg-type]


async def _asked(
    method: str, path: str, query: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the application's response."""
    sent: list[Message] = []
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]
    given = [{"type": "http.request", "body": piece, "more_body": not last} for last, piece in enumerate(pieces)]
    gone = asyncio.Event()

    async def receive() -> Message:
        if given:
            return given.pop(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode("utf-8", "surrogateescape"), "query_string": query, "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 9), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    await _application()(scope, receive, send)
    gone.set()
    start = next(message for message in sent if message["type"] == "http.response.start")
    whole = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return start["status"], dict(start.get("headers", ())), whole


def _checked(status: int, headers: dict[bytes, bytes], body: bytes) -> str:
    assert 200 <= status < 500, f"status {status}: {body[:300]!r}"
    if status < 400:
        return f"ok {status} {headers.get(b'content-type', b'')[:20].decode()}"
    assert headers[b"content-type"] == b"application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(body) < 4000, "an error quotes too much of a request"
    return f"{status} {error['code']} {error['param']}"[:80]


def body(data: bytes) -> str:
    """The body of a chat or responses request, through the whole application with a stub of the engine."""
    _service().asks.clear()
    path = _RESPONSES if b'"input"' in data else _CHAT
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    outcome = _checked(*event_loop().run_until_complete(_asked("POST", path, b"", headers, data)))
    for ask in _service().asks:
        assert ask.picture is None or (isinstance(ask.picture, bytes) and ask.picture)
        texts = (ask.prompt if isinstance(ask.prompt, tuple) else (ask.prompt,)) + ask.task.continuations + ask.stop
        assert all(isinstance(text, str) for text in texts)
        assert ask.sampling.max_new_tokens >= 1
        assert 0 <= ask.sampling.temperature <= 2
    return outcome


def request(data: bytes) -> str:
    """Method, path, headers and body of any request, as on the wire."""
    head, _, content = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, target = first.decode("latin-1").partition(" ")
    path, _, query = target.partition("?")
    # Normalise what no HTTP server passes to an application.
    method = "".join(filter(str.isalpha, method)).upper()[:20] or "GET"
    path = "/" + path.lstrip("/")
    headers = []
    for line in lines[:50]:
        name, colon, value = line.partition(b":")
        if colon and name.strip().isascii():
            headers.append((name.strip().lower(), value.strip()))
    status, told, said = event_loop().run_until_complete(
        _asked(method, path, query.encode("latin-1"), headers, content)
    )
    if path.startswith("/v1/"):
        return _checked(status, told, said)
    assert status < 500, f"status {status}: {said[:300]!r}"
    return f"ok {status}"


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


def _bodies() -> dict[str, bytes]:
    parts = [{"type": "input_image", "image_url": EXAMPLE_PICTURE}, {"type": "input_text", "text": "What?"}]
    asked = {
        "plain": chat(),
        "all": chat(
            {"role": "system", "content": "Answer."},
            user(image(), "What?"),
            {"role": "assistant", "content": "Red.", "refusal": None},
            user("And the star?"),
            temperature=0.5, top_p=0.9, top_k=3, seed=1, stop=["."], max_tokens=5, user="u", n=1, logit_bias={},
        ),
        "stream": chat(stream=True, stream_options={"include_usage": True}),
        "choices": chat(answer_choices=["yes", "no"]),
        "schema": chat(response_format=json_schema({"red": {"type": "boolean"}, "shape": {"enum": ["star", "ring"]}})),
        "several": chat(user(image(), image(), "What?"), n=3, logprobs=True, min_p=0.1, metadata={"a": "b"}),
        "responses": {
            "model": "default",
            "input": [
                {"role": "system", "content": "Answer."},
                {"role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Red."}]},
                {"role": "user", "content": parts},
            ],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "boolean"}}},
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 5,
        },
        "responses-stream": {"model": "default", "input": "What?", "instructions": "Answer.", "stream": True},
    }  # fmt: skip
    return {name: json.dumps(content).encode() for name, content in asked.items()}


def _requests() -> dict[str, bytes]:
    head = b"host: localhost\ncontent-type: application/json\nauthorization: Bearer " + _KEY.encode()
    posted = f"POST {_CHAT}\n".encode() + head + b"\n\n" + json.dumps(chat()).encode()
    paths = words("/v1/models /v1/models/stub /health /ready /metrics /docs /openapi.json /v1/nothing /")
    return {"post": posted, **{f"get{path.replace('/', '-')}": f"GET {path}?a=b\n".encode() + head for path in paths}}


def _zips() -> dict[str, bytes]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a.png", "b/é.jpg", "../../c.gif", "notes.txt", ".hidden.png", "C:\\d.bmp", "a.PNG", "e.zip"):
            archive.writestr(zipfile.ZipInfo(name), name.encode() * 50)
    return {"small": packed.getvalue()}


_WORDS = (
    *words("model messages role content type text image_url url detail user system assistant default stream"),
    *words("stream_options include_usage temperature top_p top_k seed stop n tools max_tokens max_completion_tokens"),
    *words("answer_choices response_format logit_bias name unknown json_schema schema properties enum type $ref $defs"),
    *words("input input_text input_image output_text instructions text format include previous_response_id store"),
    *("data:image/png;base64,AAAA", "http://127.0.0.1/a.png", "file:///etc/passwd", "data:text/html;base64,AA=="),
    *(["a"] * 200, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
)
_as_body = mutated_json(*_WORDS)
_as_head = mutated_lines(
    mutated_bytes(
        *(b"GET ", b"POST ", b"OPTIONS ", b"HEAD ", b"PUT ", b"/v1/", b"/v1/models/", b"//", b"%2e%2e", b"?", b"*"),
        *(b"host: evil", b"host: localhost:1", b"content-type: text/plain", b"content-length: 99999999999"),
        *(b"origin: x", b"content-length: -1", b"transfer-encoding: chunked", b"expect: 100-continue"),
        *(b"authorization: Basic x", b"\xff"),
    )
)


def _mutate_request(data: bytes, random: Random) -> bytes:
    head, gap, content = data.partition(b"\n\n")
    if gap and random.random() < 0.4:
        return head + gap + _as_body(content, random)
    return _as_head(head, random) + gap + content


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
    Target("http-body", body, _bodies, _as_body, quick_rounds=100),
    Target("http-request", request, _requests, _mutate_request, quick_rounds=100),
    Target("picture-url", picture_url, lambda: _URLS, _mutate_url, quick_rounds=400, max_bytes=20_000),
    Target("upload-zip", upload_zip, _zips, _mutate_zip, max_bytes=2**17),
)
