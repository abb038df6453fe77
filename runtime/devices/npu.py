"""Ascend NPUs through torch_npu, which is imported when an NPU is opened."""

import contextlib
import importlib
import importlib.util
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from llama_adapter.runtime.devices.base import EAGER, Accelerator, Backend, Capabilities, Mark, Program, require_mode
from llama_adapter.runtime.devices.npu_linear import build_linear, choose_linear, refusal
from llama_adapter.runtime.devices.npu_load import OTHERWISE, first_line, load_torch_npu
from llama_adapter.runtime.devices.npu_operators import FRACTAL_NZ, LAYOUT, TILED, Choice, choose, family_of
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.operators import DecoderSizes, Operators
from llama_adapter.runtime.schemes import FLOAT, OperatorChoice, Precision
from llama_adapter.runtime.schemes.layers import dequantise_linears, float_type, replace_quantised


def open_npu(index: int) -> "NpuBackend":
    """Backend of one NPU, counted from 0. Raises DeviceError if torch_npu or that device is unavailable."""
    torch_npu = load_torch_npu()
    count = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
    if count == 0:
        raise DeviceError(
            "torch_npu and CANN are installed, but there is no NPU: torch.npu.is_available() is False",
            hint="`npu-smi info` must list one; look at the driver, ASCEND_RT_VISIBLE_DEVICES, and the devices that a "
            "container was given" + OTHERWISE,
        )
    if index >= count:
        available = ", ".join(f"npu:{number}" for number in range(count))
        raise DeviceError(
            f"No device named `npu:{index}`; available: {available}",
            hint="pass one of these as --device, `cpu`, or `auto`",
        )
    try:
        torch_npu.npu.set_device(index)
        return NpuBackend(index, torch_npu=torch_npu)
    except RuntimeError as error:
        raise DeviceError(
            f"npu:{index} cannot be opened ({first_line(error)})",
            hint="`npu-smi info` shows its health and the processes that use it" + OTHERWISE,
        ) from error


NPU = Accelerator(
    kind="npu",
    is_installed=lambda: importlib.util.find_spec("torch_npu") is not None,
    count=lambda: None,
    open=lambda index: open_npu(index),
)


