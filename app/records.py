"""Answers as they are kept: one JSON object a line, and a manifest of the runs beside it. No tensors, no printing."""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Protocol, Self, TypedDict, cast

MANIFEST_FORMAT: Final = "llama-adapter-runs"
MANIFEST_VERSION: Final = 1


class RecordFileError(Exception):
    """A file of answers, or the manifest beside it, is not what its name promises."""


class ErrorLike(Protocol):
    """Why there is no answer."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...


class AnswerLike(Protocol):
    """What a record needs to know of an answer."""

    @property
    def picture(self) -> str: ...  # its label
    @property
    def digest(self) -> str: ...  # of the picture; empty when its bytes could not be read
    @property
    def prompt(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish(self) -> str: ...
    @property
    def choice(self) -> Mapping[str, float] | None: ...
    @property
    def error(self) -> ErrorLike | None: ...
    @property
    def ms(self) -> Mapping[str, float]: ...


class ErrorRecord(TypedDict):
    """The `error` of a record."""

    code: str
    message: str


class Record(TypedDict):
    """One line of a file of answers; every key is always there."""

    id: str
    picture: str
    prompt: str
    text: str
    finish: str  # stop, length, choice or error
    choice: dict[str, float | None] | None  # probabilities; only where choices were asked for
    tokens: int
    error: ErrorRecord | None
    ms: dict[str, float | None]
    run: str


def record_id(picture_digest: str, *, prompt: object, model_digest: str, sampling: Mapping[str, Any]) -> str:
    """Digest of everything an answer depends on: the same id means the work is already done.

    `prompt` and `sampling` are plain JSON values; the order of the keys of `sampling` does not matter. 32 hex digits.
    """
    parts = [picture_digest, prompt, model_digest, dict(sampling)]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def answer_to_record(answer: AnswerLike, *, model_digest: str, sampling: Mapping[str, Any], run: str) -> Record:
    """The record of one answer. A picture without bytes is identified by its name instead of its digest."""
    picture_digest = answer.digest or f"name:{answer.picture}"
    error = answer.error
    return Record(
        id=record_id(picture_digest, prompt=answer.prompt, model_digest=model_digest, sampling=sampling),
        picture=answer.picture,
        prompt=answer.prompt,
        text=answer.text,
        finish=answer.finish,
        choice=None if answer.choice is None else _numbers(answer.choice, digits=6),
        tokens=len(answer.token_ids),
        error=None if error is None else ErrorRecord(code=error.code, message=error.message),
        ms=_numbers(answer.ms, digits=3),
        run=run,
    )


def _numbers(values: Mapping[str, float], *, digits: int) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: they become null, so that one odd value does not cost a record."""
    return {name: round(float(value), digits) if math.isfinite(value) else None for name, value in values.items()}


