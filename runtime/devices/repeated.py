"""Programs that are recorded as graphs when their shape occurs for the second time, because most jobs repeat few."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

TensorProgram = Callable[..., tuple[Tensor, ...]]


class RepeatedPrograms:
    """Programs by what their shapes and addresses depend on. At most `most` are recorded, because each costs memory."""

    def __init__(self, record: Callable[[TensorProgram], TensorProgram], *, most: int) -> None:
        self._record, self._most = record, most
        self._programs: dict[Hashable, TensorProgram | None] = {}  # None: has occurred once

    def __len__(self) -> int:
        return sum(program is not None for program in self._programs.values())

    def find(self, key: Hashable, program: TensorProgram) -> Callable[..., Any]:
        """What runs in place of `program`: the program itself, or its recording."""
        if key not in self._programs:
            if len(self._programs) < self._most:
                self._programs[key] = None
            return program
        recorded = self._programs[key]
        if recorded is None:
            recorded = self._programs[key] = self._record(program)
        return recorded
