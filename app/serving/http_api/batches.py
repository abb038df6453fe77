"""Batches: files of requests that are answered row by row, concurrently with the other requests.

Each answered row is a record in the batch's file of records (app/jobs/records). This file is the only journal: after a
crash, the batch continues with the rows that have no record, and at the end the output files are written from it. All
batches run in one thread with its own event loop, and take turns.
"""

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, cast

from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from llama_adapter.app.jobs.records.file import RecordWriter
from llama_adapter.app.jobs.records.record import ErrorRecord, Record, json_line, parse_record
from llama_adapter.app.serving.http_api.access import INTERNAL_ERROR, kind_and_place
from llama_adapter.app.serving.http_api.asking import Asker, Form
from llama_adapter.app.serving.http_api.bodies import num_separators, parse_json
from llama_adapter.app.serving.http_api.errors import ApiError, of_validation
from llama_adapter.app.serving.http_api.file_store import (
    FileId,
    FileLimits,
    FileStore,
    ObjectFolder,
    Owned,
    Time,
    open_private,
    remove,
)
from llama_adapter.app.serving.http_api.guards import MAX_SEPARATORS
from llama_adapter.app.serving.online.room import Room, cancel_all
from llama_adapter.runtime.record_lines import MAX_RECORD_BYTES, RecordFileError, read_lines
from llama_adapter.runtime.text import shown_excerpt, shown_name

MAX_ROWS: Final = 50_000
MAX_CUSTOM_ID_CHARS: Final = 512
MAX_UNFINISHED: Final = 32  # batches
MAX_BATCHES: Final = 1000  # beyond it, the oldest finished batches are deleted; their files are kept
MAX_TRIES: Final = 4  # attempts per row, if the server fails
MAX_BYTES_AT_ONCE: Final = 128 * 2**20  # total size of the rows that are being answered

_RETRY_S = 10.0  # pause after a disk error
_PAUSE_S = 0.5  # pause before a row is tried again; doubles with each failure
_log = logging.getLogger("llama_adapter.server")

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
Endpoint = Literal["/v1/chat/completions", "/v1/responses", "/v1/completions"]
_Count = Annotated[int, Field(ge=0, le=MAX_ROWS)]
_FINISHED: Final = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class BatchError:
    """The error that ended a batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


_DAMAGED = BatchError("damaged_batch", "The files of this batch are missing or damaged: send its rows in a new batch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(Owned):
    """The state of a batch, as stored in its JSON file. Times are seconds since 1970."""

    id: Annotated[str, Field(pattern="^batch_[0-9a-f]{32}$")]
    endpoint: Endpoint
    input_file_id: FileId
    metadata: dict[str, str] | None
    status: Status = "validating"
    times: dict[Status, Time] = field(default_factory=dict)  # status -> the time at which it began
    output_file_id: FileId | None = None
    error_file_id: FileId | None = None
    errors: list[BatchError] = field(default_factory=list)
    num_rows: _Count = 0
    num_completed: _Count = 0
    num_failed: _Count = 0

    @property
    def is_finished(self) -> bool:
        """Whether its state is final."""
        return self.status in _FINISHED


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One line of an input file that is not blank."""

    number: int  # line number, from 1
    num_bytes: int = 0  # of a valid request
    custom_id: str | None = None
    body: Any = None
    fault: BatchError | None = None  # if the line is not a valid request


