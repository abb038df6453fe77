"""Programs of fixed shapes in a graph mode: the first call, which compiles, and recordings of shapes that occur again.

Most jobs repeat few shapes, so a program is recorded when its shape occurs for the second time.
"""

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llama_adapter.runtime.device_failures import is_failed_device
from llama_adapter.runtime.devices.base import Backend, Program
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.problems import is_out_of_memory

# Far more than the programs of one runner, which are doublings of rows times doublings of positions. torch's default
# limit is 8; beyond it, programs run uncompiled or fail.
_MAX_PROGRAMS = 256
_MOST_RECORDED = 64  # by one owner: each recording costs memory
_MOST_KEYS = 4096  # that are counted
_PAUSE = 100  # occurrences of a key after which a recording is tried again that memory was insufficient for

TensorProgram = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class GraphMode:
    """A graph mode of a device."""

    backend: Backend
    name: str

    def compile(self, program: Program) -> Program:
        """As `Backend.compile`."""
        return self.backend.compile(program, mode=self.name)

    def first_call(self, compiled: Callable[..., Any], *inputs: Tensor, of: str) -> Any:
        """The first call of a compiled program, which compiles it. `of` names the program in errors.

        Raises DeviceError if the mode cannot compile it. Out-of-memory errors and errors of a failed device are passed
        on.
        """
        try:
            with _many_programs():
                return compiled(*inputs)
        except Exception as error:  # compilers raise errors of any class
            if is_out_of_memory(error) or is_failed_device(str(error)):
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DeviceError(
                f"{self.backend.name} cannot compile {of} in mode `{self.name}` ({type(error).__name__}: {reason})",
                hint="pass `--mode eager`; `--operators aten` may help too",
            ) from error


def _many_programs() -> AbstractContextManager[Any]:
    """A context with a higher limit of torch's compiler. If the mode uses the compiler, it is already imported."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    limits = {"recompile_limit": _MAX_PROGRAMS, "accumulated_recompile_limit": _MAX_PROGRAMS}
    patch: AbstractContextManager[Any] = sys.modules["torch._dynamo"].config.patch(limits)
    return patch


class RepeatedPrograms:
    """Programs of one owner by key: what their shapes, dtypes and addresses depend on.

    At most `most` are recorded. Then a key takes the place of a rarer one when it has occurred twice as often. So keys
    that occur in turn do not replace each other again and again.
    """

    def __init__(self, mode: GraphMode, *, of: str, most: int = _MOST_RECORDED) -> None:
        """`of` names the programs in errors."""
        self._mode, self._of, self._most = mode, of, most
        self._counts: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, TensorProgram] = {}

    def run(self, key: Hashable, program: TensorProgram, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results of `program`, by its recording if there is one; see `Backend.compile`.

        If memory is insufficient for a recording, the program runs without it.
        """
        self._count(key)
        if (recorded := self._recorded.get(key)) is not None:
            return recorded(*inputs)
        if self._is_worth_recording(key) and (results := self._record(key, program, *inputs)) is not None:
            return results
        return program(*inputs)

    def _count(self, key: Hashable) -> None:
        self._counts[key] += 1
        if len(self._counts) > _MOST_KEYS:  # forget those that occurred once, and let the others become rarer
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})

    def _is_worth_recording(self, key: Hashable) -> bool:
        has_place = len(self._recorded) < self._most
        return self._counts[key] >= 2 * (1 if has_place else max(1, self._counts[self._rarest()]))

    def _rarest(self) -> Hashable:
        """The recorded key that has occurred least often."""
        return min(self._recorded, key=self._counts.__getitem__)

    def _record(self, key: Hashable, program: TensorProgram, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """Record a program by its first call; None if memory is insufficient."""
        compiled = self._mode.compile(program)
        try:
            results: tuple[Tensor, ...] = self._mode.first_call(compiled, *inputs, of=self._of)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        else:
            if len(self._recorded) == self._most:
                del self._recorded[self._rarest()]
            self._recorded[key] = compiled
            return results
        self._counts[key] = -_PAUSE
        self._mode.backend.empty_caches()
        return None
