"""Brings weights onto this machine, with the user's consent."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from llama_adapter.app.models.named.catalogue import Part, read_catalogue
from llama_adapter.app.models.named.hub_source import CACHED, HubSource
from llama_adapter.app.models.named.source import require_space, shown_bytes
from llama_adapter.runtime.errors import LlamaAdapterError, UsageError
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import shown_text

# yes: given on the command line; ask: on a terminal, a question is asked; no: nothing is fetched.
Consent = Literal["yes", "ask", "no"]


def terms(paths: Iterable[object]) -> str:
    """Names, licences and pages of the weights at these paths, as far as the catalogue or the Hub's cache tell."""
    told = []
    for path in (path for path in paths if isinstance(path, str)):
        folders = Path(path).parts
        cached = next((name for name in folders if name.startswith(CACHED)), "")
        repo = cached.removeprefix(CACHED).replace("--", "/", 1)
        parts = [part for entries in read_catalogue().values() for part in entries.values()]
        meant = (one for one in parts if one.is_at(repo=repo, file=folders[-1]))
        if (part := next(meant, None)) is not None:
            told.append(f"{part.name}: {part.licence}, {part.home}")
        elif repo:
            told.append(HubSource(repo=repo).page)
    return "; ".join(told)


def obtain(wanted: Mapping[str, Part], *, name: str, consent: Consent, tell: Callable[[str], None]) -> dict[str, Path]:
    """The path of each of the weights, by its role; what is missing is fetched if the user consents.

    `name` is what the user asked for. `tell` gets lines on what is done. Raises UsageError without consent, and
    DownloadError and OSError.
    """
    found = {role: weights.source.here() for role, weights in wanted.items()}
    absent = {role: weights for role, weights in wanted.items() if found[role] is None}
    if absent:
        _require_consent(list(absent.items()), name=name, consent=consent, tell=tell)
    fetched = {role: weights.source.fetch(tell=tell) for role, weights in absent.items()}
    return {role: path for role, path in found.items() if path is not None} | fetched


def _require_consent(
    absent: Sequence[tuple[str, Part]], *, name: str, consent: Consent, tell: Callable[[str], None]
) -> None:
    can_ask = consent == "ask" and sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    if consent != "yes" and not can_ask:
        size = shown_bytes(_sum([weights.bytes for _, weights in absent]))
        titles = "; ".join(weights.title for _, weights in absent)
        raise UsageError(
            f"`{shown_text(name)}` is not on this machine ({size}): {titles}",
            hint=f"`llama-adapter get {shown_text(name)}` shows licences and fetches it; --yes answers the question",
        )
    show = tell if consent == "yes" else say  # a question always shows what it is about
    lines, sizes = [], dict[Path, list[int | None]]()
    for role, weights in absent:
        missing = weights.source.missing()
        sizes.setdefault(weights.source.folder(), []).append(missing.bytes)
        licence = weights.licence or missing.licence or "licence"
        asks = ", access must be asked for there" if weights.asks or missing.asks else ""
        lines.append(f"  {role:8}{shown_bytes(missing.bytes):>10}  {weights.title}; {licence}: {weights.home}{asks}")
    for line in (f"{name} is not on this machine. To fetch:", *lines):
        show(shown_text(line))
    for folder, several in sizes.items():
        total = _sum(several)
        show(shown_text(f"{shown_bytes(total)} into {folder}"))
        require_space(folder, total or 0)
    if consent == "yes":
        return
    say("Fetch it? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise LlamaAdapterError(f"Nothing was fetched, so there is no `{shown_text(name)}`")


def _sum(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
