"""Unique names for the pictures of an archive, which may have several members with the same name."""

import os

from llama_adapter.app.pictures.names import name_key


class MemberNames:
    """Gives each picture of one archive a unique name: `a.png`, then `a (2).png` for the next member `a.png`."""

    def __init__(self) -> None:
        self._taken: set[int] = set()  # digests, because an archive may have millions of names
        self._numbers: dict[str, int] = {}  # by repeated name: the last number given

    def take(self, name: str) -> str:
        """The name, or the next numbered one if an earlier picture has it."""
        candidate, number = name, self._numbers.get(name, 1)
        while (digest := name_key(candidate)) in self._taken:
            number += 1
            stem, suffix = os.path.splitext(name)
            candidate = f"{stem} ({number}){suffix}"
        if candidate != name:
            self._numbers[name] = number
        self._taken.add(digest)
        return candidate
