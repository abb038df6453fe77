"""When a device's memory is not enough: what failed is forgotten, and less is tried at once.

The loop (app/loop.py) says what is tried again; how much is tried at first is decided in app/models/memory_fit.py.
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
    """What `action` returns; None when memory was not enough for it, and then nothing holds on to its tensors.

    Raises what `action` raises; the lack of memory, too, where it `is_least`: where less cannot be tried.
    """
    try:
        return action()
    except Exception as error:
        if is_least or not is_out_of_memory(error):
            raise
        _let_go(error)
    return None


def free_memory(empty_caches: Callable[[], None]) -> None:
    """Bring back what failed steps leave behind; `empty_caches` is the device's own way."""
    gc.collect()
    empty_caches()


class OomRetry:
    """How far one captioner's batches were made smaller. It lives as long as the captioner, through all its runs."""

    def __init__(
        self, *, empty_caches: Callable[[], None] = lambda: None, remember: Callable[[int], str] | None = None
    ) -> None:
        """`remember` is told how many rows are left, for later runs, and returns what people should know of that."""
        self.tell: Callable[[str], None] = _log.warning  # takes a sentence for people, each time that less is tried
        self.most_pictures: int | None = None  # that the encoder is given at once; None: all there are
        self._empty_caches, self._remember = empty_caches, remember

    def fewer_pictures(self, num_pictures: int) -> None:
        """The encoder could not take so many at once: from now on half of them."""
        self.most_pictures = max(1, num_pictures // 2)
        free_memory(self._empty_caches)
        self.tell(f"out of memory with {num_pictures} pictures in the encoder: going on with {self.most_pictures}")

    def fewer_rows(self, engine: Engine, *, num_rows: int) -> None:
        """A step of `num_rows` failed: forget all that is in the engine, which runs half of them from now on.

        Only a full batch is remembered: what a few rows at the end of a run lacked, others had taken.
        """
        was_full = num_rows == engine.num_rows
        engine.reset()
        engine.limit_rows(max(1, num_rows // 2))
        free_memory(self._empty_caches)
        self.tell(f"out of memory with {num_rows} rows: going on with {engine.num_rows}")
        if was_full and self._remember is not None and (note := self._remember(engine.num_rows)):
            self.tell(note)


def _let_go(error: BaseException) -> None:
    """Drop the local variables, tensors among them, of all calls that an error and its causes came through."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            traceback.clear_frames(cause.__traceback__)
            waiting += [cause.__cause__, cause.__context__]
