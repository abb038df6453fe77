"""Decides which URLs may be fetched: URL parsing, allowed hosts, public addresses. Opens no connection."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import quote, urlsplit

from llama_adapter.runtime.errors import LlamaAdapterError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Scheme = Literal["http", "https"]

MAX_URL_LENGTH = 2048
DEFAULT_PORTS: dict[Scheme, int] = {"http": 80, "https": 443}

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9])?"
# The last label starts with a letter, so that no spelling of an IP address (127.1, 0x7f000001) is taken for a name.
_NAME = re.compile(rf"(?:{_LABEL}\.)*[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?")
_ENTRY = re.compile(r"(?:(?P<scheme>https?)://)?(?P<wildcard>\*\.)?(?P<host>[^/:@*]+)(?::(?P<port>[0-9]{1,5}))?")

# In addition to the networks that `ipaddress` treats as not global, which differ between Python versions.
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "192.0.0.0/24",
        "192.88.99.0/24",  # 6to4 relays
        "198.18.0.0/15",
        "168.63.129.16/32",  # Azure host services
        "2001::/23",  # Teredo and others
        "2001:db8::/32",
        "2002::/16",  # 6to4: contains an IPv4 address
        "3fff::/20",
    )
)
# Global unicast; excludes mapped, compatible and translated (NAT64) IPv4 addresses.
_PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")


class FetchError(LlamaAdapterError):
    """A URL is not allowed or malformed, or gives no picture. `code` is an error code of the HTTP API."""

    def __init__(self, message: str, *, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.http_status = code, status


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureUrl:
    """A picture's URL in parts. The request is built from these parts, so that it equals what was checked."""

    scheme: Scheme
    host: str  # lower case, a name
    port: int
    target: str  # path and query, in ASCII

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL. Raises FetchError unless it has the form http(s)://name[:port]/path."""
        if len(url) > MAX_URL_LENGTH:
            raise _refused(f"The picture's URL has {len(url)} characters, the limit is {MAX_URL_LENGTH}.")
        if re.search(r"[\x00-\x20\x7f\\]", url):
            raise _refused("The picture's URL has spaces, control characters or backslashes: percent-encode them.")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise _refused("The picture's URL is malformed: expected https://name/path.") from None
        if "@" in parts.netloc:
            raise _refused("The picture's URL must not have a user name or password.")
        scheme = next((known for known in DEFAULT_PORTS if known == parts.scheme), None)
        if scheme is None:
            raise _refused("The picture must be a data URI or an http(s) URL.")
        host = (parts.hostname or "").lower()
        if not _NAME.fullmatch(host) or len(host) > 253:
            raise _refused("The host of a picture's URL must be a name in ASCII.")
        path, query = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~"), quote(parts.query, safe="/%:@!$&'()*+,;=~?")
        target = f"{path}?{query}" if query else path
        return cls(scheme=scheme, host=host, port=DEFAULT_PORTS[scheme] if port is None else port, target=target)

    @property
    def authority(self) -> str:
        """Host and port for the Host header; the scheme's default port is left out."""
        return self.host if self.port == DEFAULT_PORTS[self.scheme] else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllowedHost:
    """One entry of the list of hosts from which pictures may be fetched."""

    scheme: Scheme
    host: str
    port: int
    is_wildcard: bool  # matches any name below the host, but not the host itself

    @classmethod
    def parse(cls, entry: str) -> Self:
        """Parse `example.com`, `example.com:8443`, `*.example.com` or one of these after `http://`.

        Raises ValueError.
        """
        match = _ENTRY.fullmatch(entry.strip().lower())
        host = match["host"] if match else ""
        if match is None or not _NAME.fullmatch(host):
            raise ValueError(
                f"A picture host is a name such as example.com, example.com:8443 or *.example.com, got {entry!r}"
            )
        if match["wildcard"] and "." not in host:
            raise ValueError(f"*.{host} is too broad: allow a part of it, such as *.example.{host}")
        scheme: Scheme = "http" if match["scheme"] == "http" else "https"
        port = int(match["port"] or DEFAULT_PORTS[scheme])
        if not 0 < port < 65536:
            raise ValueError(f"The port of {entry!r} must be from 1 to 65535")
        return cls(scheme=scheme, host=host, port=port, is_wildcard=bool(match["wildcard"]))

    def matches(self, url: PictureUrl) -> bool:
        """Whether this entry allows the URL: same scheme and port, and the host or a name below the wildcard."""
        is_host = url.host.endswith(f".{self.host}") if self.is_wildcard else url.host == self.host
        return is_host and (url.scheme, url.port) == (self.scheme, self.port)


def check_allowed(url: PictureUrl, *, allowed: Iterable[AllowedHost]) -> None:
    """Raise FetchError unless one of the entries allows the URL."""
    if not any(entry.matches(url) for entry in allowed):
        raise FetchError(
            "This server does not fetch pictures from this host: send the picture as a data URI.",
            code="image_host_not_allowed",
        )


def is_public(address: str) -> bool:
    """Whether `address` is a network address of the public internet."""
    try:
        parsed: IPAddress = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed not in _PUBLIC_IPV6:
        return False
    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved:
        return False
    return not any(parsed in network for network in _NOT_PUBLIC if network.version == parsed.version)


def too_large(size: str, *, max_bytes: int) -> FetchError:
    """The refusal of a picture file above `max_bytes`; `size` says how large it is."""
    message = f"The picture has {size}, the limit is {max_bytes:,} bytes."
    return FetchError(message, code="image_file_too_large", status=413)


def _refused(message: str) -> FetchError:
    return FetchError(message, code="invalid_image_url")