class Batches(ObjectFolder[Batch]):
    """The batches and files of one folder. Thread-safe. Use it as a context manager: rows are answered only inside."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        asker: Asker,
        forms: Mapping[str, Form[Any]],
        limits: FileLimits,
        max_row_bytes: int,
        rows_at_once: int,
    ) -> None:
        """Raises what `FileStore` raises. `forms` maps the path of an endpoint to its form."""
        self.files = FileStore(Path(folder), limits=limits)
        super().__init__(Path(folder) / "batches", Batch, noun="batch", names="batch_*.json")
        self._asker, self._forms = asker, forms
        self._max_row_bytes = max_row_bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batches", daemon=True)
        # Used in the event loop only:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}  # the part of a batch that can be cancelled
        self._turn = asyncio.Lock()
        self._room = Room(most_items=rows_at_once, most_bytes=MAX_BYTES_AT_ONCE)  # for rows that are being answered

    def __enter__(self) -> Self:
        for batch in self._objects.values():
            if batch.status in ("completed", "cancelled"):
                remove(self._records(batch.id))  # left by a crash in `_finish`
            elif not batch.is_finished:
                self.files.take_room(2 * _size(self._records(batch.id)), is_forced=True)
                self._loop.call_soon(self._start, batch.id)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; unfinished batches continue when the folder is opened again."""
        with suppress(TimeoutError):  # a record may be waiting for a slow disk
            asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._thread.is_alive():
            self._loop.close()
        self.files.close()

    def create(
        self, *, endpoint: Endpoint, input_file_id: str, metadata: dict[str, str] | None, owner: str | None
    ) -> Batch:
        """Begin a batch; raises ApiError if the file does not exist, storage is full, or too many batches run."""
        with self.lock:
            self.files.find(input_file_id, owner=owner)
            self.files.take_room(0)
            if sum(not batch.is_finished for batch in self._objects.values()) >= MAX_UNFINISHED:
                message = f"{MAX_UNFINISHED} batches are not finished, which is the limit: try again later."
                raise ApiError(message, status=429, code="too_many_batches", headers={"retry-after": "60"})
            batch = Batch(
                id=f"batch_{uuid.uuid4().hex}",
                owner=owner,
                endpoint=endpoint,
                input_file_id=input_file_id,
                metadata=metadata,
                created_at=time.time(),
            )
            self._write(batch)
            finished = [one for one in self._objects.values() if one.is_finished]
            for old in finished[: max(0, len(self._objects) - MAX_BATCHES)]:
                del self._objects[old.id]
                self._about(old.id).unlink(missing_ok=True)
        self._loop.call_soon_threadsafe(self._start, batch.id)
        return batch

    def cancel(self, batch_id: str, *, owner: str | None) -> Batch:
        """Stop a batch; the answers so far are kept. Raises ApiError if it is finished or finalizing."""
        with self.lock:
            batch = self.find(batch_id, owner=owner)
            if batch.is_finished or batch.status == "finalizing":
                message = f"The batch is {batch.status} and cannot be cancelled."
                raise ApiError(message, status=409, code="batch_not_cancellable", param="batch_id")
            batch = self._change(batch, "cancelling")
        self._loop.call_soon_threadsafe(self._interrupt, batch_id)
        return batch

    def remove_file(self, file_id: str, *, owner: str | None) -> None:
        """Delete a file; raises ApiError if it does not exist or an unfinished batch reads it."""
        with self.lock:
            self.files.find(file_id, owner=owner)
            if any(not batch.is_finished and batch.input_file_id == file_id for batch in self._objects.values()):
                message = "A batch reads this file: cancel it, or wait until it is finished."
                raise ApiError(message, status=409, code="file_in_use", param="file_id")
            self.files.remove(file_id)

    # State

    def _change(self, batch: Batch, status: Status | None = None, **fields: Any) -> Batch:
        """Set fields of a batch in memory and on disk."""
        if status is not None and status != batch.status:
            fields |= {"status": status, "times": {**batch.times, status: time.time()}}
        changed = dataclasses.replace(batch, **fields)
        with self.lock:
            self._write(changed)
        return changed

    def _records(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.jsonl"

    # The event loop of the batches

    def _start(self, batch_id: str) -> None:
        task = self._tasks[batch_id] = self._loop.create_task(self._run(batch_id))
        task.add_done_callback(lambda _: self._tasks.pop(batch_id))

    def _interrupt(self, batch_id: str) -> None:
        if (answering := self._answering.get(batch_id)) is not None:
            answering.cancel()

    async def _run(self, batch_id: str) -> None:
        """Run a batch from its present state to its end."""
        while True:
            try:
                await self._go_on(batch_id)
                return
            except (FileNotFoundError, RecordFileError) as error:
                _log.error("%s failed: %s", batch_id, shown_excerpt(str(error)))
                self._fail(batch_id, _DAMAGED)
                return
            except OSError as error:
                _log.error("%s waits for its disk: %s", batch_id, error.strerror)
                await asyncio.sleep(_RETRY_S)
            except Exception as error:
                _log.error("%s failed: %s", batch_id, kind_and_place(error))
                known = error if isinstance(error, ApiError) else INTERNAL_ERROR
                self._fail(batch_id, BatchError(known.code, known.message))
                return

    def _fail(self, batch_id: str, fault: BatchError) -> None:
        try:
            self._finish(batch_id, fault=fault)
        except Exception:  # the records stay where they are
            self._change(self._objects[batch_id], "failed", errors=[fault])

    async def _go_on(self, batch_id: str) -> None:
        batch = self._objects[batch_id]
        if batch.status == "validating" and (fault := self._begin(batch)) is not None:
            self._finish(batch_id, fault=fault)
            return
        open_private(_regular(self._records(batch_id)), "ab").close()
        with RecordWriter(self._records(batch_id)) as records:
            if self._objects[batch_id].status == "in_progress":
                answering = self._loop.create_task(self._answer_rows(batch, records))
                self._answering[batch_id] = answering
                try:
                    await answering
                except asyncio.CancelledError:
                    if self._objects[batch_id].status != "cancelling":
                        raise
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
                finally:
                    del self._answering[batch_id]
        self._finish(batch_id)

    def _begin(self, batch: Batch) -> BatchError | None:
        """Count the rows and set the batch in progress; returns an error if the file cannot be a batch."""
        with open(_regular(self.files.path(batch.input_file_id)), "rb") as file:
            num_rows = sum(1 for _ in itertools.islice(_lines(file, max_bytes=self._max_row_bytes), MAX_ROWS + 1))
        if num_rows == 0:
            return BatchError("empty_file", "The file has no requests.")
        if num_rows > MAX_ROWS:
            return BatchError("too_many_requests", f"The file has more than {MAX_ROWS:,} requests.")
        with self.lock:
            batch = self._objects[batch.id]
            status: Status = "in_progress" if batch.status == "validating" else batch.status  # cancelled meanwhile
            self._change(batch, status, num_rows=num_rows)
        return None

    async def _answer_rows(self, batch: Batch, records: RecordWriter) -> None:
        """Answer the rows that have no record. A new row waits until few enough rows are being answered."""
        known = {place.line: place.custom_id for place in self._places(batch.id)}
        custom_ids: set[str | None] = {None}
        with open(_regular(self.files.path(batch.input_file_id)), "rb") as file:
            lines = _lines(file, max_bytes=self._max_row_bytes)
            async with asyncio.TaskGroup() as group:
                while True:
                    async with self._turn:  # batches take turns
                        row = self._next_row(lines, known, endpoint=batch.endpoint, custom_ids=custom_ids)
                        if row is None:
                            return
                        await self._room.take(row.num_bytes)
                        task = group.create_task(self._answer_row(row, batch, records))
                        task.add_done_callback(lambda _, row=row: self._room.give_back(row.num_bytes))  # type: ignore[misc]

    def _next_row(
        self,
        lines: Iterator[tuple[int, bytes | None]],
        known: Mapping[int, str | None],
        *,
        endpoint: str,
        custom_ids: set[str | None],
    ) -> _Row | None:
        for number, line in lines:
            if number in known:
                custom_ids.add(known[number])
                continue
            row = _parse(number, line, endpoint=endpoint)
            if row.fault is None and row.custom_id in custom_ids:
                fault = BatchError("duplicate_custom_id", f"Line {number}: an earlier line has this `custom_id`.")
                return dataclasses.replace(row, fault=fault, body=None)
            custom_ids.add(row.custom_id)
            return row
        return None

    async def _answer_row(self, row: _Row, batch: Batch, records: RecordWriter) -> None:
        number = uuid.uuid4().hex
        response: dict[str, Any] | None = None
        if row.fault is None:
            status, body = await self._ask(row, batch, request_id=f"req_{number}")
            response = {"status_code": status, "request_id": f"req_{number}", "body": body}
        record = _record(row, batch, number=number, response=response, fault=row.fault)
        num_bytes = _num_bytes(record)
        if num_bytes is None or num_bytes > MAX_RECORD_BYTES:
            fault = BatchError("answer_not_kept", f"Line {row.number}: the answer is too large, or not finite.")
            record = _record(row, batch, number=number, response=None, fault=fault)
            num_bytes = _num_bytes(record) or 0
        self.files.take_room(2 * num_bytes)  # for the record and for the output
        try:
            records.write(record)
        except BaseException:
            self.files.give_room(2 * num_bytes)
            raise
        with self.lock:
            self._count(batch.id, completed=record["error"] is None, failed=record["error"] is not None)

    async def _ask(self, row: _Row, batch: Batch, *, request_id: str) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer to a row. If the server fails, the row is tried again."""
        form, client, num_tries = self._forms[batch.endpoint], f"batch:{batch.id}", 0
        while True:
            try:
                request = _validated_request(form, row.body)
                pending = await self._asker.ask(
                    request, form=form, request_id=request_id, client=client, is_background=True
                )
                return 200, await pending.body()
            except Exception as error:
                if not isinstance(error, ApiError):
                    _log.error("%s, %s", kind_and_place(error), request_id)
                    return INTERNAL_ERROR.http_status, INTERNAL_ERROR.envelope()
                is_turned_away = error.code in ("busy", "unavailable")
                num_tries += not is_turned_away
                # A row's deadline counts from when the engine takes it, so a row that exceeded it would do so again.
                if error.http_status < 500 and not is_turned_away:
                    return error.http_status, error.envelope()
                if error.code == "deadline" or num_tries == MAX_TRIES:
                    return error.http_status, error.envelope()
                await asyncio.sleep(_PAUSE_S * 2**num_tries * (0.5 + random.random()))

    def _count(self, batch_id: str, *, completed: int, failed: int) -> None:
        """Add to the numbers of answered rows, in memory. The next change of state writes them to disk.

        After a crash before that, `_places` counts the records.
        """
        batch = self._objects[batch_id]
        self._objects[batch_id] = dataclasses.replace(
            batch, num_completed=batch.num_completed + completed, num_failed=batch.num_failed + failed
        )

    def _places(self, batch_id: str) -> list["_Place"]:
        """The places of the records of all answered rows, in the order of the rows. Sets the batch's counts to them.

        Raises RecordFileError for a file with other records.
        """
        places, journal = [], _regular(self._records(batch_id))
        if journal.exists():
            for offset, record in read_lines(journal, parse_record):
                line, output = record.get("line"), record.get("output")
                custom_id = output.get("custom_id") if isinstance(output, dict) else False
                if type(line) is not int or not isinstance(custom_id, str | None):
                    raise RecordFileError(f"`{shown_name(str(journal))}` has records of another kind at byte {offset}")
                places.append(_Place(line, offset, record["error"] is None, custom_id))
        num_answers = sum(place.is_answer for place in places)
        with self.lock:
            self._objects[batch_id] = dataclasses.replace(self._objects[batch_id], num_completed=0, num_failed=0)
            self._count(batch_id, completed=num_answers, failed=len(places) - num_answers)
        return sorted(places)

    def _finish(self, batch_id: str, *, fault: BatchError | None = None) -> None:
        """Write the output files, in the order of the input. After a crash inside, it can run again.

        `fault` is the error that ended the batch before its last row.
        """
        with self.lock:
            batch = self._objects[batch_id]
            end: Status = "failed" if fault else "cancelled" if batch.status == "cancelling" else "completed"
            if end == "completed":
                batch = self._change(batch, "finalizing")
        places = self._places(batch_id)
        output = self._write_output(batch, "output", [place.offset for place in places if place.is_answer])
        errors = self._write_output(batch, "errors", [place.offset for place in places if not place.is_answer])
        with self.lock:
            self._change(
                self._objects[batch_id],
                end,
                output_file_id=output,
                error_file_id=errors,
                errors=[] if fault is None else [fault],
            )
        self.files.give_room(2 * _size(self._records(batch_id)))
        self._records(batch_id).unlink(missing_ok=True)

    def _write_output(self, batch: Batch, kind: str, offsets: list[int]) -> str | None:
        """Write a file with the output lines of the records at `offsets`; returns its id, None if there are none."""
        if not offsets:
            return None
        file_id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        with (
            open(self._records(batch.id), "rb") as records,
            self.files.output(file_id, owner=batch.owner) as output,
        ):
            for offset in offsets:
                records.seek(offset)
                output.write(json_line(json.loads(records.readline())["output"]).encode() + b"\n")
            return output.keep(name=f"{batch.id}_{kind}.jsonl", purpose="batch_output").id


class _Place(NamedTuple):
    """Where the record of an answered row is, and what it is."""

    line: int
    offset: int
    is_answer: bool
    custom_id: str | None


def _regular(path: Path) -> Path:
    """The path. Raises RecordFileError if a folder, pipe or device is there: opening a pipe would wait for its end."""
    if path.exists() and not path.is_file():
        raise RecordFileError(f"`{shown_name(str(path))}` is no regular file")
    return path


def _lines(file: Any, *, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers; None for a line of more than `max_bytes`."""
    for number in itertools.count(1):
        line = file.readline(max_bytes + 1)
        if not line:
            return
        is_whole = line.endswith(b"\n") or len(line) <= max_bytes
        while not line.endswith(b"\n") and len(line) > max_bytes:
            line = file.readline(max_bytes + 1)  # the rest of the line
        if not is_whole:
            yield number, None
        elif not line.isspace():
            yield number, line


def _parse(number: int, line: bytes | None, *, endpoint: str) -> _Row:
    """The row of a line: its request, or what is wrong with it. No message quotes the line."""

    def bad(code: str, text: str, *, custom_id: str | None = None) -> _Row:
        return _Row(number=number, custom_id=custom_id, fault=BatchError(code, f"Line {number}{text}"))

    if line is None:
        return bad("line_too_long", " is too long.")
    if num_separators(line) > MAX_SEPARATORS:
        return bad("request_too_complex", f" has more than {MAX_SEPARATORS:,} commas and opening brackets.")
    content: Any = None
    with suppress(ValueError):
        content = parse_json(line)
    if not isinstance(content, dict):
        return bad("invalid_json_line", " is no JSON object in UTF-8.")
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        return bad("invalid_custom_id", f": `custom_id` is a text of 1 to {MAX_CUSTOM_ID_CHARS} characters.")
    if content.get("method") != "POST":
        return bad("invalid_method", ": `method` is POST.", custom_id=custom_id)
    if content.get("url") != endpoint:
        return bad("invalid_url", f": `url` is the batch's endpoint, {endpoint}.", custom_id=custom_id)
    if content.keys() - {"custom_id", "method", "url", "body"}:
        text = " has `custom_id`, `method`, `url` and `body` only."
        return bad("unknown_parameter", text, custom_id=custom_id)
    return _Row(number=number, num_bytes=len(line), custom_id=custom_id, body=content.get("body"))


def _validated_request(form: Form[Any], body: Any) -> Any:
    """The request of a body, checked like the body of an HTTP request; raises ApiError."""
    try:
        request = form.request.model_validate(body)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
        raise of_validation(RequestValidationError(errors, body=body)) from None
    if request.stream:
        raise ApiError("A batch has no streams: leave `stream` out.", param="stream")
    return request


def _record(
    row: _Row, batch: Batch, *, number: str, response: Mapping[str, Any] | None, fault: BatchError | None
) -> Record:
    """The record of a row; `output` is its line in the output file."""
    error = None if fault is None else {"code": fault.code, "message": fault.message}
    is_answer = response is not None and response["status_code"] == 200
    output = {"id": f"batch_req_{number}", "custom_id": row.custom_id, "response": response, "error": error}
    record = Record(
        id=f"batch_req_{number}",
        picture=f"line {row.number}",
        prompt="",
        text="",
        finish="stop" if is_answer else "error",
        choice=None,
        tokens=0,
        error=None if is_answer else ErrorRecord(code=fault.code if fault else "response", message=""),
        ms={},
        run=batch.id,
    )
    return cast(Record, {**record, "line": row.number, "output": output})


def _num_bytes(record: Record) -> int | None:
    """Length of a record's line; None if it cannot be written."""
    try:
        return len(json_line(record).encode()) + 1
    except ValueError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
