"""Findings: one per place in the code that raises an exception, with a minimised input."""

import hashlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.target import Target

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    """An input that violates a property. Findings with equal signatures count as the same bug."""

    target: str
    signature: str
    data: bytes
    told: str  # the traceback, or what is known about the end of the process

    def save(self, folder: Path) -> Path:
        """Write the input, the traceback and the replay command; returns the path of the input."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.target}-{hashlib.sha256(self.signature.encode()).hexdigest()[:10]}"
        path.write_bytes(self.data)
        command = f"python -m tests.fuzz replay {self.target} {path}"
        path.with_name(path.name + ".txt").write_text(
            f"{self.signature}\n\n{command}\n\n{self.told}\n", errors="replace"
        )
        return path


def finding_of(target: Target, data: bytes) -> tuple[Finding | None, str]:
    """Run one input; returns a finding or None, and the outcome."""
    try:
        return None, target.run(data)
    except Exception as error:
        return Finding(target.name, signature_of(error), data, _told(error)), ""


def signature_of(error: BaseException) -> str:
    """The type of the exception and the innermost frame in this repository."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT) and ".venv" not in frame.filename]
    place = own[-1] if own else frames[-1]
    name = Path(place.filename).relative_to(_ROOT) if own else Path(place.filename).name
    return f"{type(error).__name__} in {name}:{place.name}: {place.line}"


def _told(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error, limit=-12))
    return text if len(text) < 8_000 else f"{text[:5_000]}\n...\n{text[-2_500:]}"


def minimised(finding: Finding, target: Target, *, limit_s: float) -> Finding:
    """The same finding with a smaller input: removes pieces, largest first, as long as the signature stays the same."""
    ends_at = time.monotonic() + limit_s

    def still_shows(data: bytes) -> bool:
        found, _ = finding_of(target, data)
        return found is not None and found.signature == finding.signature

    data = _shrunk(finding.data, still_shows, ends_at=ends_at)
    smallest, _ = finding_of(target, data)
    return smallest if smallest is not None and smallest.signature == finding.signature else finding


def _shrunk(data: bytes, still_shows: Callable[[bytes], bool], *, ends_at: float) -> bytes:
    length = max(1, len(data) // 2)
    while True:
        at, is_shorter = 0, False
        while at < len(data):
            if time.monotonic() > ends_at:
                return data
            less = data[:at] + data[at + length :]
            if still_shows(less):
                data, is_shorter = less, True
            else:
                at += length
        if length == 1 and not is_shorter:
            return data
        length = max(1, length // 2)
