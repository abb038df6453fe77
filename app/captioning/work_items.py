"""The work of a captioner, as plain values: pictures and the questions about them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.reading.reader import PictureReading
from llama_adapter.app.reading.sources import Source
from llama_adapter.app.tasks.prompts import Prompt, RawPrompt
from llama_adapter.app.tasks.task import FREE_TEXT, Task
from llama_adapter.vision.image import PictureSource


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkQuestion:
    """One prompt about a picture; its answer carries its index and tag."""

    index: int
    prompt: Prompt
    task: Task = FREE_TEXT
    tag: Any = None  # the caller's own data, which comes back with the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One picture, read and encoded once for all its questions."""

    picture: Source | PictureReading  # to read, or read already
    label: str
    questions: tuple[WorkQuestion, ...]


def work_items(
    pictures: Sequence[PictureSource],
    prompts: Sequence[Prompt] | str | RawPrompt | None,
    *,
    default_prompt: str,
    task: Task = FREE_TEXT,
) -> list[WorkItem]:
    """Pair pictures with prompts; a single prompt serves all pictures. Raises ValueError when the counts differ."""
    if isinstance(pictures, (str, bytes, os.PathLike)) or hasattr(pictures, "getpixel"):
        raise ValueError("pictures must be a list of pictures, got a single one: put it in brackets")
    if prompts is None or isinstance(prompts, (str, RawPrompt)):
        prompts = [default_prompt if prompts is None else prompts]
    pictures, prompts = list(pictures), list(prompts)
    if len(prompts) == 1:
        prompts = prompts * len(pictures)
    if len(prompts) != len(pictures):
        raise ValueError(f"{len(pictures)} pictures came with {len(prompts)} prompts: give one each, or one for all")
    return [
        WorkItem(
            picture=picture,
            label=_label(picture, index),
            questions=(WorkQuestion(index=index, prompt=prompt, task=task),),
        )
        for index, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True))
    ]


def _label(picture: PictureSource, index: int) -> str:
    return f"picture {index}" if isinstance(picture, bytes) or hasattr(picture, "getpixel") else str(picture)
