"""Reads a work item's picture, as far as its questions need it. Runs in the threads that read ahead."""

from collections.abc import Callable
from typing import NamedTuple

from llama_adapter.app.captioning.pictures import RemotePicture
from llama_adapter.app.captioning.work_items import WorkItem, WorkQuestion
from llama_adapter.app.pictures.reading.reader import PictureReading, Reader

# Takes an item and its picture's digest ("" if the picture cannot be read); returns the questions to answer.
Wants = Callable[[WorkItem, str], tuple[WorkQuestion, ...]]


class Looked(NamedTuple):
    """An item with its picture read, and its questions to answer."""

    item: WorkItem
    questions: tuple[WorkQuestion, ...]
    picture: PictureReading


def look_at(item: WorkItem, *, reader: Reader, wants: Wants | None) -> Looked:
    """Read an item's picture, as far as its questions need it."""
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


def carried_bytes(item: WorkItem) -> int:
    """Size in bytes of a picture file that is already in memory, such as a member of a compressed archive; else 0."""
    return len(item.picture) if isinstance(item.picture, bytes) else 0


def is_shareable(item: WorkItem) -> bool:
    """Whether another thread may read the picture. An image object may be in use, or belong to several items."""
    return not hasattr(item.picture, "getpixel")
