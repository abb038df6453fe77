"""What stands before the API: which host names, keys, kinds and sizes of requests get to it. Knows nothing of pictures.

Plain ASGI, so that a refused body is never read by the application.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from llama_adapter.app.http_api.bodies import BodyLimit, Refusal, has_body, refuse

API_PREFIX: Final = "/v1/"
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardSettings:
    """What gets to the API. The default is what a server on a loopback address wants."""

    max_body_bytes: int = 48 * 2**20  # a picture of 32 MiB in base64, and what is around it
    max_bytes_under_way: int = 512 * 2**20  # of the bodies of all requests that are not answered
    body_timeout_s: float = 30.0  # from a request's head to the end of its body
    host_names: tuple[str, ...] | None = LOOPBACK_NAMES  # that the server answers to; None: to any
    api_keys: tuple[str, ...] = ()  # none: everybody may ask

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_bytes_under_way", "body_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if any(not re.fullmatch(r"[\x21-\x7e]{8,}", key) for key in self.api_keys):
            raise ValueError("An API key has at least 8 characters, of ASCII and without spaces")


def host_names_for(bind: str, *, more: Iterable[str] = ()) -> tuple[str, ...] | None:
    """Names to answer to when listening at `bind`: a loopback address's own and `more`; None, any, elsewhere.

    Pages of other sites can have a name of theirs point at a loopback address; such a request is told by its name.
    """
    more = tuple(name.lower() for name in more)
    if bind != "localhost" and not _is_loopback(bind.strip("[]")):
        return more or None
    return (*LOOPBACK_NAMES, *more)


def add_guards(app: Starlette, *, settings: GuardSettings) -> None:
    """Put all guards before `app`. `scope["state"]["client"]` then says whose a request is, for taking turns."""
    # The last one added is the first one asked.
    app.add_middleware(
        BodyLimit,
        prefix=API_PREFIX,
        max_bytes=settings.max_body_bytes,
        max_bytes_under_way=settings.max_bytes_under_way,
        timeout_s=settings.body_timeout_s,
    )
    app.add_middleware(JsonOnly)
    app.add_middleware(ApiKey, keys=settings.api_keys)
    app.add_middleware(HostCheck, names=settings.host_names)


class HostCheck:
    """Answers only to names of its own: 421 for others, so that no foreign page reaches a local server by its name."""

    def __init__(self, app: ASGIApp, *, names: Sequence[str] | None) -> None:
        self.app = app
        self._names = None if names is None else frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._names is None or self._is_own(scope):
            return await self.app(scope, receive, send)
        refusal = Refusal(
            status=421,
            code="host_not_allowed",
            message="This server does not answer to the host name of this request. Ask it by its own address, "
            "or have it started with the name.",
        )
        await refuse(refusal, scope, receive, send)

    def _is_own(self, scope: Scope) -> bool:
        assert self._names is not None
        hosts = _headers(scope, b"host")
        return len(hosts) == 1 and _without_port(hosts[0].lower()) in self._names


class ApiKey:
    """Asks for `Authorization: Bearer KEY` under /v1/ when there are keys, and says whose a request is."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        client = _address_of(scope)
        if self._digests and _is_api(scope):
            digest = self._given(scope)
            if digest is None:
                refusal = Refusal(
                    status=401,
                    code="invalid_api_key",
                    kind="authentication_error",
                    message="A key of this server is needed: send it as `Authorization: Bearer KEY`.",
                    headers=((b"www-authenticate", b"Bearer"),),
                )
                return await refuse(refusal, scope, receive, send)
            client = f"key:{digest.hex()[:16]}"
        scope.setdefault("state", {})["client"] = client
        await self.app(scope, receive, send)

    def _given(self, scope: Scope) -> bytes | None:
        """The digest of the key that came, if it is one of ours."""
        values = _headers(scope, b"authorization")
        kind, _, key = (values[0] if len(values) == 1 else "").partition(" ")
        given = _digest(key.strip())
        # All are compared, each in a time that does not depend on where it differs.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given if kind.lower() == "bearer" and any(matches) else None


class JsonOnly:
    """Takes only application/json under /v1/: 415 for what a page of another site can send without asking first."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_api(scope) or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self.app(scope, receive, send)
        kinds = [value.partition(";")[0].strip().lower() for value in _headers(scope, b"content-type")]
        # A body or not, a POST without a type is what a foreign page's `fetch` may send.
        if kinds == ["application/json"] or (scope["method"] != "POST" and not has_body(scope)):
            return await self.app(scope, receive, send)
        refusal = Refusal(
            status=415,
            code="unsupported_media_type",
            message="The body of a request is JSON: send it with `Content-Type: application/json`.",
        )
        await refuse(refusal, scope, receive, send)


def _is_api(scope: Scope) -> bool:
    return (str(scope["path"]) + "/").startswith(API_PREFIX)


def _headers(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]*\Z", "", host)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _address_of(scope: Scope) -> str:
    """Whose a request is, by its address: of IPv6 the network, since one machine has as many addresses as it likes."""
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return "address:unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return f"address:{address.ipv4_mapped}"
        return f"address:{ipaddress.ip_network((int(address), 64), strict=False)}"
    return f"address:{address}"
