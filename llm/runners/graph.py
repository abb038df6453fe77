"""Programs as graphs: decode steps, one for each number of rows and attended length, and small programs of prompts.

Programs of prompts stay eager on devices that compile each shape, and if they have so many tokens that the device, not
the host, is the bottleneck.
"""

import contextlib
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.runners.eager import DecodeProgram, EagerRunner, PromptProgram
from llama_adapter.llm.runners.shapes import BUCKETED, STEPPED
from llama_adapter.runtime.device_failures import explain_device_error
from llama_adapter.runtime.devices import Backend
from llama_adapter.runtime.devices.repeated import RepeatedPrograms
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.operators import ATEN, Operators
from llama_adapter.runtime.problems import is_out_of_memory

# Far more than the programs of one runner, which are doublings of rows times doublings of positions. torch's default
# limit is 8; beyond it, programs run uncompiled or fail.
_MAX_PROGRAMS = 256
# Tokens times weights of the layers, of prompts that are captured: 500 tokens of a 7B. With more of them, an H100
# computes longer than the host needs to launch the operators.
_MOST_WORK = 3.3e12
_MOST_PROMPT_PROGRAMS = 64


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
        self._num_weights = sizes.num_layers * sizes.dim * (4 * sizes.attention_dim + 3 * sizes.ffn_dim)
        self._prompt_programs = RepeatedPrograms(self._record, most=_MOST_PROMPT_PROGRAMS)

    def _decode_program(self, num_rows: int, length: int) -> DecodeProgram:
        # Fused steps read the positions on the device, so one program serves all lengths.
        key = num_rows, length if self._fused_decoder(num_rows) is None else 0
        if key not in self._programs:
            compiled = self._backend.compile(super()._decode_program(num_rows, length), mode=self.config.mode)

            def first_call(tokens_R1: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
                what = f"a decode step of {num_rows} rows and {length} positions"
                prediction: tuple[Tensor, Tensor] = self._compile_by_running(compiled, tokens_R1, positions_R, of=what)
                self._programs[key] = compiled
                return prediction

            return first_call
        return self._programs[key]

    def _prompt_program(self, key: Hashable, program: PromptProgram, *, num_tokens: int) -> PromptProgram:
        if self._backend.capabilities.static_shapes or num_tokens * self._num_weights > _MOST_WORK:
            return program
        return self._prompt_programs.find(key, program)

    def _record(self, program: PromptProgram) -> PromptProgram:
        compiled = self._backend.compile(program, mode=self.config.mode)

        def recorded(*inputs: Tensor) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = self._compile_by_running(compiled, *inputs, of="a program of prompts")
            return result

        return recorded

    def _compile_by_running(self, compiled: Callable[..., Any], *inputs: Tensor, of: str) -> Any:
        """Run a program that its first call compiles. A failure is then due to the mode, not to the request."""
        try:
            with _many_programs():
                return compiled(*inputs)
        except Exception as error:  # compilers raise errors of any class
            if is_out_of_memory(error) or explain_device_error(str(error)) is not None:
                raise  # fewer rows may help, or the device itself failed
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DeviceError(
                f"{self._backend.name} cannot compile {of} in mode `{self.config.mode}` "
                f"({type(error).__name__}: {reason})",
                hint="pass `--mode eager`",
            ) from error


def _many_programs() -> AbstractContextManager[Any]:
    """A context with a higher limit of torch's compiler. If the mode uses the compiler, it is already imported."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    limits = {"recompile_limit": _MAX_PROGRAMS, "accumulated_recompile_limit": _MAX_PROGRAMS}
    patch: AbstractContextManager[Any] = sys.modules["torch._dynamo"].config.patch(limits)
    return patch