def record_to_line(record: Record) -> str:
    """The record as one line of JSON, without the line feed; text stays readable, not escaped to ASCII."""
    line = json.dumps(record, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8 form; as an escape it is valid JSON and reads back as it was.
    return line.encode(errors="backslashreplace").decode()


class RecordWriter:
    """Appends records to a file; what was written before survives a crash.

    Opening repairs a last line that a crash left torn: a whole record gets its line feed (`repair` is "completed"),
    anything less is cut off ("dropped"). Every record reaches the operating system at once, so it survives the death
    of this process; the disk is told to keep them (fsync) after every `sync_every` records and at the end.
    Pipes and devices such as /dev/stdout are written to without repair or fsync. One writer per file. A file is made
    at once, so that a place that cannot be written shows; if it is still empty at the end, it is removed again.

    Raises `RecordFileError` when the file holds something else than records, which is then left alone, and OSError
    when it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync_every: int = 64) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every must be at least 1, got {sync_every}")
        self.path = Path(path)
        self.num_written = 0
        self.repair: str | None = None
        self._sync_every = sync_every
        self._is_file = not self.path.exists() or self.path.is_file()
        self._is_new = not os.path.lexists(self.path)
        if self._is_file:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.repair = _repair(self.path)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Append one record."""
        rest = memoryview(record_to_line(record).encode() + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]
        self.num_written += 1
        if self.num_written % self._sync_every == 0:
            self._sync()

    def close(self) -> None:
        """Make everything written durable and close the file; further calls do nothing."""
        if self._file.closed:
            return
        try:
            self._sync()
            if self._is_new and os.fstat(self._file.fileno()).st_size == 0:
                self.path.unlink(missing_ok=True)
        finally:
            self._file.close()

    def _sync(self) -> None:
        if self._is_file:
            os.fsync(self._file.fileno())


def read_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file in order; a torn last line is passed over.

    Raises `RecordFileError` naming the first line that is no record, and OSError when the file cannot be read.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            record = _parsed(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                raise _not_records(path, where=f"line {number}")


def _parsed(line: bytes) -> Record | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(value, dict) and value.keys() >= Record.__required_keys__ and isinstance(value["id"], str)
    return cast(Record, value) if is_record else None


def _repair(path: Path) -> str | None:
    """Give the file whole lines again; says what was done to the last one, None where nothing was wrong."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with open(path, "r+b") as file:
        first_line = file.readline()
        # Cutting off a line is only right in a file of ours: a picture named by mistake must not lose its tail.
        is_ours = _parsed(first_line) is not None if first_line.endswith(b"\n") else _is_torn_record(first_line)
        if not is_ours:
            raise _not_records(path, where="line 1")
        start = _start_of_last_line(file)
        file.seek(start)
        last_line = file.read()
        if not last_line:
            return None
        if _parsed(last_line) is not None:
            file.write(b"\n")
            repair = "completed"
        else:
            file.truncate(start)
            repair = "dropped"
        file.flush()
        os.fsync(file.fileno())
        return repair


def _is_torn_record(line: bytes) -> bool:
    beginning = b'{"id": "'
    return line.startswith(beginning[: len(line)]) if len(line) < len(beginning) else line.startswith(beginning)


def _start_of_last_line(file: BinaryIO) -> int:
    """Offset just behind the last line feed, sought from the end: the file may be large, its last line is not."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = file.seek(max(0, end - 65536))
        position = file.read(end - start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


def _not_records(path: str | os.PathLike[str], *, where: str) -> RecordFileError:
    return RecordFileError(
        f"Wanted a file of answers (JSON lines) at `{os.fspath(path)}`, but {where} is not a record; "
        "name another file, or move this one away."
    )


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
    started_at: str = field(default_factory=_now)
    ended_at: str | None = None  # None: still running, or it was killed
    counts: dict[str, int] = field(default_factory=dict)  # answers of this run by finish

    def count(self, record: Record) -> None:
        """Take one answer into the counts, also one that the file holds already (a failure that came again)."""
        self.counts[record["finish"]] = self.counts.get(record["finish"], 0) + 1

    def end(self) -> None:
        """Note the time of the end."""
        self.ended_at = _now()


def manifest_path(records_path: str | os.PathLike[str]) -> Path:
    """`answers.jsonl` -> `answers.jsonl.manifest.json`, in the same folder."""
    path = Path(records_path)
    return path.with_name(path.name + ".manifest.json")


def write_manifest(records_path: str | os.PathLike[str], *, manifest: RunManifest) -> None:
    """Put the run into the manifest beside a file of answers: at its start, and again with the counts at its end.

    Earlier runs that appended to the same file stay in it. The file is replaced as a whole, so a crash leaves the old
    or the new one. Raises `RecordFileError` when the existing manifest is none.
    """
    path = manifest_path(records_path)
    runs = {run.run: run for run in read_manifest(records_path)} | {manifest.run: manifest}
    content = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "runs": [asdict(run) for run in runs.values()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


def read_manifest(records_path: str | os.PathLike[str]) -> list[RunManifest]:
    """The runs that wrote into a file of answers, oldest first; an empty list where there is no manifest."""
    path = manifest_path(records_path)
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != MANIFEST_FORMAT or content["version"] != MANIFEST_VERSION:
            raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
        return [RunManifest(**run) for run in content["runs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordFileError(
            f"Wanted a manifest ({MANIFEST_FORMAT}, version {MANIFEST_VERSION}) at `{path}`, got something else "
            f"({type(error).__name__}: {error}); move it away or name another file for the answers."
        ) from error
