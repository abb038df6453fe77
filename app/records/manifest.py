"""The circumstances of the runs that wrote into a file of answers, in a file beside it. Knows no model."""

import errno
import json
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from llama_adapter.app.records.record import Record, RecordFileError, is_part
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.text import shown_excerpt

MANIFEST_FORMAT: Final = "llama-adapter-runs"
MANIFEST_VERSION: Final = 1

EndReason = Literal["finished", "interrupted", "failed"]


def new_run_id() -> str:
    """A name for one run, sortable by time: 20260131T120000Z-1a2b3c4d."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(kw_only=True, slots=True)
class RunManifest:
    """The circumstances of one run that wrote into a file of answers."""

    run: str
    spec: dict[str, Any]  # resolved: nothing in it says "auto"
    model_digest: str
    versions: dict[str, str]  # python, torch, ...: given by the caller, so that this module imports none of them
    job: dict[str, Any] = field(default_factory=dict)  # what was asked of which pictures, and how answers were chosen
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    started_at: str = field(default_factory=_now)
    ended_at: str | None = None  # None: still running, or it was killed
    end_reason: EndReason | None = None
    counts: dict[str, int] = field(default_factory=dict)  # answers of this run by finish

    def count(self, record: Record) -> None:
        """Take one answer into the counts, also one that the file holds already (a failure that came again)."""
        self.counts[record["finish"]] = self.counts.get(record["finish"], 0) + 1

    def end(self, reason: EndReason) -> None:
        """Note the time of the end, and how it came."""
        self.ended_at, self.end_reason = _now(), reason


def manifest_path(records_path: str | os.PathLike[str]) -> Path:
    """`answers.jsonl` -> `answers.jsonl.manifest.json`, in the same folder; of a folder, `manifest.json` in it.

    Of a link, in the folder of the file itself. So all names of one file lead to one manifest, and /dev/stdout that is
    a file leaves none in /dev.
    """
    path = Path(os.path.realpath(records_path))
    if path.is_dir():
        return path / "manifest.json"
    return path.with_name(path.name + ".manifest.json")


def write_manifest(records_path: str | os.PathLike[str], *, manifest: RunManifest) -> None:
    """Put the run into the manifest beside a file of answers: at its start, and again with the counts at its end.

    Earlier runs that appended to the same file stay in it. The file is replaced as a whole, so a crash leaves the old
    or the new one. Raises `RecordFileError` when the existing manifest is none, and OSError where it cannot be written,
    also where the folder is gone: that is not made again.
    """
    place = manifest_path(records_path)
    if not place.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
    runs = {run.run: run for run in read_manifest(records_path)} | {manifest.run: manifest}
    content = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "runs": [asdict(run) for run in runs.values()],
    }
    # Names that are not UTF-8 have characters in them that cannot be written; as escapes they read back as they were.
    text = json.dumps(content, indent=2, ensure_ascii=False)
    with atomic_write(place) as file:
        file.write(text.encode(errors="backslashreplace") + b"\n")


def read_manifest(records_path: str | os.PathLike[str]) -> list[RunManifest]:
    """The runs that wrote into a file of answers, oldest first; an empty list where there is no manifest."""
    path = manifest_path(records_path)
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != MANIFEST_FORMAT or content["version"] != MANIFEST_VERSION:
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        runs = [RunManifest(**run) for run in content["runs"]]
        if not all(isinstance(run.run, str) for run in runs):
            raise ValueError("a run without a name")
        return runs
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise RecordFileError(
            f"Wanted a manifest ({MANIFEST_FORMAT}, version {MANIFEST_VERSION}) at `{path}`, got something else "
            f"({type(error).__name__}: {shown_excerpt(str(error))}); move it away or name another file for "
            "the answers."
        ) from error


def runs_behind(paths: Iterable[str | os.PathLike[str]]) -> list[RunManifest]:
    """The runs that wrote into any of these files of answers; of parts of a folder, those of the folder."""
    places = {Path(path).parent if is_part(path) else Path(path): None for path in paths}
    return list({run.run: run for place in places for run in read_manifest(place)}.values())
