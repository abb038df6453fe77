"""Checks of examples: missing and unreadable pictures, copies, classes, splits. Decodes nothing and loads no model."""

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.labelled.rows import SPLITS, contradict, similar_split, what_is_asked
from llama_adapter.app.pictures.reading.sources import FileSlice
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.errors import PictureError
from llama_adapter.vision.files import DEFAULT_MAX_BYTES, read_picture_file

_MOST_NAMED = 10


def check_examples(found: Examples, *, question: str | None = None) -> None:
    """Check examples that have digests, and add the problems to `found`.

    Copies of a picture with different answers to the same question are errors. Such answers in conversations, classes
    with a single picture, and copies of a picture in two splits of the data are warnings. `question` is the question
    for examples that have none.
    """
    _check_copies(found, question=question)
    _check_classes(found)
    _check_splits(found)


def check_split_names(found: Examples, *, report: Callable[[str, str], None], chosen: str | None = None) -> None:
    """Report examples whose split is neither usual nor `chosen`, by `found.refuse` or `warn`: it may be misspelt."""
    counts = Counter(example.split for example in found.examples)
    unknown = [name for name in counts if name and name not in (*SPLITS, chosen)]
    if not unknown:
        return
    told = [f"{shown_excerpt(name)} ({_examples(counts[name])}{_meant(name)})" for name in unknown[:_MOST_NAMED]]
    told += [f"{len(unknown) - _MOST_NAMED:,} more"] * (len(unknown) > _MOST_NAMED)
    known = ", ".join(f"{name or 'without a split'} {counts[name]:,}" for name in (*SPLITS, "") if counts[name])
    report(
        "the splits of the data",
        f"wanted the splits {', '.join(SPLITS)}, got also {', '.join(told)}; the others: {known or 'none'}",
    )


def _examples(number: int) -> str:
    return "1 example" if number == 1 else f"{number:,} examples"


def _meant(name: str) -> str:
    similar = similar_split(name)
    return "" if similar is None else f"; did you mean {similar}?"


def picture_key(example: Example) -> str:
    """A key that is equal for copies of a picture, or for examples without picture that ask the same question."""
    return example.digest or f"{example.question.instruction}\n{example.question.input}"


def _check_copies(found: Examples, *, question: str | None) -> None:
    first, num_varied = dict[object, Example](), 0
    for example in found.examples:
        earlier = first.setdefault((picture_key(example), *what_is_asked(example, question=question)), example)
        if contradict(earlier, example) and (earlier.has_turns or example.has_turns):
            num_varied += 1
        elif contradict(earlier, example):
            one, other = (shown_excerpt(each.answers[0]) for each in (earlier, example))
            shown = "it asks" if not example.digest else f"{example.item.label} is a copy of {earlier.item.label}, with"
            found.refuse(
                example.place,
                f"{shown} the same question as {earlier.place}, with the answer {other} in place of {one}",
            )
    if num_varied:
        reason = "have another answer than an earlier one with the same picture and question; all are used"
        found.warn("the conversations of the data", f"{num_varied:,} {reason}")


def _check_classes(found: Examples) -> None:
    asked = [example for example in found.examples if example.choices is not None]
    if all(example.split for example in asked):
        return  # nothing is left to split
    pictures = defaultdict[tuple[tuple[str, ...] | None, str], dict[str, Example]](
        dict
    )  # class, which is (choices, answer) -> picture -> its first example
    num_asked = Counter(example.choices for example in asked)
    for example in asked:
        for answer in example.answers:
            pictures[example.choices, answer].setdefault(picture_key(example), example)
    for choices, answer in pictures:
        of_class = pictures[choices, answer]
        # Choices that only a few questions have, as in ScienceQA, are not classes.
        if len(of_class) == 1 and num_asked[choices] * 10 >= len(asked):
            reason = f"the class {shown_excerpt(answer)} has one example, so it cannot be both learnt and held out"
            found.warn(next(iter(of_class.values())).place, reason)


def _check_splits(found: Examples) -> None:
    splits = defaultdict[str, set[str]](set)
    for example in found.examples:
        if example.split and example.digest:
            splits[example.digest].add(example.split)
    both = Counter(" and ".join(sorted(names)) for names in splits.values() if len(names) > 1)
    for names, number in sorted(both.items()):
        found.warn("the splits of the data", f"pictures that are in {names}: {number:,}")


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
    """SHA-256, hexadecimal, of pictures, questions and answers, whatever the names of files and their order."""
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