class NpuBackend(Backend):
    """One Ascend NPU; see `open_npu`. Tested with torch_npu without its kernels, not on hardware."""

    def __init__(self, index: int, *, torch_npu: Any) -> None:
        self._torch_npu = torch_npu
        self.device = torch.device("npu", index)
        self.name = f"npu:{index} ({torch_npu.npu.get_device_name(index)})"
        self.family = family_of(torch_npu.npu.get_soc_version())
        self.capabilities = Capabilities(
            dtypes=self.family.dtypes,
            static_shapes=True,
            graph_modes=self.family.graph_modes,
            runs_om=True,
            collectives="hccl",
        )
        self.choices: tuple[Choice, ...] = ()  # the choices of the last `choose_operators`, with reasons
        # Layers whose weights are already tiled, because a model is prepared block by block.
        self._tiled = weakref.WeakSet[nn.Module]()
        if self.family.may_compile_operators:
            torch_npu.npu.set_compile_mode(jit_compile=False)
        # So that float32 is exact: by default, A2 and later round a convolution's inputs to HF32, which has 11 bits.
        torch_npu.npu.conv.allow_hf32 = False
        torch_npu.npu.matmul.allow_hf32 = False

    def synchronise(self) -> None:
        self._torch_npu.npu.synchronize(self.device)

    def mark(self) -> Mark:
        event = self._torch_npu.npu.Event(enable_timing=True)
        event.record(self._torch_npu.npu.current_stream(self.device))
        return Mark(event)

    def profiler(self, folder: Path) -> AbstractContextManager[object]:
        # Without `activities`, the profiler records the host and the NPU.
        profile: AbstractContextManager[object] = self._torch_npu.profiler.profile(
            on_trace_ready=self._torch_npu.profiler.tensorboard_trace_handler(str(folder))
        )
        return profile

    def free_bytes(self) -> int | None:
        self.empty_caches()  # of what earlier models in this process have released
        return int(self._torch_npu.npu.mem_get_info(self.device)[0])

    def empty_caches(self) -> None:
        self._torch_npu.npu.empty_cache()

    def choose_operators(
        self, sizes: DecoderSizes, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        operators, self.choices = choose(
            self.family, sizes, dtype, torch_npu=self._torch_npu, wanted=wanted, in_graph=mode != EAGER
        )
        return operators

    def prepare(self, module: nn.Module, *, wanted: OperatorChoice = "auto") -> None:
        """Tile the weights of linear layers if `choose_operators` chose that layout. Embeddings keep their layout.

        Quantised layers get the chip's operators, which accept plain layouts in eager mode.
        """
        dtype = float_type(module)

        def build(linear: nn.Linear, precision: Precision) -> nn.Module | None:
            if not self.computes_in(precision, dtype, wanted=wanted):
                return None
            family, torch_npu = self.family, self._torch_npu
            return build_linear(linear, dtype, precision=precision, family=family, torch_npu=torch_npu, wanted=wanted)

        replace_quantised(module, build)
        dequantise_linears(module)
        if not any(choice.operator == LAYOUT and choice.implementation == TILED for choice in self.choices):
            return
        self._torch_npu.npu.config.allow_internal_format = True
        for layer in module.modules():
            if isinstance(layer, nn.Linear) and layer not in self._tiled:
                layer.weight.data = self._torch_npu.npu_format_cast(layer.weight.data, FRACTAL_NZ)
                self._tiled.add(layer)

    def computes_in(self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto") -> bool:
        return precision == FLOAT or self.choose_linear(precision, activations, wanted=wanted).is_own

    def choose_linear(
        self, precision: Precision, activations: torch.dtype, *, wanted: OperatorChoice = "auto"
    ) -> Choice:
        """The operator for products with quantised weights, and the reason.

        Plain torch means that they are dequantised.
        """
        return choose_linear(self.family, precision, activations, torch_npu=self._torch_npu, wanted=wanted)

    def refusal(self, precision: Precision, *, wanted: OperatorChoice = "auto") -> str:
        return "" if precision == FLOAT or wanted == "aten" else refusal(self.family, precision, wanted=wanted)

    def compile(self, program: Program, *, mode: str) -> Program:
        require_mode(mode, backend=self)
        try:
            compiled = GRAPH_COMPILERS[mode](program)
        except Exception as error:  # torchair is inside torch_npu, but needs further packages and libraries
            raise DeviceError(
                f"{self.name} cannot compile for `{mode}` ({type(error).__name__}: {first_line(error)})",
                hint="install the packages of the extra `npu` and all of CANN; or pass `--mode eager`",
            ) from error

        def run(*inputs: Any) -> Any:
            with self._torch_npu.npu.device(self.device):  # where graphs are captured; in another thread, it may differ
                return compiled(*inputs)

        return cast(Program, run)


def _npugraph_ex(program: Callable[..., Any]) -> Any:
    with contextlib.suppress(ImportError):
        _complete_configuration()
    # The weights never change, so the graph may keep their addresses.
    options: dict[str, Any] = {"frozen_parameter": True}
    return torch.compile(program, fullgraph=True, dynamic=False, backend="npugraph_ex", options=options)


def _complete_configuration() -> None:
    """Add the attribute `experimental_config` to npugraph_ex's configuration if it is missing.

    For products with quantised weights, torch_npu 2.13 sets an option in it. The option belongs to torchair, and
    npugraph_ex does not read it.
    """
    graph_configs: Any = importlib.import_module("npugraph_ex.configs.compiler_config")
    if not hasattr(graph_configs.CompilerConfig, "experimental_config"):
        graph_configs.CompilerConfig.experimental_config = SimpleNamespace()


def _ge_graph(program: Callable[..., Any]) -> Any:
    torchair: Any = importlib.import_module("torchair")  # comes inside torch_npu
    configs: Any = importlib.import_module("torchair.configs.compiler_config")
    backend = torchair.get_npu_backend(compiler_config=configs.CompilerConfig())
    return torch.compile(program, fullgraph=True, dynamic=False, backend=backend)


GRAPH_COMPILERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "npugraph_ex": _npugraph_ex,
    "ge_graph": _ge_graph,
}
