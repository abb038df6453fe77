"""What a captioner is given to do: a picture and the questions about it. Plain values."""

from dataclasses import dataclass
from typing import Any

from llama_adapter.app.reading.reader import PictureReading
from llama_adapter.app.reading.sources import Source
from llama_adapter.app.tasks.prompts import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkQuestion:
    """One prompt about a picture; it gets one answer."""

    index: int  # comes back with the answer
    prompt: Prompt
    choices: tuple[str, ...] | None = None  # the answer is the likeliest of them
    tag: Any = None  # the caller's own data, which comes back with the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One picture, read and encoded once for all its questions."""

    picture: Source | PictureReading  # what to read, or what was read elsewhere
    label: str
    questions: tuple[WorkQuestion, ...]
