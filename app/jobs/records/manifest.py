"""The manifest of a file of records: the runs that wrote it, with their models and settings."""

import json
import os
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from llama_adapter.app.jobs.records.record import is_part
from llama_adapter.runtime.atomic_write import write_text
from llama_adapter.runtime.record_lines import RecordFileError
from llama_adapter.runtime.text import shown_excerpt

MANIFEST_FORMAT: Final = "llama-adapter-runs"
MANIFEST_VERSION: Final = 1

EndReason = Literal["finished", "interrupted", "failed"]


def new_run_id() -> str:
    """A new id for a run, such as 20260131T120000Z-1a2b3c4d. Ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(kw_only=True, slots=True)
class RunManifest:
    """One run that wrote into a file of records."""

    run: str
    spec: dict[str, Any]  # the spec of the loaded model; no value is "auto"
    model_digest: str
    versions: dict[str, str]  # of python, torch, ...
    job: dict[str, Any] = field(default_factory=dict)  # inputs, questions and sampling
    settings: dict[str, Any] = field(default_factory=dict)  # in the form of a settings file, to repeat the run
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    started_at: str = field(default_factory=_now)
    ended_at: str | None = None  # None: the run is still active, or was killed
    end_reason: EndReason | None = None
    counts: dict[str, int] = field(default_factory=dict)  # number of this run's answers, by `finish`

    def end(self, reason: EndReason) -> None:
        """Set the time and the reason of the end."""
        self.ended_at, self.end_reason = _now(), reason


def manifest_path(records_path: str | os.PathLike[str]) -> Path:
    """`answers.jsonl` -> `answers.jsonl.manifest.json`; for a folder, `manifest.json` inside it.

    Links are followed, so that all names of a file have one manifest, and /dev/stdout gives none in /dev.
    """
    path = Path(os.path.realpath(records_path))
    if path.is_dir():
        return path / "manifest.json"
    return path.with_name(path.name + ".manifest.json")


def write_manifest(records_path: str | os.PathLike[str], *, manifest: RunManifest) -> None:
    """Add a run to the manifest of a file of records, or replace its entry; entries of other runs are kept.

    It is replaced atomically. Passwords in addresses are left out. Raises `RecordFileError` if the existing manifest is
    broken, and OSError if it cannot be written, for example because the folder is gone.
    """
    place = manifest_path(records_path)
    place.parent.stat()  # raises OSError for a folder that is gone, which would be made again
    runs = {run.run: run for run in read_manifest(records_path)} | {manifest.run: manifest}
    content = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "runs": [asdict(run) for run in runs.values()]}
    # Surrogates (bytes that are not UTF-8) are written as escapes, and reading gives them back unchanged.
    text = json.dumps(content, indent=2, ensure_ascii=False)
    text = re.sub(r'(?<=://)([^/:@"\s]*):[^/@"\s]+@', r"\1@", text)
    write_text(place, f"{text}\n")


def read_manifest(records_path: str | os.PathLike[str]) -> list[RunManifest]:
    """The runs that wrote into a file of records, oldest first; empty without a manifest. Raises `RecordFileError`."""
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
    """The runs that wrote into any of these files; parts of a folder share its manifest."""
    places = {Path(path).parent if is_part(path) else Path(path): None for path in paths}
    return list({run.run: run for place in places for run in read_manifest(place)}.values())
