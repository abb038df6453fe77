"""After an out-of-memory error: free the memory of the failed step, and retry with a smaller batch.

`CaptionLoop` retries; app/models/memory_fit.py chooses the first batch size.
"""

import gc
import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

from llama_adapter.llm.engine.engine import Engine
from llama_adapter.runtime.problems import is_out_of_memory

_log = logging.getLogger("llama_adapter.memory")

_Result = TypeVar("_Result")


def attempt(action: Callable[[], _Result], *, is_least: bool) -> _Result | None:
    """The result of `action`, or None after an out-of-memory error; the tensors of `action` are then released.

    Raises other errors of `action`. With `is_least`, `action` cannot be tried with a smaller batch, and the
    out-of-memory error is raised too.
    """
    try:
        return action()
    except Exception as error:
        if is_least or not is_out_of_memory(error):
            raise
        _clear_frames(error)
    return None


def free_memory(empty_caches: Callable[[], None]) -> None:
    """Release the memory of failed steps; `empty_caches` is the device's own function."""
    gc.collect()
    empty_caches()


class OomRetry:
    """The reduced batch sizes of one captioner. The object lives as long as the captioner."""

    def __init__(self, *, empty_caches: Callable[[], None] = lambda: None) -> None:
        self.tell: Callable[[str], None] = _log.warning  # called with a sentence for the user at each reduction
        self.most_pictures: int | None = None  # per call of the encoder; None: no limit
        self._empty_caches = empty_caches

    def fewer_pictures(self, num_pictures: int) -> None:
        """Halve the encoder's batch, after it failed with `num_pictures`."""
        self.most_pictures = max(1, num_pictures // 2)
        free_memory(self._empty_caches)
        self.tell(f"out of memory with {num_pictures} pictures in the encoder: going on with {self.most_pictures}")

    def fewer_rows(self, engine: Engine, *, num_rows: int) -> None:
        """Empty the engine and halve its rows, after a step of `num_rows` failed."""
        engine.reset()
        engine.limit_rows(max(1, num_rows // 2))
        free_memory(self._empty_caches)
        self.tell(f"out of memory with {num_rows} rows: going on with {engine.num_rows}")


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables, which include tensors, of all frames of an error and its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            waiting += [cause.__cause__, cause.__context__]
