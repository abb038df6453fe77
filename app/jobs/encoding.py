"""`encode`: writes prefix files and a record for each picture. `run_job` runs it like a job of questions."""

import dataclasses
import hashlib
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.work_items import Looked, WorkItem, WorkQuestion, carried_bytes, is_shareable, look_at
from llama_adapter.app.jobs.job import Job
from llama_adapter.app.jobs.job_planner import JobPlanner
from llama_adapter.app.jobs.picture_encoders import OpenEncoder, open_exported
from llama_adapter.app.jobs.records.record import is_part, read_records
from llama_adapter.app.models.early import refuse_tokens, require_model
from llama_adapter.app.models.spec import AUTO, DEFAULT_BATCH_SIZE, CaptionerSpec, EncoderSources, ModelInfo
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs import may_wait
from llama_adapter.app.pictures.names import name_key
from llama_adapter.app.pictures.prefixes import FIRST_FILE, PREFIX_FILE
from llama_adapter.app.pictures.prefixes.file import (
    Encoding,
    Kept,
    StoredPicture,
    differences,
    read_first_file,
    write_prefixes,
)
from llama_adapter.app.pictures.reading.isolated import open_reader
from llama_adapter.app.pictures.reading.prefetch import Prefetcher
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.text import shown_name

# A file is written when it reaches one of these sizes or this age. So a killed run loses little, and a million pictures
# give about a thousand files with the released models.
MAX_ROWS: Final = 1024
MAX_BYTES: Final = 128 << 20  # counted in float32
MAX_AGE_S: Final = 30.0
_IDLE_AGE_S, _POLL_S = 2.0, 0.1  # used while a list on stdin has nothing new

# Quotes within strings are escaped, so this matches only the field.
_FILE_OF_RECORD: Final = re.compile(rb'"file"\s*:\s*"(' + PREFIX_FILE.pattern.encode() + rb')"')


class _Kept(NamedTuple):
    """An encoded picture that waits for its file."""

    looked: Looked
    stored: StoredPicture
    clip_ms: float  # its share of the batch's time


class EncodeRunner:
    """A `Runner` that writes encoded pictures to files; an answer has the file and the row of its picture."""

    reads_addresses = False

    def __init__(self, sources: EncoderSources, *, keeps: Kept) -> None:
        """`keeps` says what is stored: visual queries alone, or keys and values too.

        `sources` names the encoder's weights. It is not used if the job's spec names an exported encoder, or if `keeps`
        needs the whole model.
        """
        self.about: Mapping[str, Any] = {"encode": {"keeps": keeps, **dataclasses.asdict(sources)}}
        self._sources, self._keeps = sources, keeps
        self._waited_s = 0.0
        self._met, self._lock = set[int](), threading.Lock()  # keys of pictures seen, from digest and name

    @contextmanager
    def open(self, job: Job) -> Iterator[None]:
        """Load the encoder and start the reader.

        Raises UsageError if the folder holds other records or prefixes, or lacks files that its records name.
        """
        assert job.out is not None, "the command line asks for it"
        self._job, self._folder = job, Path(job.out)
        if not job.overwrite:
            _check_records(self._folder)  # before the encoder, which may take long to load
        with ExitStack() as stack:
            self.spec, encoder = _open(job.spec, self._sources, keeps=self._keeps)
            stack.enter_context(closing(encoder.vision))
            self._encoder, encoding = encoder, encoder.encoding
            if not job.overwrite:
                _check_encoding(self._folder, encoding)
            self.info = ModelInfo(
                name=encoding.name,
                digest=hashlib.sha256(encoding.to_json().encode()).hexdigest(),
                device=encoder.device,
                dtype=encoding.dtype,
                precision=self.spec.precision or FLOAT,
                vision=encoder.vision.name,
                mode="eager",
                operators=self.spec.operators,
                encoder=encoding.encoder,
                context=0,
                default_prompt="",
                notes=encoder.notes,
            )
            pixels = encoder.vision.pixels
            reader = open_reader(job.reader, self.spec.pictures, pixels=pixels, timeout_s=job.picture_timeout_s)
            self._reader = stack.enter_context(closing(reader))
            yield

    def answer(
        self, items: Iterator[WorkItem], planner: JobPlanner, *, say: Callable[[str], None], stop: Callable[[], bool]
    ) -> Generator[Answer]:
        """See `Runner`. An answer is yielded once its file is on disk."""
        if self._job.overwrite:
            for file in _prefix_files(self._folder).values():
                file.unlink()
        self._next = max(_prefix_files(self._folder), default=-1) + 1
        assert isinstance(self.spec.batch_size, int), "the spec is complete"
        count, is_slow = self.spec.batch_size, may_wait(self._job.inputs)
        waiting: list[_Kept] = []
        begun = time.monotonic()
        look = partial(look_at, reader=self._reader, wants=partial(self._wants, planner=planner))
        with Prefetcher(
            items, look, ahead=2 * count, shareable=is_shareable, num_bytes=carried_bytes, may_wait=is_slow, stop=stop
        ) as prefetcher:
            while not prefetcher.is_exhausted and not stop():
                started = time.monotonic()
                batch = prefetcher.take(count, at_least=0 if is_slow and waiting else None)
                self._waited_s += time.monotonic() - started
                if is_slow and waiting and not batch:
                    time.sleep(_POLL_S)
                asked = [looked for looked in batch if looked.questions]
                yield from (_failed(looked, looked.picture.error) for looked in asked if looked.picture.error)
                begun = begun if waiting else time.monotonic()
                waiting += self._encode([looked for looked in asked if looked.picture.error is None])
                age_s = time.monotonic() - begun
                if waiting and (_is_large(waiting) or age_s > (MAX_AGE_S if batch else _IDLE_AGE_S)):
                    yield from self._write(waiting)
                    waiting = []
        if waiting:
            yield from self._write(waiting)

    def _wants(self, item: WorkItem, digest: str, *, planner: JobPlanner) -> tuple[WorkQuestion, ...]:
        """As `JobPlanner.wants`, but once per picture: a table may list a picture several times. Thread-safe."""
        key = name_key(f"{digest} {item.label}")
        with self._lock:
            if key in self._met:
                return ()
            self._met.add(key)
        return planner.wants(item, digest)

    def _encode(self, readable: Sequence[Looked]) -> list[_Kept]:
        if not readable:
            return []
        started = time.perf_counter()
        pixels = [looked.picture.pixels for looked in readable]
        stored = self._encoder.encode([one for one in pixels if one is not None])
        clip_ms = (time.perf_counter() - started) * 1e3 / len(readable)
        return [_Kept(looked, one, clip_ms) for looked, one in zip(readable, stored, strict=True)]

    def _write(self, kept: Sequence[_Kept]) -> Iterator[Answer]:
        path = self._folder / f"prefixes-{self._next:05d}.safetensors"
        self._next += 1
        rows = [(one.looked.picture.digest, one.looked.item.label, one.stored) for one in kept]
        write_prefixes(path, self._encoder.encoding, rows)
        for row, one in enumerate(kept):
            reading = one.looked.picture
            ms = {"read": reading.elapsed_ms, "clip": one.clip_ms, "total": reading.elapsed_ms + one.clip_ms}
            place: dict[str, Any] = {"digest": reading.digest, "file": path.name, "row": row}
            place |= dict.fromkeys(reading.notes, True)
            text = f"{path.name} row {row}"
            yield Answer(prompt="", text=text, token_ids=(), finish="stop", details=place, ms=ms, **_fields(one.looked))

    def waited_s(self, wall_s: float) -> float:
        """See `Runner`."""
        return self._waited_s


