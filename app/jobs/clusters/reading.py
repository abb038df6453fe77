"""Runs in the reading tasks: reads the pictures of a chunk, except those that an earlier run answered."""

import dataclasses
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial

from llama_adapter.app.captioning.pictures import RemotePicture
from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.jobs.clusters.chunks import Chunk, Known, ReadChunk
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs.addresses import is_remote, read_remote
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.reader import PictureReader, PictureReading, Reader
from llama_adapter.app.pictures.reading.spec import ReadingSpec
from llama_adapter.runtime.problems import describe
from llama_adapter.vision.errors import PictureError

# Remote storage is slow for each file, but serves many files at once. Local files are read one after another, because
# there is one task for each processor.
_REMOTE_THREADS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the pictures of a job are read."""

    spec: ReadingSpec  # of the loaded model
    size: int  # side of the square that its encoder takes, in pixels
    kind: str  # process or thread
    timeout_s: float
    folder: str  # the current folder of the driver


def enter_folder(folder: str) -> None:
    """Change to the driver's current folder, if it exists here, so that relative names have the same meaning."""
    with suppress(OSError):
        os.chdir(folder)


def read_chunk(payload: bytes, *, reading: Reading, known: Known | None) -> bytes:
    """Read a pickled `Chunk`; returns a pickled `ReadChunk`. A picture that cannot be read has an error."""
    chunk: Chunk = pickle.loads(payload)
    enter_folder(reading.folder)
    look = partial(_look, reader=_reader(reading), known=None if chunk.is_sure else known)
    items, problem = chunk.items, None
    try:
        num_threads = _REMOTE_THREADS if any(is_remote(item.picture) for item in items) else 1
        with ThreadPoolExecutor(num_threads, thread_name_prefix="read") as pool:
            items = tuple(pool.map(look, items))  # in their order, because the driver identifies pictures by position
    except Exception as error:  # an error of a single picture is in its reading instead
        problem = describe(error)
        items = tuple(dataclasses.replace(item, picture=PictureReading()) for item in chunk.items)
    return pickle.dumps(ReadChunk(number=chunk.number, items=items, problem=problem), protocol=5)


def _look(item: WorkItem, *, reader: Reader, known: Known | None) -> WorkItem:
    source = item.picture
    assert not isinstance(source, RemotePicture), "jobs name files"
    wants_pixels: Callable[[str], bool] | None = None
    if known is not None:
        wants_pixels = lambda digest: not known.has(item, digest)  # noqa: E731 - an argument, once
    if isinstance(source, PictureReading):
        picture = source
    else:
        try:
            data = read_remote(source) if isinstance(source, str) and is_remote(source) else source
            picture = reader.read(data, name=item.label, wants_pixels=wants_pixels)
        except PictureError as error:
            picture = PictureReading(error=AnswerError(code=error.code, message=error.message))
    if picture.error is not None and known is not None and known.has(item, picture.digest):
        picture = dataclasses.replace(picture, error=None)
    return dataclasses.replace(item, picture=picture)


@cache
def _reader(reading: Reading) -> Reader:
    """One reader for all chunks of this process."""
    if reading.kind == "thread":
        return PictureReader(reading.spec, size=reading.size)
    return IsolatedReader(reading.spec, size=reading.size, timeout_s=reading.timeout_s, num_processes=1)
