"""The work of a captioner: pictures with the questions about them, or prompts without a picture, and their reading."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from llama_adapter.app.captioning.tasks.prompts import Dialogue, Prompt, Prompts, RawPrompt
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task
from llama_adapter.app.pictures.inputs.remote import RemotePicture
from llama_adapter.app.pictures.inputs.urls import AllowedHost
from llama_adapter.app.pictures.reading.prefetch import Prefetcher, num_reading_threads
from llama_adapter.app.pictures.reading.reader import PictureReading, Reader, joined
from llama_adapter.app.pictures.reading.sources import Source
from llama_adapter.llm.prefix import TextPrefix
from llama_adapter.vision.errors import PictureError

if TYPE_CHECKING:  # they are imported for the first picture
    import numpy as np

    from llama_adapter.app.captioning.pictures import Pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkQuestion:
    """One prompt; its answer has the same index."""

    index: int
    prompt: Prompt
    task: Task = FREE_TEXT
    tag: Any = None  # the caller's own data, copied to the answer
    number: int = 0  # among several answers to one prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One picture, read and encoded once for all its questions. Without a picture, see `text_items`."""

    picture: Source | RemotePicture | PictureReading  # to read, to download and read, or read already
    label: str
    questions: tuple[WorkQuestion, ...]
    others: tuple[Source | RemotePicture | PictureReading, ...] = ()  # further pictures of the same prompt

    @property
    def num_pictures(self) -> int:
        """The number of its pictures; 0 for a prompt without a picture."""
        is_text = isinstance(self.picture, PictureReading) and self.picture.digest in get_args(TextPrefix)
        return 0 if is_text else 1 + len(self.others)

    @property
    def read_s(self) -> float:
        """Seconds spent on pictures that were read before the item was made."""
        given = (self.picture, *self.others)
        return sum(one.elapsed_ms for one in given if isinstance(one, PictureReading)) / 1e3

    def repeated(self, count: int) -> "WorkItem":
        """The item with each question `count` times, with consecutive indices."""
        if count == 1:
            return self
        asked = (
            replace(question, index=question.index * count + number, number=number)
            for question in self.questions
            for number in range(count)
        )
        return replace(self, questions=tuple(asked))


def work_items(
    pictures: "Pictures",
    prompts: Iterable[Prompt] | str | Dialogue | RawPrompt | None,
    *,
    default_prompt: str,
    task: Task = FREE_TEXT,
) -> list[WorkItem]:
    """Pair pictures with prompts; a single prompt is used for all pictures.

    Raises ValueError if the counts differ, and the errors of `given_pictures`.
    """
    from llama_adapter.app.captioning.pictures import given_pictures

    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        prompts = [default_prompt if prompts is None else prompts]  # type: ignore[list-item]
    given, prompts = given_pictures(pictures), list(prompts)
    if len(prompts) == 1:
        prompts = prompts * len(given)
    if len(prompts) != len(given):
        raise ValueError(f"{len(given)} pictures came with {len(prompts)} prompts: give one each, or one for all")
    return [
        WorkItem(
            picture=picture.source,
            label=f"picture {index}" if picture.name is None else picture.name,
            questions=(WorkQuestion(index=index, prompt=prompt, task=task),),
            others=picture.others,
        )
        for index, (picture, prompt) in enumerate(zip(given, prompts, strict=True))
    ]


def text_items(prompts: Prompts, *, text_prefix: TextPrefix, task: Task = FREE_TEXT) -> list[WorkItem]:
    """Make one item without a picture for each prompt.

    A text, a `RawPrompt`, a `Dialogue`, a tuple (instruction, input) or a list of token ids is one prompt. Any other
    value is iterated.
    """
    several: list[Prompt] = [prompts] if is_one_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
    return [
        WorkItem(
            picture=PictureReading(digest=text_prefix),
            label=f"prompt {index}",
            questions=(WorkQuestion(index=index, prompt=prompt, task=task),),
        )
        for index, prompt in enumerate(several)
    ]


