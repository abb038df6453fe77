"""What a batch run takes and gives, as plain values: files, a question, results, progress."""

from collections.abc import Callable
from dataclasses import dataclass

from llama_adapter.app.records.record import Record
from llama_adapter.llm.engine.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureFile:
    """One picture that is not read yet; `read` gives the bytes of its file, or raises `PictureError`."""

    name: str  # printable, unique in its run
    read: Callable[[], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of every picture."""

    prompt: str
    choices: tuple[str, ...] | None
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One picture that is done with."""

    index: int  # in the order of the files
    record: Record
    thumbnail: str | None  # a data address


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is."""

    num_pictures: int | None  # None: nobody knows yet
    num_done: int  # those with an error among them
    num_failed: int
    elapsed_s: float
    pictures_per_s: float  # of the last seconds; of the whole run once it is over
    remaining_s: float | None
    waits_for: str  # why the service takes no more at the moment; empty while it does
