"""Digests of pictures, which show copies, and missing or unreadable pictures. Decodes nothing."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.image import DEFAULT_MAX_BYTES, read_picture_file

_MOST_LISTED = 100  # choices


def without_missing(found: Examples) -> None:
    """Refuse examples whose pictures are not files; each missing picture is one problem. Opens no picture."""
    exists: dict[str, bool] = {}
    kept = []
    for example in found.examples:
        source = example.item.source
        if isinstance(source, str) and source not in exists:
            exists[source] = os.path.isfile(source)
            if not exists[source]:
                found.refuse(example.place, f"its picture {source} does not exist", unreadable=example)
        if not isinstance(source, str) or exists[source]:
            kept.append(example)
    found.examples[:] = kept


def with_digests(found: Examples) -> None:
    """Set each example's digest, the SHA-256 of its picture's bytes. Unreadable and empty pictures are errors."""
    digests: dict[object, str] = {}
    kept = []
    for example in found.examples:
        source = example.item.source
        if source is None:
            kept.append(example)
            continue
        assert isinstance(source, str | bytes | FileSlice), "labelled data have no prefix files"
        if source not in digests:
            try:
                digests[source] = _digest(source)
            except PictureError as error:
                digests[source] = ""
                found.refuse(example.place, error.message, unreadable=example)
        if digests[source]:
            kept.append(replace(example, digest=digests[source]))
    found.examples[:] = kept


def _digest(source: str | bytes | FileSlice) -> str:
    if isinstance(source, FileSlice):
        source = source.read(max_bytes=DEFAULT_MAX_BYTES)
    elif isinstance(source, str):
        source = read_picture_file(source)
    if not source:
        raise PictureError("empty", "Wanted a picture, got zero bytes; save or copy it again.")
    return hashlib.sha256(source).hexdigest()


def data_digest(examples: Iterable[Example]) -> str:
    """SHA-256 of the pictures, questions and answers of the examples, in hexadecimal.

    It does not depend on the names of files and the order of the examples.
    """
    shortened = lru_cache(maxsize=1024)(_shortened)
    texts = sorted(
        json.dumps(
            [
                *(example.digest, example.question.instruction, example.question.input),
                *(example.answers, shortened(example.choices), sorted(example.item.columns.items())),
            ]
        )
        for example in examples
    )
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _shortened(choices: tuple[str, ...] | None) -> tuple[str, ...] | str | None:
    """Many choices as their digest: the classes of large data would be many gigabytes if each example listed them."""
    if choices is None or len(choices) <= _MOST_LISTED:
        return choices
    return hashlib.sha256(json.dumps(choices).encode()).hexdigest()
