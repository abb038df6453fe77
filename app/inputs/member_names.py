"""Names of an archive's pictures: an archive may have several members of one name."""

import os

from llama_adapter.app.records.picture_names import name_key


class MemberNames:
    """Gives each picture of one archive a name of its own: `a.png`, and the next one of that name `a (2).png`."""

    def __init__(self) -> None:
        self._taken: set[int] = set()  # digests, as there may be millions of names
        self._numbers: dict[str, int] = {}  # of names that came again, the last number

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
