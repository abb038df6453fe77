"""Fetches pictures from allowed hosts. Every redirect is checked, and connections go only to checked addresses.

httpcore itself follows no redirects, decodes no content, and uses no proxies, cookies or passwords.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from urllib.parse import urljoin

import httpcore

from llama_adapter.app.pictures.inputs.urls import (
    AllowedHost,
    FetchError,
    PictureUrl,
    check_allowed,
    is_public,
    too_large,
)

MAX_REDIRECTS = 3
MAX_FETCHES = 8  # at once; each holds at most one picture in memory
MAX_ADDRESSES = 4  # tried per host name

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # (host name, port) -> network addresses

_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = ((b"accept", b"image/*"), (b"accept-encoding", b"identity"), (b"user-agent", b"llama-adapter"))
_TIMEOUTS = {"timeout": {"connect": 3.0}}  # seconds per address, so that there is time for the next one
# Separate from the event loop's threads, which decode requests: a name lookup that hangs must not block those.
_RESOLVING = ThreadPoolExecutor(max_workers=4, thread_name_prefix="resolve-name")
_turns = asyncio.Semaphore(MAX_FETCHES)


async def resolve_name(host: str, port: int) -> list[str]:
    """The network addresses of a host name. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.run_in_executor(_RESOLVING, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


_default_ssl_context = cache(httpcore.default_ssl_context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How host names become connections; tests replace it."""

    resolve: Resolve = resolve_name
    is_allowed: Callable[[str], bool] = is_public  # by address
    ssl_context: Callable[[], ssl.SSLContext] = _default_ssl_context


async def fetch_picture(
    url: PictureUrl,
    *,
    allowed: Iterable[AllowedHost],
    max_bytes: int,
    timeout_s: float,
    network: Network | None = None,
    turns: AbstractAsyncContextManager[object] = _turns,
) -> bytes:
    """Download a picture of at most `max_bytes`. `timeout_s` limits the total time, including the wait for `turns`.

    Raises FetchError for a host or an address that is not allowed (also after a redirect), for a response that is not a
    picture, and for network errors.
    """
    allowed = tuple(allowed)
    network = network or Network()
    try:
        async with asyncio.timeout(timeout_s), turns:
            context = await asyncio.to_thread(network.ssl_context)
            backend = _CheckedBackend(network)
            async with httpcore.AsyncConnectionPool(
                ssl_context=context, max_keepalive_connections=0, network_backend=backend
            ) as pool:
                return await _follow(pool, url, allowed=allowed, max_bytes=max_bytes)
    except TimeoutError:
        raise _failed(f"did not arrive within {timeout_s:g} seconds") from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
        raise _failed("could not be downloaded: network error") from None


def fetch_in_thread(url: PictureUrl, *, allowed: Iterable[AllowedHost], max_bytes: int, timeout_s: float) -> bytes:
    """As `fetch_picture`, for a thread without an event loop. Only the number of threads limits concurrent fetches."""
    # `_turns` is not used, because a semaphore belongs to one event loop.
    fetched = fetch_picture(url, allowed=allowed, max_bytes=max_bytes, timeout_s=timeout_s, turns=nullcontext())
    return asyncio.run(fetched)


async def _follow(
    pool: httpcore.AsyncConnectionPool, url: PictureUrl, *, allowed: tuple[AllowedHost, ...], max_bytes: int
) -> bytes:
    for _ in range(1 + MAX_REDIRECTS):
        check_allowed(url, allowed=allowed)
        # Built from the checked parts, so that no second parser can interpret the URL differently.
        target = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        headers = [(b"host", url.authority.encode("ascii")), *_HEADERS]
        async with pool.stream("GET", target, headers=headers, extensions=_TIMEOUTS) as response:
            location = _header(response, b"location")
            if response.status not in _REDIRECTS or location is None:
                return await _read_body(response, max_bytes=max_bytes)
        url = PictureUrl.parse(urljoin(str(url), location))
    raise _failed(f"has more than {MAX_REDIRECTS} redirects")


async def _read_body(response: httpcore.Response, *, max_bytes: int) -> bytes:
    if response.status != 200:
        raise _failed(f"was answered with status {response.status}")
    media_type = (_header(response, b"content-type") or "").partition(";")[0].strip().lower()
    if not media_type.startswith("image/"):
        raise FetchError("The content type of this URL is not image/....", code="unsupported_image_media_type")
    if (_header(response, b"content-encoding") or "identity").strip().lower() != "identity":
        raise _failed("has a content encoding")
    announced = _header(response, b"content-length")
    if announced is not None and announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise too_large(f"{int(announced[:20]):,} bytes", max_bytes=max_bytes)
    body = bytearray()
    async for chunk in response.aiter_stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large("more", max_bytes=max_bytes)
    if not body:
        raise FetchError("The picture is empty.", code="empty_image_file")
    return bytes(body)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Resolves a name once, checks all its addresses, and connects only to those."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._plain = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await self._network.resolve(host, port)
        except (OSError, UnicodeError):
            raise httpcore.ConnectError("no address") from None
        # A single private address is enough to refuse the host, because any of its addresses might be used.
        if not addresses or not all(map(self._network.is_allowed, addresses)):
            raise FetchError("The picture's host is not on the public internet.", code="image_host_not_allowed")
        tried = addresses[:MAX_ADDRESSES]
        for address in tried[:-1]:
            try:
                return await self._plain.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._plain.connect_tcp(tried[-1], port, timeout, local_address, socket_options)


def _header(response: httpcore.Response, name: bytes) -> str | None:
    values = [value for key, value in response.headers if key.lower() == name]
    return values[0].decode("latin-1") if values else None


def _failed(what: str) -> FetchError:
    return FetchError(f"The picture at this URL {what}.", code="failed_to_download_image")
