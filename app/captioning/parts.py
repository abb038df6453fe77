"""The parts of a captioner. Imports no torch: exported models run without it."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llama_adapter.app.models.spec import CaptionerSpec, ModelInfo
from llama_adapter.llm.runners.base import Runner
from llama_adapter.runtime.errors import UsageError

if TYPE_CHECKING:
    from llama_adapter.vision.backends.base import VisionBackend


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The parts of a captioner, on their device. The spec has all values resolved."""

    spec: CaptionerSpec
    info: ModelInfo
    model: Any  # with a `Tokenizer` and an `OodDetector | None`; from checkpoints a LoadedModel without its weights
    backend: Any  # a `runtime.devices.Backend`, or a `GraphBackend` without torch
    vision: "VisionBackend"
    runner: Runner
    remember_rows: Callable[[int], str] | None = None  # stores a reduced batch size; None: user's choice
    end_ranks: Callable[[], None] = lambda: None  # ends the other ranks of a split decoder

    def close(self) -> None:
        """Release an exported encoder's device, thread and process, and end other ranks. Can be called again."""
        self.vision.close()
        self.end_ranks()


class GraphBackend:
    """Replaces a torch device: graphs run when they are called, and the call returns when they are done."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, "cpu"

    def empty_caches(self) -> None:
        """Nothing is cached."""

    def synchronise(self) -> None:
        """Nothing is queued."""

    def mark(self) -> None:
        """Nothing is queued."""

    @property
    def profiler(self) -> Any:
        """Raises UsageError, because the profiler is part of torch."""
        raise UsageError(
            "An exported decoder has no trace: the profiler is torch's", hint="leave out --trace, or --decoder"
        )
