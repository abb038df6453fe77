"""Shares examples out among parts such as train and test, so that copies of a picture stay together."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from llama_adapter.app.labelled.checks import picture_key
from llama_adapter.app.labelled.example import Example

_UNITS = 10**6  # shares become integers, so that all machines round alike
_Label = tuple[str, str]  # part of the data, and answer


def split_examples(examples: Sequence[Example], *, shares: Mapping[str, float], seed: int) -> dict[str, list[Example]]:
    """The examples of each part of `shares`, in their order; for instance of {"train": 0.8, "test": 0.2}.

    All examples of a picture, by its digest, are in one part; so are those with the same question and no picture.
    Pictures are stratified by part of the data and answer. The first part of `shares` gets a picture of every answer
    that has at least two. A picture's place depends on the digests and answers and on the seed, and not on names, the
    order of the examples or the machine.

    A split that the data name wins, and is a part even if `shares` lacks it. What they leave open, and parts of
    `shares` that they lack, are taken from the examples without a split and from the first part.

    Raises ValueError if shares are not positive or do not sum to 1.
    """
    if not shares or min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"shares must be positive and sum to 1, got {dict(shares)}")
    first = next(iter(shares))
    named = _named_splits(examples, first=first)
    present = {example.split for example in examples if example.split}
    open_shares = {
        name: round(share * _UNITS) for name, share in shares.items() if name == first or name not in present
    }

    def fixed(example: Example) -> str:
        """The part that the data name; "" if it is to be found."""
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
    """The split of each picture that has one; of several, one that is held out."""
    names = defaultdict[str, set[str]](set)
    for example in examples:
        if example.split:
            names[picture_key(example)].add(example.split)
    return {key: min(of_one, key=lambda name: (name == first, name)) for key, of_one in names.items()}


def _drawn(
    groups: Mapping[str, Sequence[Example]], *, shares: Mapping[str, int], first: str, seed: int
) -> dict[str, str]:
    """The part of each group. Each takes the part that is furthest behind its share, one stratum after the other."""
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
            behind[part] = max(behind[part] - total, -total)  # what small strata took is not made up for later
            drawn[key] = part
    return drawn


def _strata(groups: Mapping[str, Sequence[Example]]) -> dict[str, _Label]:
    """The rarest answer of each group that another group has too; answers of one group are one stratum."""
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
