"""What the sources of weights have in common: one file at an address, or the files of a repository."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_adapter.runtime.errors import LlamaAdapterError


class DownloadError(LlamaAdapterError):
    """Weights that could not be fetched, or are not what their authors published."""

    default_hint = "check the network, and run the command again: it goes on where it ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """What is to be fetched of a source. What its server does not say is None or ""."""

    bytes: int | None
    licence: str = ""
    asks: bool = False  # whether access must be asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A file of a source, and its fault; "" if it has the published digest."""

    path: Path
    fault: str


def http_client() -> Any:
    """The HTTP client of `huggingface_hub`, which obeys the usual variables. Raises DownloadError if it cannot."""
    from huggingface_hub import get_session

    try:
        return get_session()
    except Exception as error:  # of httpx, of ssl, or for a missing package
        hint = "look at ALL_PROXY, HTTPS_PROXY, HTTP_PROXY and SSL_CERT_FILE; SOCKS needs `pip install 'httpx[socks]'`"
        raise DownloadError(f"The HTTP client cannot be made: {error}", hint=hint) from error


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise DownloadError if the disk of a folder, which need not exist, has less space than that."""
    place = next(one for one in (folder, *folder.parents) if one.is_dir())
    free = shutil.disk_usage(place).free
    if num_bytes > free:
        raise DownloadError(
            f"{shown_bytes(num_bytes)} are to be fetched into `{folder}`, and its disk has {shown_bytes(free)} free",
            hint="make room, or name other folders with HF_HOME and XDG_CACHE_HOME",
        )


def shown_bytes(num_bytes: int | None) -> str:
    """A size for people, such as `13.5 GB`."""
    if num_bytes is None:
        return "of unknown size"
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
