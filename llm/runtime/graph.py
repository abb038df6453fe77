"""Decode steps as graphs: one compiled program for each number of rows and attended length. Prefill stays eager."""

from llm.model.llama import LlamaAdapterDecoder
from llm.model.ops import ATEN, Operators
from llm.runtime.backend import Backend
from llm.runtime.executor import DecodeProgram, EagerExecutor
from llm.runtime.shapes import BucketedShapes

# Programs of one executor: doublings of rows times doublings of positions, far from it. torch's own limit is 8, beyond
# which it would run them uncompiled, or fail.
_MAX_PROGRAMS = 256


class GraphExecutor(EagerExecutor):
    """As `EagerExecutor`, with decode steps compiled by the backend when their shape first comes.

    Shapes are bucketed, and cache and prefix lie at fixed addresses, so that a program stays valid.
    """

    def __init__(
        self,
        decoder: LlamaAdapterDecoder,
        *,
        backend: Backend,
        num_slots: int,
        mode: str,
        operators: Operators = ATEN,
    ) -> None:
        super().__init__(decoder, backend=backend, num_slots=num_slots, shapes=BucketedShapes(), operators=operators)
        self._backend, self._mode = backend, mode
        self._programs: dict[tuple[int, int], DecodeProgram] = {}

    @property
    def programs(self) -> tuple[tuple[int, int], ...]:
        """Rows and positions of the programs that were compiled so far."""
        return tuple(self._programs)

    def _decode_program(self, num_rows: int, length: int) -> DecodeProgram:
        key = num_rows, length
        if key not in self._programs:
            _allow_many_programs()
            self._programs[key] = self._backend.compile(super()._decode_program(num_rows, length), mode=self._mode)
        return self._programs[key]


def _allow_many_programs() -> None:
    import torch._dynamo  # late: it costs a second of every start

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MAX_PROGRAMS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _MAX_PROGRAMS)
