"""Programs that are recorded as graphs when their shape occurs for the second time, because most jobs repeat few."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

TensorProgram = Callable[..., tuple[Tensor, ...]]


class RepeatedPrograms:
    """Programs by what their shapes and addresses depend on. At most `most` are recorded, because each costs memory."""

    def __init__(self, record: Callable[[TensorProgram], TensorProgram], *, most: int) -> None:
        self._record, self._most = record, most
        self._seen: set[Hashable] = set()
        self._recorded: dict[Hashable, TensorProgram] = {}

    def find(self, key: Hashable, program: TensorProgram) -> Callable[..., Any]:
        """What runs in place of `program`: the program itself, or its recording."""
        if key in self._seen and key not in self._recorded and len(self._recorded) < self._most:
            self._recorded[key] = self._record(program)
        self._seen.add(key)
        return self._recorded.get(key, program)