def is_one_prompt(prompts: Any) -> bool:
    """Whether a value is one prompt, and no collection of prompts."""
    match prompts:
        case str() | bytes() | Mapping() | RawPrompt() | Dialogue():
            return True
        case (str(), str() | None) if isinstance(prompts, tuple):
            return True
        case [first, *_]:
            return hasattr(first, "__index__") and not getattr(first, "shape", ())  # arrays have `__index__` too
        case _:
            return not isinstance(prompts, Iterable)


# Takes an item and its picture's digest ("" if the picture cannot be read); returns the questions to answer.
Wants = Callable[[WorkItem, str], tuple[WorkQuestion, ...]]


class Looked(NamedTuple):
    """An item with its picture read, and its questions to answer."""

    item: WorkItem
    questions: tuple[WorkQuestion, ...]
    picture: PictureReading


def look_at(item: WorkItem, *, reader: Reader, wants: Wants | None) -> Looked:
    """Read an item's pictures, as far as its questions need them."""
    if item.others:
        alone = [replace(item, picture=one, others=()) for one in (item.picture, *item.others)]
        together = joined([look_at(one, reader=reader, wants=None).picture for one in alone])
        return Looked(item, item.questions if wants is None else wants(item, together.digest), together)
    picture = item.picture
    if isinstance(picture, RemotePicture):
        picture = picture.read(reader, name=item.label)
    if isinstance(picture, PictureReading):
        return Looked(item, item.questions if wants is None else wants(item, picture.digest), picture)
    if wants is None:
        return Looked(item, item.questions, reader.read(picture, name=item.label))
    questions: tuple[WorkQuestion, ...] | None = None

    def wants_pixels(digest: str) -> bool:
        nonlocal questions
        questions = wants(item, digest)
        return bool(questions)

    reading = reader.read(picture, name=item.label, wants_pixels=wants_pixels)
    # `wants_pixels` was not called if the bytes could not be read, or if the digest is known only after decoding.
    return Looked(item, wants(item, reading.digest) if questions is None else questions, reading)


def read_pixels(
    picture: "Pictures", *, name: str, reader: Reader, allowed: tuple[AllowedHost, ...] = ()
) -> "np.ndarray":
    """The pixels of one picture, as the reader makes them. Messages use `name` for a picture without a name.

    Raises PictureError, ValueError for several pictures, and the errors of `given_pictures`.
    """
    from llama_adapter.app.captioning.pictures import given_pictures

    found = given_pictures(picture, allowed=allowed)
    if len(found) != 1:
        value = getattr(picture, "shape", picture)
        raise ValueError(f"Wanted one picture as {name}, got {len(found)} of {value!r:.200}: give them one by one")
    (one,) = found
    item = WorkItem(picture=one.source, label=one.name or name, questions=(), others=one.others)
    reading = look_at(item, reader=reader, wants=None).picture
    if reading.error is not None:
        raise PictureError(reading.error.code, reading.error.message)  # type: ignore[arg-type]
    assert reading.pixels is not None, "a picture without error has pixels"
    return reading.pixels


def read_ahead(
    items: Iterable[WorkItem],
    *,
    reader: Reader,
    batch_size: int,
    device: str,
    wants: Wants | None = None,
    may_wait: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Prefetcher[WorkItem, Looked]:
    """Read the pictures of items up to two batches ahead; those with nothing to answer are dropped.

    `device` computes. The other parameters are those of `Captioner.run`.
    """
    return Prefetcher(
        iter(items),
        partial(look_at, reader=reader, wants=wants),
        ahead=2 * batch_size,
        shareable=is_shareable,
        num_bytes=carried_bytes,
        wanted=lambda looked: bool(looked.questions),
        num_threads=num_reading_threads(device),
        may_wait=may_wait,
        stop=stop,
    )


def carried_bytes(item: WorkItem) -> int:
    """Size in bytes of a picture file that is already in memory, such as a member of a compressed archive; else 0."""
    return len(item.picture) if isinstance(item.picture, bytes) else 0


def is_shareable(item: WorkItem) -> bool:
    """Whether another thread may read the pictures. An image object may be in use, or belong to several items."""
    return not any(hasattr(one, "getpixel") for one in (item.picture, *item.others))
