"""The work of a captioner, as plain values: pictures and the questions about them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llama_adapter.app.captioning.pictures import Pictures, RemotePicture, given_pictures
from llama_adapter.app.inputs.urls import AllowedHost
from llama_adapter.app.reading.reader import PictureReading
from llama_adapter.app.reading.sources import Source
from llama_adapter.app.tasks.prompts import Prompt, RawPrompt
from llama_adapter.app.tasks.task import FREE_TEXT, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkQuestion:
    """One prompt about a picture; its answer carries its index."""

    index: int
    prompt: Prompt
    task: Task = FREE_TEXT
    tag: Any = None  # the caller's own data, for the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One picture, read and encoded once for all its questions."""

    picture: Source | RemotePicture | PictureReading  # to read, to download and read, or read already
    label: str
    questions: tuple[WorkQuestion, ...]


def work_items(
    pictures: Pictures,
    prompts: Sequence[Prompt] | str | RawPrompt | None,
    *,
    default_prompt: str,
    task: Task = FREE_TEXT,
    allowed: tuple[AllowedHost, ...] = (),
) -> list[WorkItem]:
    """Pair pictures with prompts; a single prompt serves all pictures. `allowed`: hosts to download pictures from.

    Raises ValueError when the counts differ, and as `given_pictures`.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        prompts = [default_prompt if prompts is None else prompts]
    given, prompts = given_pictures(pictures, allowed=allowed), list(prompts)
    if len(prompts) == 1:
        prompts = prompts * len(given)
    if len(prompts) != len(given):
        raise ValueError(f"{len(given)} pictures came with {len(prompts)} prompts: give one each, or one for all")
    return [
        WorkItem(
            picture=picture.source,
            label=f"picture {index}" if picture.name is None else picture.name,
            questions=(WorkQuestion(index=index, prompt=prompt, task=task),),
        )
        for index, (picture, prompt) in enumerate(zip(given, prompts, strict=True))
    ]
