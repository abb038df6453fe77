"""Counts what a reader of pictures and tables leaves out, so that one note can say it."""

from dataclasses import dataclass, field

from llama_adapter.runtime.text import shown_name


@dataclass(slots=True)
class LeftOut:
    """Numbers of what was left out, by kind, each with its first place. Kinds are plurals: "pictures without text"."""

    _found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, kind: str, place: str, *, number: int = 1) -> None:
        """Count `number` more of a kind; `place` is where the first of them is."""
        before, first = self._found.get(kind, (0, place))
        self._found[kind] = before + number, first

    def extend(self, other: "LeftOut") -> None:
        """Add what `other` has counted."""
        for kind, (number, place) in other._found.items():
            self.add(kind, place, number=number)

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self) -> str:
        """All counts in one line; empty if nothing was left out."""
        return ", ".join(
            f"{kind}: {number:,} (first: {shown_name(place)})" for kind, (number, place) in self._found.items()
        )
