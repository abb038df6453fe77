"""Programs as graphs: decode steps, one for each number of rows and attended length, and small programs of prompts.

Programs of prompts stay eager on devices that compile each shape, and if they have so many tokens that the device, not
the host, is the bottleneck.
"""

import functools
from collections.abc import Hashable

from torch import Tensor

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.eager import DecodeProgram, EagerRunner, PromptProgram
from llama_adapter.llm.runners.shapes import BUCKETED, STEPPED
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.devices.programs import GraphMode, RepeatedPrograms
from llama_adapter.runtime.operators import ATEN, Operators

# Tokens times weights of the layers, of prompts that are captured: 500 tokens of a 7B. With more of them, an H100
# computes longer than the host needs to launch the operators.
_MOST_WORK = 3.3e12


class GraphRunner(EagerRunner):
    """As `EagerRunner`, but the backend compiles decode steps in `config.mode` when their shape first occurs.

    Steps have few shapes because sizes are rounded up. Cache and prefix have fixed addresses, so that a
    program stays valid.
    """

    def __init__(
        self, decoder: LlamaAdapterDecoder, config: EngineConfig, *, backend: Backend, operators: Operators = ATEN
    ) -> None:
        shapes = BUCKETED if backend.capabilities.static_shapes else STEPPED
        super().__init__(decoder, config, backend=backend, operators=operators, shapes=shapes)
        self._programs: dict[tuple[int, int], DecodeProgram] = {}  # by rows and positions
        sizes = config.decoder
        self._num_weights = (
            sizes.num_layers * sizes.dim * (2 * (sizes.attention_dim + sizes.kv_dim) + 3 * sizes.ffn_dim)
        )
        self._mode = GraphMode(backend, config.mode)
        self._prompt_programs = RepeatedPrograms(self._mode, of="a program of prompts")

    def _decode_program(self, num_rows: int, length: int) -> DecodeProgram:
        # Fused steps read the positions on the device, so one program serves all lengths.
        is_fused = self._fused_decoder(num_rows) is not None
        key = num_rows, 0 if is_fused else length
        if key not in self._programs:
            compiled = self._mode.compile(super()._decode_program(num_rows, length))
            what = f"a decode step of {num_rows} rows" + ("" if is_fused else f" and {length} positions")

            def first_call(tokens_R1: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
                prediction: tuple[Tensor, Tensor] = self._mode.first_call(compiled, tokens_R1, positions_R, of=what)
                self._programs[key] = compiled
                return prediction

            return first_call
        return self._programs[key]

    def _slots(self, first: int, num_rows: int, *, num_tokens: int) -> slice | Tensor:
        if not self._may_be_recorded(num_tokens):
            return super()._slots(first, num_rows, num_tokens=num_tokens)
        return self._upload(range(first, first + num_rows))  # so one recording serves all slots

    def _prompt_program(self, key: Hashable, program: PromptProgram, *, num_tokens: int) -> PromptProgram:
        is_eager = not self._may_be_recorded(num_tokens)
        return program if is_eager else functools.partial(self._prompt_programs.run, key, program)

    def _may_be_recorded(self, num_tokens: int) -> bool:
        """Whether a program of so many tokens of prompts is recorded if its shape occurs again."""
        return not self._backend.capabilities.static_shapes and num_tokens * self._num_weights <= _MOST_WORK
