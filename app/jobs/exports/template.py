"""The text that is written for a picture: a template with the answer and the picture's names."""

import os
import string
from dataclasses import dataclass
from typing import Final

from llama_adapter.app.pictures.names import name_as_text, place_of

FIELDS: Final = ("text", "stem", "parent")


@dataclass(frozen=True, slots=True)
class Template:
    """For example `shapeart, {text}`. `{stem}` is the picture's name without suffix, `{parent}` that of its folder."""

    text: str = "{text}"

    def __post_init__(self) -> None:
        """Raise ValueError for another field, or braces that are not closed or doubled."""
        try:
            parts = list(string.Formatter().parse(self.text))
        except ValueError:
            raise ValueError(f"template {self.text!r} has a brace alone: double a brace that is text") from None
        if any(name is not None and (name not in FIELDS or spec or conversion) for _, name, spec, conversion in parts):
            names = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise ValueError(f"wanted the fields {names} in a template, got {self.text!r}")

    def fill(self, *, picture: str, text: str) -> str:
        """The text for a picture of this name."""
        if self.text == "{text}":
            return text
        try:
            folder, name = os.path.split(place_of(picture))
        except ValueError:  # a null character in it
            folder, name = os.path.split(picture)
        parent, stem = os.path.basename(folder), os.path.splitext(name)[0]
        return self.text.format(text=text, stem=name_as_text(stem), parent=name_as_text(parent))
