"""Refused requests never reach the application, get OpenAI's error envelope, and leave nothing behind."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from llama_adapter.app.serving.http_api.bodies import BodyLimit
from llama_adapter.app.serving.http_api.guards import AccessGuard, GuardSettings, add_guards, host_names_for
from tests.app.serving.http_api.asgi import Application, Client
from tests.app.serving.http_api.requests import CHAT

KEY = "a-key-of-this-server"


def access(app: ASGIApp, **settings: Any) -> AccessGuard:
    return AccessGuard(app, settings=GuardSettings(**settings))


def limited(app: ASGIApp, *, max_bytes: int = 100, under_way: int = 1000, timeout_s: float = 20.0) -> BodyLimit:
    limits = {"max_bytes": max_bytes, "max_bytes_under_way": under_way, "max_separators": 10}
    return BodyLimit(app, prefix="/v1/", timeout_s=timeout_s, **limits)


# Bodies


@pytest.mark.parametrize("pieces", [(b"",), (b"a" * 100,), (b"a" * 50, b"b" * 50), (b"a", b"", b"c"), (b"", b"a")])
def test_a_body_within_the_limit_reaches_the_application_whole(pieces: Sequence[bytes]) -> None:
    app = Application()

    assert Client(*pieces).ask(limited(app)).status == 200
    assert app.bodies == [b"".join(pieces)]
    assert Client(b"a" * 101, path="/gradio_api/upload").ask(limited(app)).status == 200, "another path"


EXPECTING = {"expect": "100-continue"}


@pytest.mark.parametrize(
    ("pieces", "headers", "code", "num_received", "is_closed"),
    [
        ((b"a" * 101,), {"content_length": "101", **EXPECTING}, "request_too_large", 0, True),
        ((b"a" * 60, b"a" * 60), {"transfer_encoding": "chunked"}, "request_too_large", 2, False),
        *(
            ((b"a" * 101,), {"content_length": lie}, "request_too_large", 1, False)
            for lie in ("", "5", "-1", "abc", "1" * 5000)
        ),
        ((b"[" * 6, b'{"' * 6, b"a"), {"content_length": "19", **EXPECTING}, "request_too_complex", 2, True),
        ([b"a" * 1000] * 20, {"content_length": "20000"}, "request_too_large", 20, True),  # discarded
    ],
)
def test_a_body_above_a_limit_is_refused_and_the_connection_is_closed_if_bytes_are_unread(
    pieces: Sequence[bytes], headers: dict[str, str], code: str, num_received: int, is_closed: bool
) -> None:
    app = Application()
    client = Client(*pieces, **headers).ask(limited(app))

    assert (client.status, client.error["code"]) == (413 if code == "request_too_large" else 400, code)
    assert (client.num_received, client.headers.get("connection")) == (num_received, "close" if is_closed else None)
    assert not is_closed or [message.get("more_body") for message in client.sent[1:]] == [True, False]
    assert app.bodies == []


@pytest.mark.parametrize(("pieces", "hangs_up"), [((), False), ((b"begun",), False), ((b"begun",), True)])
def test_a_body_that_does_not_end_is_given_up_and_nobody_is_answered_who_has_hung_up(
    pieces: Sequence[bytes], hangs_up: bool
) -> None:
    app = Application()
    client = Client(*pieces, is_whole=False, hangs_up=hangs_up, content_length="50").ask(limited(app, timeout_s=0.02))

    assert app.bodies == []
    if hangs_up:
        assert client.sent == []
    else:
        assert (client.status, client.error["code"]) == (408, "request_timeout")


def test_the_application_hears_of_a_disconnect_after_the_body() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([(await receive())["type"] for _ in range(3)])

    Client(b"a", b"b", hangs_up=True).ask(limited(app))

    assert heard == ["http.request", "http.request", "http.disconnect"]


def test_bodies_under_way_together_are_bounded_and_their_room_is_given_back() -> None:
    async def run() -> list[Client]:
        begun, may_end = asyncio.Event(), asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            begun.set()
            await may_end.wait()
            await Application()(scope, receive, send)

        app = limited(slow, under_way=150)
        first, second, third = (Client(b"a" * 90), Client(b"b" * 90), Client(b"c" * 90))
        task = asyncio.create_task(first.asking(app))
        await begun.wait()
        async with asyncio.timeout(20):
            await second.asking(app)
        may_end.set()
        await task
        await third.asking(app)
        return [first, second, third]

    first, second, third = asyncio.run(run())

    assert [first.status, second.status, third.status] == [200, 503, 200]
    assert second.error["type"] == "server_error"
    assert int(second.headers["retry-after"]) >= 1


def test_room_is_given_back_whatever_happens() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a fault")

    app = limited(fail, under_way=100, timeout_s=0.02)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="a fault"):
            Client(b"a" * 90).ask(app)
        Client(b"a" * 90, is_whole=False, hangs_up=True).ask(app)
        assert Client(b"a" * 90, is_whole=False, content_length="95").ask(app).status == 408
    app.app = Application()

    assert Client(b"a" * 90).ask(app).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate, gzip", "x", "identity, gzip"])
def test_a_compressed_body_is_refused(encoding: str) -> None:
    app = Application()
    for path in (CHAT, "/v1/files"):
        client = Client(b"a" * 9, path=path, content_encoding=encoding).ask(
            BodyLimit(
                app,
                prefix="/v1/",
                unread=("/v1/files",),
                max_bytes=9,
                max_bytes_under_way=9,
                timeout_s=9.0,
                max_separators=9,
            )
        )

        assert (client.status, client.error["code"]) == (415, "unsupported_encoding")
        assert "Content-Encoding" in client.error["message"]
        assert client.headers["accept-encoding"] == "identity"
    assert app.bodies == []
    assert Client(b"a", content_encoding="identity").ask(limited(app)).status == 200


# Host names


@pytest.mark.parametrize(
    "host",
    ["", "evil.test", "evil.test:8000", "localhost.evil.test", "127.0.0.1.evil.test", "127.0.0.2", "[::2]", "::1"],
)
@pytest.mark.parametrize("path", ["/", "/metrics", CHAT])
def test_a_loopback_server_answers_to_no_other_name(host: str, path: str) -> None:
    app = Application()
    client = Client(host=host, path=path).ask(access(app, host_names=host_names_for("localhost")))

    assert client.status == 421
    assert client.error["code"] == "host_not_allowed"
    assert app.bodies == []
    two_hosts = Client()
    two_hosts.scope["headers"].append((b"host", host.encode()))
    assert two_hosts.ask(access(app)).status == 421
    socket = Client(kind="websocket", host=host).ask(access(app))
    assert [message["type"] for message in socket.sent] == ["websocket.close"]


@pytest.mark.parametrize(
    ("forwarded", "names", "status"),
    [
        ("pictures.example", ("localhost", "pictures.example"), 200),
        ("pictures.example", None, 200),
        ("pictures.example", ("localhost",), 403),
        ("", ("localhost", "pictures.example"), 403),
    ],
)
def test_a_forwarded_host_counts_if_it_is_a_name_of_the_server(
    forwarded: str, names: tuple[str, ...] | None, status: int
) -> None:
    app = access(Application(), host_names=names)
    form = {"content_type": "multipart/form-data; boundary=x", "origin": "http://pictures.example"}
    client = Client(path="/gradio_api/upload", x_forwarded_host=forwarded, **form).ask(app)

    assert client.status == status
    left = [value.decode() for name, value in client.scope["headers"] if name == b"x-forwarded-host"]
    assert left == ([forwarded] if status == 200 else [])


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/metrics"])
def test_closed_paths_are_not_found(path: str) -> None:
    app = Starlette()
    app.mount("/", Application())
    add_guards(app, settings=GuardSettings(closed=("docs", "metrics")))

    assert Client(path=path, method="GET").ask(app).status == 404
    assert Client(path="/health", method="GET").ask(app).status == 200


def test_a_server_answers_to_its_own_names_and_to_added_ones() -> None:
    own = access(Application(), host_names=host_names_for("127.0.0.1"))
    for host in ("localhost", "localhost:8000", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
        assert Client(host=host).ask(own).status == 200
    assert host_names_for("0.0.0.0") is None
    assert host_names_for("192.168.1.5", more=["Pictures.Example"]) == ("pictures.example",)
    assert "pictures.example" in (host_names_for("::1", more=["Pictures.Example"]) or ())
    assert Client(host="anything").ask(access(Application(), host_names=None)).status == 200


# Keys, and the owner of a request


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY}"])
def test_a_key_opens_the_api(authorization: str) -> None:
    app = access(Application(), api_keys=("another-key", KEY))

    assert Client(authorization=authorization).ask(app).status == 200
    for path in ("/health", "/ready", "/metrics", "/docs", "/v10", "/"):
        assert Client(path=path).ask(app).status == 200


@pytest.mark.parametrize(
    "authorization",
    ["", KEY, "Bearer ", f"Basic {KEY}", f"Bearer {KEY[:-1]}", f"Bearer {KEY.upper()}", "Bearer ä"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/unknown", "/v1"])
def test_nothing_else_opens_it(authorization: str, path: str) -> None:
    app = Application()
    client = Client(authorization=authorization, path=path).ask(access(app, api_keys=(KEY,)))

    assert client.status == 401
    assert client.headers["www-authenticate"] == "Bearer"
    assert client.error["code"] == "invalid_api_key"
    problem = "The API key is not one of this server's:" if authorization else "This server requires an API key:"
    assert client.error["message"].startswith(problem)
    assert KEY not in json.dumps(client.error)
    assert app.bodies == []
    two_keys = Client(path=path, authorization=f"Bearer {KEY}")
    two_keys.scope["headers"].append((b"authorization", authorization.encode()))
    assert two_keys.ask(access(app, api_keys=(KEY,))).status == 401


def test_clients_are_told_apart_by_key_and_the_key_is_not_to_be_seen() -> None:
    app = Application()
    for key in (KEY, KEY, "another-key"):
        Client(authorization=f"Bearer {key}").ask(access(app, api_keys=(KEY, "another-key")))

    first, again, other = app.clients
    assert (first == again, first == other, KEY in first) == (True, False, False)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
    ],
)
def test_clients_without_a_key_are_told_apart_by_their_network(one: str, other: str, is_same: bool) -> None:
    app = Application()
    for address in (one, other):
        Client(client=(address, 5000)).ask(access(app))

    assert (app.clients[0] == app.clients[1]) is is_same
    assert Client(client=None).ask(access(app)).status == 200


# Pages of other sites

ORIGIN = "https://a.example"


def preflight(*, path: str = CHAT, origin: str = ORIGIN) -> Client:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,x-stainless-os"}
    return Client(method="OPTIONS", path=path, origin=origin, content_type="", **asked)


def guarded(*origins: str) -> Starlette:
    app = Starlette()
    app.mount("/", Application())
    add_guards(app, settings=GuardSettings(api_keys=(KEY,), cors_origins=origins))
    return app


OTHER_ORIGINS = (
    *("http://localhost:3000", "app://obsidian.md", "capacitor://localhost", "ionic://localhost", "tauri://localhost"),
    *("vscode-file://vscode-app", "chrome-extension://abc", "vscode-webview://a-b"),
)


@pytest.mark.parametrize("is_private", [False, True])  # whether a page of a public network asks into a private one
@pytest.mark.parametrize(
    ("fields", "origins", "status", "is_allowed"),
    [
        ({}, (ORIGIN, *OTHER_ORIGINS), 200, True),
        ({"origin": "app://obsidian.md"}, (ORIGIN, "app://obsidian.md"), 200, True),
        ({"origin": "app://b"}, (ORIGIN, "app://a"), 400, False),
        ({"origin": "https://b.example"}, (ORIGIN,), 400, False),
        ({"path": "/gradio_api/upload"}, (ORIGIN, "*"), 200, False),  # the application's answer
        ({}, (), 401, False),
    ],
)
def test_pages_of_allowed_origins_may_ask_the_api_and_no_others(
    fields: dict[str, str], origins: tuple[str, ...], status: int, is_allowed: bool, is_private: bool
) -> None:
    client = preflight(**fields)
    if is_private:
        client.scope["headers"].append((b"access-control-request-private-network", b"true"))
    headers = client.ask(guarded(*origins)).headers

    assert client.status == status
    assert headers.get("access-control-allow-origin") == (fields.get("origin", ORIGIN) if is_allowed else None)
    if is_allowed:
        assert headers["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert headers.get("access-control-allow-private-network") == ("true" if is_private else None)


@pytest.mark.parametrize("origin", [ORIGIN, "app://obsidian.md"])
def test_a_page_of_an_allowed_origin_may_read_why_it_is_refused(origin: str) -> None:
    refused = Client(origin=origin).ask(guarded(origin))

    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, origin)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://b.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"origin": ORIGIN}, 200),
        ({"origin": ORIGIN, "sec_fetch_site": "cross-site"}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({}, 200),
    ],
)
def test_a_form_on_a_page_of_another_origin_is_refused(headers: dict[str, str], status: int) -> None:
    app = access(Application(), cors_origins=(ORIGIN,))
    form = {"path": "/v1/files", "content_type": "multipart/form-data; boundary=json"}

    assert Client(**form, **headers).ask(app).status == status
    empty = Client(**form)
    empty.scope["headers"].append((b"origin", b""))
    assert empty.ask(app).status == 403


# All together


def test_guards_stand_in_order_before_the_application() -> None:
    app = Starlette()
    app.mount("/v1", Application())
    add_guards(app, settings=GuardSettings(max_body_bytes=10, api_keys=(KEY,)))
    key = {"authorization": f"Bearer {KEY}"}

    assert Client(b"a" * 11, host="evil.test", content_type="").ask(app).status == 421
    assert Client(b"a" * 11, content_type="").ask(app).status == 401
    assert Client(b"a" * 11, **key).ask(app).status == 413
    assert Client(b"a" * 10, **key).ask(app).status == 200


@pytest.mark.parametrize(
    "change",
    [
        {"api_keys": ("",)},
        {"api_keys": ("with a space",)},
        {"host_names": ("https://a.example",)},
        {"host_names": ("a.example:8000",)},
        {"host_names": ("::1",)},
        {"host_names": ("*",)},
        {"host_names": ("*.example",)},
        {"cors_origins": ("a.example",)},
        {"cors_origins": ("https://a.example/",)},
        {"cors_origins": ("app://",)},
        {"cors_origins": ("htps://a.example",)},
        {"cors_origins": ("javascript://a",)},
        {"max_body_bytes": 0},
        {"body_timeout_s": 0.0},
        {"root_path": "pictures"},
        {"root_path": "/pictures/"},
        {"root_path": "/a?b"},
    ],
)
def test_invalid_settings_raise(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"API key|host name|origin|above 0|root path"):
        GuardSettings(**change)
