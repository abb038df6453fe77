"""Divides examples into parts such as train and test, keeping copies of a picture in the same part."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from llama_adapter.app.learning.labelled.checks import picture_key
from llama_adapter.app.learning.labelled.example import Example

_UNITS = 10**6  # shares become integers of this unit, so that all machines round in the same way
_Label = tuple[str, str]  # part of the data, and answer


def split_examples(examples: Sequence[Example], *, shares: Mapping[str, float], seed: int) -> dict[str, list[Example]]:
    """Divide examples into parts, for example with `shares` {"train": 0.8, "test": 0.2}, whose sum is 1.

    Parts keep the order.

    All examples with the same picture (by digest) are in the same part, and all examples without picture that ask the
    same question. Pictures are stratified by answer and `Example.part`. The first part of `shares` gets a picture of
    every answer that has at least two pictures. The result depends on the digests, the answers and the seed only, not
    on names, the order of the examples or the machine.

    Splits that the data name take precedence, and are parts even if `shares` lacks them. Parts of `shares` that the
    data do not name are drawn from the examples without a split and from those of the first part.
    """
    first = next(iter(shares))
    named = _named_splits(examples, first=first)
    present = {example.split for example in examples if example.split}
    open_shares = {
        name: round(share * _UNITS) for name, share in shares.items() if name == first or name not in present
    }

    def fixed(example: Example) -> str:
        """The part that the data name; "" if it must be drawn."""
        key = picture_key(example)
        name = example.split or named.get(key, "")
        return "" if name == first == named[key] and len(open_shares) > 1 else name

    free = defaultdict[str, list[Example]](list)
    for example in examples:
        if not fixed(example):
            free[picture_key(example)].append(example)
    drawn = _drawn(free, shares=open_shares, first=first, seed=seed)
    parts: dict[str, list[Example]] = {name: [] for name in (*shares, *sorted(present - set(shares)))}
    for example in examples:
        parts[fixed(example) or drawn[picture_key(example)]].append(example)
    return parts


def _named_splits(examples: Sequence[Example], *, first: str) -> dict[str, str]:
    """The split of each picture that has one. If a picture has several, a split other than `first` is preferred."""
    names = defaultdict[str, set[str]](set)
    for example in examples:
        if example.split:
            names[picture_key(example)].add(example.split)
    return {key: min(of_one, key=lambda name: (name == first, name)) for key, of_one in names.items()}


def _drawn(
    groups: Mapping[str, Sequence[Example]], *, shares: Mapping[str, int], first: str, seed: int
) -> dict[str, str]:
    """The part of each group. Strata follow one another; a group goes to the part that is furthest below its share."""
    strata = defaultdict[_Label, list[str]](list)
    for key, label in _strata(groups).items():
        strata[label].append(key)
    behind, total = dict.fromkeys(shares, 0), sum(shares.values())
    drawn = {}
    for label in sorted(strata):
        keys = sorted(strata[label], key=lambda key: hashlib.sha256(f"{seed}\n{key}".encode()).digest())
        for index, key in enumerate(keys):
            for name, share in shares.items():
                behind[name] += share
            is_to_learn = index == 0 and label[1] != ""
            part = first if is_to_learn else max(behind, key=behind.__getitem__)
            behind[part] = max(behind[part] - total, -total)  # an excess from small strata is not compensated later
            drawn[key] = part
    return drawn


def _strata(groups: Mapping[str, Sequence[Example]]) -> dict[str, _Label]:
    """The stratum of each group: its rarest answer among those that other groups have too.

    Groups without such an answer are one stratum for each part of the data.
    """
    labels = {key: {_label(example) for example in group} for key, group in groups.items()}
    counts = Counter(label for of_one in labels.values() for label in of_one)
    return {
        key: min(
            (label for label in of_one if counts[label] > 1),
            key=lambda label: (counts[label], label),
            default=(min(of_one)[0], ""),
        )
        for key, of_one in labels.items()
    }


def _label(example: Example) -> _Label:
    return example.part, "" if example.task == "caption" else example.answers[0]
