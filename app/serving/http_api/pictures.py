"""Reads the picture file that an `image_url` names: a data URI or a URL at an allowed host. Decodes no picture."""

import asyncio
from dataclasses import dataclass, field

from llama_adapter.app.pictures.inputs.data_uris import is_data_uri, read_data_uri
from llama_adapter.app.pictures.inputs.urls import AllowedHost, FetchError, PictureUrl, check_allowed
from llama_adapter.app.serving.http_api.errors import PictureRefusedError
from llama_adapter.runtime.given import require_above_zero, require_least


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSettings:
    """Limits of a request's picture. Raises ValueError for bad numbers and hosts."""

    max_picture_bytes: int
    allowed_hosts: tuple[str, ...] = ()  # hosts to fetch pictures from, in the form of `AllowedHost.parse`
    fetch_timeout_s: float = 10.0  # from the first name lookup to the last byte
    allowed: tuple[AllowedHost, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_least(self, "max_picture_bytes")
        require_above_zero(self, "fetch_timeout_s")
        object.__setattr__(self, "allowed", tuple(AllowedHost.parse(entry) for entry in self.allowed_hosts))


async def read_picture(url: str, *, settings: PictureSettings) -> bytes:
    """The picture file of a data URI or a URL at an allowed host. Raises PictureRefusedError for all other URLs."""
    max_bytes = settings.max_picture_bytes
    try:
        if is_data_uri(url):
            # In a thread: decoding a few megabytes takes milliseconds.
            return await asyncio.to_thread(read_data_uri, url, max_bytes=max_bytes)
        if url[:10].partition(":")[0].lower() not in ("http", "https"):
            message = "The picture must be a data URI (data:image/png;base64,...) or an http(s) URL."
            raise PictureRefusedError(message, code="invalid_image_url")
        remote = PictureUrl.parse(url)
        check_allowed(remote, allowed=settings.allowed)
        from llama_adapter.app.pictures.inputs.fetching import fetch_picture  # other servers need no HTTP client

        return await fetch_picture(
            remote, allowed=settings.allowed, max_bytes=max_bytes, timeout_s=settings.fetch_timeout_s
        )
    except FetchError as error:
        raise PictureRefusedError(error.message, code=error.code, status=error.http_status) from None
