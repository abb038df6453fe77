"""Finds pictures in archives that tables name by paths such as `shard.tar/000.jpg`. Decodes nothing."""

import os
from collections import defaultdict
from dataclasses import replace

from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.labelled.pictures import SAME_NAME, require_compressed
from llama_adapter.app.pictures.inputs import PictureInput, natural_key
from llama_adapter.app.pictures.inputs.archives import archive_inputs, is_archive_name


def with_members(found: Examples) -> None:
    """Replace paths into archives by the pictures in the archives. Each archive is read once.

    Pictures of a compressed archive are held in memory. If an archive lacks a name, the path stays, and the picture is
    reported as missing later. A picture that cannot be extracted, a name that two pictures have, and a damaged archive
    are errors. Raises InputsError if the pictures of a compressed archive have too many bytes.
    """
    wanted = defaultdict[str, set[str]](set)
    for example in found.examples:
        source = example.item.source
        if isinstance(source, str) and (archive := archive_in(source)) is not None:
            wanted[archive].add(source)
    members: dict[str, PictureInput] = {}
    repeated = set[str]()
    for archive, names in wanted.items():
        num_bytes = 0
        for item in archive_inputs(archive):
            if item.label == archive and item.error is not None:
                found.refuse(archive, item.error.message)
            elif item.repeats in names:
                repeated.add(item.repeats)
            elif item.label in names:
                num_bytes += len(item.source) if isinstance(item.source, bytes) else 0
                require_compressed(num_bytes, archive=archive)
                members[item.label] = item
    for label in sorted(repeated, key=natural_key):
        found.refuse(label, SAME_NAME)
    if not members:
        return
    kept: list[Example] = []
    for example in found.examples:
        if example.item.label in repeated:
            continue
        member = members.get(example.item.label)
        if member is not None and member.error is not None:
            found.refuse(example.place, member.error.message, unreadable=example)
            continue
        kept.append(example if member is None else _from(example, member))
    found.examples[:] = kept


def archive_in(path: str) -> str | None:
    """The archive in a path, such as `a/shard.tar` in `a/shard.tar/b/c.jpg`; None if the path has no archive."""
    parts = path.split("/")
    places = (end for end in range(1, len(parts)) if is_archive_name(parts[end - 1]))
    return next(filter(os.path.isfile, ("/".join(parts[:end]) for end in places)), None)


def _from(example: Example, member: PictureInput) -> Example:
    return replace(example, item=replace(example.item, source=member.source, root=member.root))
