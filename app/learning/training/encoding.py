"""Encodes the pictures of a run once, before the first step, on all ranks together."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from llama_adapter.app.jobs.progress import Progress
from llama_adapter.app.learning.training.batches import ChangedPixels, Encodings
from llama_adapter.app.learning.training.cache import CacheError, EncodedCache
from llama_adapter.app.learning.training.job import TrainJob
from llama_adapter.app.learning.training.model import TrainableModel
from llama_adapter.app.learning.training.plan import ENCODED_TOGETHER
from llama_adapter.app.learning.training.prepare import TrainingData, Unreadable
from llama_adapter.app.learning.training.ranks import OneRank
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.app.pictures.reading.isolated import IsolatedReader
from llama_adapter.app.pictures.reading.prefetch import Prefetcher
from llama_adapter.app.pictures.reading.reader import PictureReading, Reader
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.app.pictures.reading.spec import DEFAULT_PICTURE_TIMEOUT_S
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.terminal.stderr_lines import say
from llama_adapter.runtime.text import counted, shown_name
from llama_adapter.runtime.user_cache import cache_fault, cache_folder, is_temporary

_FOLDER: Final = "encoded"
_MOST_NAMED: Final = 20
_MANY: Final = 1000  # pictures whose encodings take a noticeable time to be checked


def _place(job: TrainJob, *, ranks: OneRank) -> Path:
    """The folder of encodings, which the ranks of a run share."""
    if job.cache is not None:
        return Path(job.cache)
    reason = cache_fault()
    if not is_temporary():
        try:
            return cache_folder() / _FOLDER
        except OSError as error:
            reason = str(error)
    place = job.folder / _FOLDER
    if ranks.is_first and not job.quiet:
        say(f"note: encoded pictures are kept in `{shown_name(str(place))}`; --encoded names another folder ({reason})")
    return place


def encode_all(
    job: TrainJob, model: TrainableModel, data: TrainingData, *, ranks: OneRank
) -> tuple[Encodings, list[Unreadable]]:
    """The encodings for all examples, and the pictures that are left out, which are the same on all ranks.

    All ranks must call it together. Raises UsageError if the data have pictures but the model sees none, CacheError if
    too many pictures cannot be read, and the errors of `encode_pictures`.
    """
    if model.encodes == "nothing":
        if any(one.has_picture for one in data.everything):
            raise UsageError(
                f"`{model.sources.name}` with an adapter for texts sees no pictures, and the data have some",
                hint="name a CLIP as --clip, or an adapter that sees pictures",
            )
        return Encodings(None, None), []
    nothing = model.encode_nothing().cpu()
    place = _place(job, ranks=ranks)
    spec = dataclasses.replace(job.spec.pictures, channel_order=model.vision_config.channel_order)
    encoder = f"{model.encoder_digest} {model.dtype} {spec}"
    cache = EncodedCache(place, encoder=encoder, shape=tuple(nothing.shape[1:]), dtype=nothing.dtype)
    pictures: dict[str, PictureInput] = {}
    for one in data.everything:
        if one.has_picture:
            pictures.setdefault(one.example.digest, one.example.item)
    num_pictures = len(pictures) + len(data.unreadable)
    is_shown = ranks.is_first and not job.quiet
    if is_shown and len(pictures) >= _MANY:
        say(f"looking for the encodings of {counted(len(pictures), 'picture')}")
    missing = cache.missing(pictures)
    if ranks.is_first:
        cache.require_room(len(missing))
    own = missing[ranks.rank :: ranks.size]
    if is_shown and missing:
        say(f"encoding {counted(len(missing), 'picture')}")
    reader = IsolatedReader(spec, pixels=model.vision_config.clip.pixels, timeout_s=DEFAULT_PICTURE_TIMEOUT_S)

    def encode(digests: list[str]) -> list[Unreadable]:
        chosen = {digest: pictures[digest] for digest in digests}
        return encode_pictures(cache, chosen, reader=reader, encode=model.encode, is_shown=is_shown)

    with contextlib.closing(reader):
        unreadable = encode(own) if own else []
        ranks.wait()
        known = {one.digest for one in unreadable}
        rest = [digest for digest in cache.missing(pictures) if digest not in known]
        if rest:  # the other ranks could not read these, or their cache is on another machine
            unreadable += encode(rest)
    unreadable += data.unreadable
    for line in check_unreadable(unreadable, num_pictures=num_pictures, most=job.most_unreadable):
        if ranks.is_first:
            say(line)
    kind = ChangedPixels if model.encodes == "pixels" else Encodings
    return kind(cache, nothing), unreadable


def encode_pictures(
    cache: EncodedCache,
    pictures: Mapping[str, PictureInput],
    *,
    reader: Reader,
    encode: Callable[[Tensor], Tensor],
    is_shown: bool = False,
) -> list[Unreadable]:
    """Encode and store the pictures, which are named by their digests; returns those that cannot be read.

    `encode` takes uint8 pixels (B, H, W, 3). Raises what `encode` raises, and OSError.
    """
    unreadable: list[Unreadable] = []

    def read(digest: str) -> tuple[str, PictureReading]:
        source = pictures[digest].source
        assert isinstance(source, str | bytes | FileSlice), "labelled data have no prefix files"
        return digest, reader.read(source, name=shown_name(pictures[digest].label))

    progress, num_encoded = Progress(visible=is_shown, count=lambda: len(pictures)), 0
    try:
        with Prefetcher(iter(pictures), read, ahead=2 * ENCODED_TOGETHER) as readings:
            while taken := readings.take(ENCODED_TOGETHER):
                whole = [(digest, one.pixels) for digest, one in taken if one.pixels is not None]
                for digest, one in taken:
                    if one.pixels is None:
                        reason = one.error.message if one.error is not None else "it has no pixels"
                        unreadable.append(Unreadable(label=pictures[digest].label, reason=reason, digest=digest))
                if whole:
                    encoded = encode(torch.from_numpy(np.stack([pixels for _, pixels in whole])))
                    for (digest, _), one in zip(whole, encoded, strict=True):
                        cache.put(digest, one)
                num_encoded += len(whole)
                progress.show(answered=num_encoded, failed=len(unreadable), known=0)
    finally:
        progress.clear()
    return unreadable


def check_unreadable(unreadable: Sequence[Unreadable], *, num_pictures: int, most: float) -> Iterator[str]:
    """Lines that name the pictures that are left out. Raises CacheError if these are more than the share `most`."""
    for one in unreadable[:_MOST_NAMED]:
        yield f"left out: {shown_name(one.label)}: {one.reason}"
    if len(unreadable) > _MOST_NAMED:
        yield f"left out: {len(unreadable) - _MOST_NAMED:,} more"
    if len(unreadable) > most * num_pictures:
        raise CacheError(
            f"{len(unreadable):,} of {num_pictures:,} pictures cannot be read, and at most {most:.0%} are left out",
            hint="repair or remove them, or allow more with --most-unreadable; finished encodings are kept",
        )