def _fields(looked: Looked) -> dict[str, Any]:
    """Fields of the answer that identify its picture."""
    question = looked.questions[0]  # the only one; it stands for encoding the picture
    return {
        "index": question.index,
        "picture": looked.item.label,
        "digest": looked.picture.digest,
        "tag": question.tag,
    }


def _failed(looked: Looked, error: AnswerError) -> Answer:
    known = {"digest": looked.picture.digest} if looked.picture.digest else {}
    return Answer.failed(error, details=known, ms={"total": looked.picture.elapsed_ms}, **_fields(looked))


def _is_large(waiting: Sequence[_Kept]) -> bool:
    num_bytes = sum(tensor.nbytes for tensor in waiting[0].stored.tensors.values())
    return len(waiting) >= MAX_ROWS or len(waiting) * num_bytes >= MAX_BYTES


def _prefix_files(folder: Path) -> dict[int, Path]:
    found = ((PREFIX_FILE.fullmatch(file.name), file) for file in folder.iterdir())
    return {int(match[1]): file for match, file in found if match is not None}


def _check_records(folder: Path) -> None:
    """Raise UsageError if the folder holds records of answers, or lacks files that its records name."""
    shown, named = shown_name(str(folder)), set[str]()
    for part in filter(is_part, folder.iterdir()):
        first = next((record for record in read_records(part) if record["error"] is None), None)
        if first is not None and "file" not in first:
            raise UsageError(f"`{shown}` holds records of answers", hint="choose another folder")
        with open(part, "rb") as lines:
            named.update(match[1].decode() for match in map(_FILE_OF_RECORD.search, lines) if match is not None)
    lacking = sorted(named - {file.name for file in folder.iterdir()})
    if lacking:
        raise UsageError(
            f"`{shown}` lacks {len(lacking):,} of the {len(named):,} prefix files that its records name: "
            f"`{lacking[0]}`{' and others' if len(lacking) > 1 else ''}",
            hint="copy the whole folder again, or encode all pictures again with --overwrite",
        )


def _check_encoding(folder: Path, encoding: Encoding) -> None:
    """Raise UsageError if the folder holds prefixes of another encoding."""
    if (folder / FIRST_FILE).exists() and (found := read_first_file(str(folder)).encoding) != encoding:
        message = f"`{shown_name(str(folder))}` {differences(found, encoding)}"
        raise UsageError(message, hint="choose another folder, or pass --overwrite")


def _open(spec: CaptionerSpec, sources: EncoderSources, *, keeps: Kept) -> tuple[CaptionerSpec, OpenEncoder]:
    """Open the encoder; returns the spec with all values resolved, and the encoder."""
    if spec.batch_size == AUTO:
        spec = dataclasses.replace(spec, batch_size=DEFAULT_BATCH_SIZE)
    how = {"exif": spec.exif, "reading": spec.reading, "transparency": spec.transparency, "keeps": keeps}
    if keeps == "queries" and spec.vision_kind != "torch":
        return open_exported(spec, how)
    given = sources if keeps == "queries" else spec
    require_model(given)
    refuse_tokens(given)
    from llama_adapter.app.jobs.torch_encoders import open_model, open_weights

    return open_weights(spec, sources, how) if keeps == "queries" else open_model(spec, how)
