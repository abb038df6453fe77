"""What runs where pictures are read: looks at those of a chunk, and leaves out what an earlier run answered."""

import dataclasses
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from llama_adapter.app.captioning.work_items import WorkItem
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.reading.isolated import IsolatedReader
from llama_adapter.app.reading.reader import PictureReader, PictureReading, Reader
from llama_adapter.app.scale.chunks import Chunk, Known, ReadChunk
from llama_adapter.app.scale.folder import enter_folder
from llama_adapter.app.scale.remote import is_remote, read_remote
from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.runtime.problems import describe
from llama_adapter.vision.errors import PictureError

# Of addresses: their storage takes its time for each, and many at once. Files are read one after another, as there
# is a task for each processor that reads.
_REMOTE_THREADS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """How the pictures of a job are read."""

    spec: CaptionerSpec  # of the loaded model
    size: int  # of the square that its encoder sees, in pixels
    kind: str  # process or thread
    timeout_s: float
    folder: str  # the driver's current one


def read_chunk(payload: bytes, *, reading: Reading, known: Known | None) -> bytes:
    """The pickle of a chunk -> that of the same chunk, read. A picture that cannot be read has an error."""
    chunk: Chunk = pickle.loads(payload)
    enter_folder(reading.folder)
    look = partial(_look, reader=_reader(reading), known=None if chunk.is_sure else known)
    items, problem = chunk.items, None
    try:
        num_threads = _REMOTE_THREADS if any(is_remote(item.picture) for item in items) else 1
        with ThreadPoolExecutor(num_threads, thread_name_prefix="read") as pool:
            items = tuple(pool.map(look, items))  # all of them, in their order: positions are what the driver goes by
    except Exception as error:  # not of one picture: that is in its reading
        problem = describe(error)
        items = tuple(dataclasses.replace(item, picture=_NOTHING) for item in chunk.items)
    return pickle.dumps(ReadChunk(number=chunk.number, items=items, problem=problem), protocol=5)


_NOTHING = PictureReading(digest="", pixels=None, error=None, elapsed_ms=0.0)


def _look(item: WorkItem, *, reader: Reader, known: Known | None) -> WorkItem:
    source = item.picture
    wants_pixels: Callable[[str], bool] | None = None
    if known is not None:
        wants_pixels = lambda digest: not known.has(item, digest)  # noqa: E731 - an argument, once
    if isinstance(source, PictureReading):
        picture = source
    else:
        try:
            # A name that is no address and no file is left to the reader, which has words for it.
            data = read_remote(source) if isinstance(source, str) and is_remote(source) else source
            picture = reader.read(data, name=item.label, wants_pixels=wants_pixels)
        except PictureError as error:
            problem = AnswerError(code=error.code, message=error.message)
            picture = PictureReading(digest="", pixels=None, error=problem, elapsed_ms=0.0)
    if picture.error is not None and known is not None and known.has(item, picture.digest):
        picture = dataclasses.replace(picture, error=None)
    return dataclasses.replace(item, picture=picture)


@cache
def _reader(reading: Reading) -> Reader:
    """Kept for all chunks that this process reads."""
    if reading.kind == "thread":
        return PictureReader(reading.spec, size=reading.size)
    return IsolatedReader(reading.spec, size=reading.size, timeout_s=reading.timeout_s, num_processes=1)
