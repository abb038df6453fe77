"""Middleware before the API: checks of host name, API key and body size. A refused request's body is never parsed.

This is plain ASGI for two reasons: FastAPI's security dependencies run only after the body was read, and Starlette's
TrustedHostMiddleware answers in plain text.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from llama_adapter.app.serving.http_api.access import VISIT
from llama_adapter.app.serving.http_api.bodies import BodyLimit, path_of, refuse
from llama_adapter.app.serving.http_api.errors import ApiError, of_status
from llama_adapter.runtime.given import require_above_zero

API_PREFIX: Final = "/v1/"
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
CLOSABLE: Final = {"docs": ("/docs", "/openapi.json"), "health": ("/health",), "metrics": ("/metrics",)}
_ORIGIN_SCHEMES: Final = ("https", "http", "app", "capacitor", "ionic", "tauri", "vscode-file")
_OF_PROGRAMS: Final = "[a-z-]+-(?:extension|webview)"  # schemes of pages inside browsers and editors
MAX_SEPARATORS: Final = 50_000  # commas and opening brackets in a body


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardSettings:
    """Limits and keys of the API. The defaults suit a server on a loopback address."""

    max_body_bytes: int = 48 * 2**20  # a picture of 32 MiB in base64, and the JSON around it
    max_bytes_under_way: int = 512 * 2**20  # the bodies of all unanswered requests
    body_timeout_s: float = 30.0  # from a request's head to the end of its body
    host_names: tuple[str, ...] | None = LOOPBACK_NAMES  # the server's own names; None: any
    api_keys: tuple[str, ...] = ()  # empty: no key is required
    key_names: tuple[str, ...] = ()  # names of the keys in the log; empty: they have none
    cors_origins: tuple[str, ...] = ()  # web pages that may use the API, such as https://example.com; *: any
    closed: tuple[str, ...] = ()  # names of `CLOSABLE`: their paths are answered with 404
    root_path: str = ""  # the path at which a proxy offers the server, such as /pictures

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.root_path):
            raise ValueError(f"A root path is /NAME, without a slash at its end, got {self.root_path!r}")
        require_above_zero(self, "max_body_bytes", "max_bytes_under_way", "body_timeout_s")
        if any(not re.fullmatch(r"[\x21-\x7e]{8,}", key) for key in self.api_keys):
            raise ValueError("An API key must have at least 8 characters, ASCII without spaces")
        for name in self.host_names or ():
            if not re.fullmatch(r"[^\s/:*]+|\[[0-9a-fA-F:.]+\]", name):
                raise ValueError(f"A host name is NAME or [ADDRESS], without a scheme, port, path or *, got {name!r}")
        for origin in self.cors_origins:
            if not re.fullmatch(rf"\*|({'|'.join(_ORIGIN_SCHEMES)}|{_OF_PROGRAMS})://[a-z0-9.\[\]:_-]+", origin):
                raise ValueError(
                    f"An origin is * or SCHEME://NAME[:PORT], where SCHEME is one of {', '.join(_ORIGIN_SCHEMES)} or "
                    f"ends in -extension or -webview, got {origin!r}"
                )


def host_names_for(bind: str, *, more: Iterable[str] = ()) -> tuple[str, ...] | None:
    """The host names to accept when listening at `bind`; None accepts any.

    On a loopback address these are its own names and `more`; on other addresses `more`, or any if `more` is empty. A
    foreign website can point its own name at a loopback address (DNS rebinding). The Host header then has that name.
    """
    more = tuple(name.lower() for name in more)
    if bind != "localhost" and not _is_loopback(bind.strip("[]")):
        return more or None
    return (*LOOPBACK_NAMES, *more)


def add_guards(app: Starlette, *, settings: GuardSettings, unread: Container[str] = ()) -> None:
    """Put the guards before `app`. They set `scope["state"]["client"]`, which identifies the client for fair queueing.

    `unread` are the paths whose bodies `app` reads and limits itself.
    """
    app.add_middleware(
        BodyLimit,
        prefix=API_PREFIX,
        max_bytes=settings.max_body_bytes,
        max_bytes_under_way=settings.max_bytes_under_way,
        timeout_s=settings.body_timeout_s,
        max_separators=MAX_SEPARATORS,
        unread=unread,
    )
    app.add_middleware(AccessGuard, settings=settings)  # before the limit
    if settings.cors_origins:
        app.add_middleware(ApiCors, origins=settings.cors_origins)  # runs first: a preflight has no key


class ApiCors:
    """Lets web pages of these origins use paths below /v1/ only: they cannot use a page at the root."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        self.app = app
        self._api = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,  # only the allowed origins get this answer
            expose_headers=("retry-after", "x-ignored-turns", "x-request-id"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and path_of(scope).startswith(API_PREFIX)
        await (self._api if is_api else self.app)(scope, receive, send)


def is_of_other_origin(scope: Scope) -> bool:
    """Whether a web page of another origin sent this request.

    Browsers tell it in the header Sec-Fetch-Site. To servers without TLS on other machines they send the header Origin
    only, whose host and port are compared with those of the request. Other clients send neither.
    """
    headers = Headers(scope=scope)
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and urlsplit(origin).netloc not in (headers.get("host"), headers.get("x-forwarded-host"))


class AccessGuard:
    """Answers 421 for a foreign host name, and 404 for closed paths. A foreign X-Forwarded-Host is left out.

    Below /v1/, it answers 401 without one of `api_keys` as bearer token.

    It answers 403 to a form of a web page of another origin, unless it is one of `cors_origins`: browsers send forms
    without asking the server before. JSON is sent only if `ApiCors` permits it.
    """

    def __init__(self, app: ASGIApp, *, settings: GuardSettings) -> None:
        self.app = app
        self._origins = settings.cors_origins
        self._closed = [path for name in settings.closed for path in CLOSABLE[name]]
        self._host_names = None if settings.host_names is None else {name.lower() for name in settings.host_names}
        key_names = settings.key_names or [""] * len(settings.api_keys)
        self._names = dict(zip(map(_digest, settings.api_keys), key_names, strict=True))  # digest of a key -> name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        if not self._is_own_name(headers.getlist("host")):
            message = "This server does not answer to this host name: use one of its own names, or its address."
            return await refuse(ApiError(message, status=421, code="host_not_allowed"), scope, receive, send)
        if path_of(scope) in self._closed:
            return await refuse(of_status(404), scope, receive, send)
        scope["headers"] = [
            (name, value)
            for name, value in scope["headers"]
            if name != b"x-forwarded-host" or self._is_own_name([value.decode("latin-1")])
        ]
        if self._is_foreign_form(scope):
            message = "Forms of web pages of other origins are refused: send JSON, or ask from an allowed origin."
            return await refuse(ApiError(message, status=403, code="origin_not_allowed"), scope, receive, send)
        client = _address_of(scope)
        if self._names and f"{path_of(scope)}/".startswith(API_PREFIX):
            given = headers.getlist("authorization")
            digest = self._matching_digest(given)
            if digest is None:
                problem = "The API key is not one of this server's" if given else "This server requires an API key"
                message = f"{problem}: send one as `Authorization: Bearer KEY`."
                asked = {"www-authenticate": "Bearer"}
                error = ApiError(message, status=401, code="invalid_api_key", headers=asked)
                return await refuse(error, scope, receive, send)
            client = f"key:{digest.hex()[:16]}"
            if (visit := scope.get(VISIT)) is not None:
                visit.key = self._names[digest]
        scope.setdefault("state", {})["client"] = client
        await self.app(scope, receive, send)

    def _is_own_name(self, hosts: Sequence[str]) -> bool:
        if self._host_names is None:
            return True
        return len(hosts) == 1 and re.sub(r":[0-9]*\Z", "", hosts[0].lower()) in self._host_names

    def _is_foreign_form(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        is_form = scope.get("method") == "POST" and "json" not in headers.get("content-type", "").partition(";")[0]
        is_allowed = "*" in self._origins or any(origin in self._origins for origin in headers.getlist("origin"))
        return is_form and not is_allowed and is_of_other_origin(scope)

    def _matching_digest(self, authorizations: Sequence[str]) -> bytes | None:
        """The digest of the key in the header, or None if it is not one of the server's keys."""
        kind, _, key = (authorizations[0] if len(authorizations) == 1 else "").partition(" ")
        given = _digest(key.strip())
        # Compares with every key in constant time.
        matches = [hmac.compare_digest(given, digest) for digest in self._names]
        return given if kind.lower() == "bearer" and any(matches) else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _address_of(scope: Scope) -> str:
    """The client's address. For IPv6 this is the /64 network: one machine can use any address of its network."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return "address:unknown"
    if isinstance(address, ipaddress.IPv6Address):
        return f"address:{address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False)}"
    return f"address:{address}"
