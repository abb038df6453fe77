"""Ascend NPUs through torch_npu, which is imported here and nowhere else, and only when such a device is asked for."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llm.config import DecoderConfig
from llm.errors import DeviceError
from llm.model.llama import LlamaAdapterDecoder
from llm.model.ops import Operators
from llm.runtime.backend import EAGER, Capabilities, EventMark, OperatorChoice, no_graph_mode
from llm.runtime.chips import FRACTAL_NZ, family_of
from llm.runtime.npu_operators import Choice, choose


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadFailure:
    """A way in which `import torch_npu` fails: what its text looks like, and what helps."""

    pattern: str
    message: str
    hint: str


SOURCE_CANN = "`source <CANN>/set_env.sh` (for example /usr/local/Ascend/cann/set_env.sh) in this shell"
OTHERWISE = "; or pass `--device cpu`"

# The first that is found in the text counts. Texts of torch_npu 2.13 and of the dynamic linker.
FAILURES = (
    LoadFailure(
        pattern=r"ERR00007|Two accelerators cannot be used",
        message="torch_npu refuses this torch, which was built for another accelerator",
        hint="install torch's CPU build of the same version from the PyTorch CPU index, then torch_npu",
    ),
    LoadFailure(
        pattern=r"undefined symbol|version `[^']+' not found",
        message="torch_npu's libraries fit neither this torch ({torch}) nor this CANN",
        hint="install the pair of torch_npu and torch that torch_npu's compatibility table gives for your CANN",
    ),
    LoadFailure(
        pattern=r"lib\w+\.so[.\d]*: cannot open shared object file",
        message="torch_npu is installed, but the libraries of CANN are not found",
        hint=f"install CANN, or {SOURCE_CANN}",
    ),
    LoadFailure(
        pattern=r"ASCEND_\w+_PATH",
        message="The environment variables of CANN lead nowhere",
        hint=f"{SOURCE_CANN} again, from the CANN that is installed",
    ),
    LoadFailure(
        pattern=r"Only a single TORCH_LIBRARY|already (?:been )?registered",
        message="torch_npu failed to load earlier in this process, and cannot be loaded twice",
        hint="start again, and look at the first error",
    ),
    LoadFailure(
        pattern=r"No module named",
        message="torch_npu is installed, but a Python package that it needs is not",
        hint="install the packages of the extra `npu`",
    ),
)


def load_torch_npu() -> Any:
    """The module torch_npu, imported.

    Raises DeviceError with what to do for every way in which that fails. Its message ends with torch_npu's own words.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise DeviceError(
            "torch_npu is not installed, and Ascend NPUs need it",
            hint="on Linux, install torch's CPU build, then the extra `npu`" + OTHERWISE,
        )
    _check_versions()
    try:
        # It prints warnings to stdout, which is for answers.
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module("torch_npu")
    except Exception as error:  # it raises whatever it likes, plain Exception included
        raise _explained(error) from error


def _check_versions() -> None:
    """Raise before loading a torch_npu made for another torch, whose libraries might take the process down."""
    try:
        wanted = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return
    given = torch.__version__
    if wanted.split(".")[:2] != given.split(".")[:2]:
        raise DeviceError(
            f"torch_npu {wanted} is made for torch {'.'.join(wanted.split('.')[:3])}, and torch {given} is installed",
            hint="install the two in the same version" + OTHERWISE,
        )


def _explained(error: Exception) -> DeviceError:
    causes = [error, *filter(None, [error.__cause__])]
    text = " / ".join(f"{type(cause).__name__}: {_first_line(cause)}" for cause in causes)
    everything = "\n".join(map(str, causes))
    for failure in FAILURES:
        if re.search(failure.pattern, everything):
            message = failure.message.format(torch=torch.__version__)
            return DeviceError(f"{message} ({text})", hint=failure.hint + OTHERWISE)
    return DeviceError(
        f"torch_npu cannot be imported ({text})",
        hint="`llama-adapter doctor` looks at the parts one by one" + OTHERWISE,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "no text").splitlines()[0]


def open_npu(index: int) -> "NpuBackend":
    """Backend of one NPU, counted from 0. Raises DeviceError when torch_npu or that device cannot be had."""
    torch_npu = load_torch_npu()
    count = torch_npu.npu.device_count() if torch_npu.npu.is_available() else 0
    if count == 0:
        raise DeviceError(
            "torch_npu and CANN are there, but no NPU is: torch.npu.is_available() is False",
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
            f"npu:{index} cannot be opened ({_first_line(error)})",
            hint="`npu-smi info` says whether it is healthy and whose processes hold it" + OTHERWISE,
        ) from error


class NpuBackend:
    """One Ascend NPU; see `open_npu`. Nothing here has run on hardware yet, only on torch_npu without kernels."""

    def __init__(self, index: int, *, torch_npu: Any) -> None:
        self._torch_npu = torch_npu
        self.device = torch.device("npu", index)
        self.name = f"npu:{index} ({torch_npu.npu.get_device_name(index)})"
        self.family = family_of(torch_npu.npu.get_soc_version())
        self.capabilities = Capabilities(
            dtypes=self.family.dtypes,
            static_shapes=True,
            graph_modes=self.family.graph_modes,
            collective="hccl",
        )
        self.choices: tuple[Choice, ...] = ()  # the last answer of `choose_operators`, with reasons
        if self.family.may_compile_operators:
            torch_npu.npu.set_compile_mode(jit_compile=False)

    def synchronise(self) -> None:
        self._torch_npu.npu.synchronize(self.device)

    def mark(self) -> EventMark:
        event = self._torch_npu.npu.Event(enable_timing=True)
        event.record(self._torch_npu.npu.current_stream(self.device))
        return EventMark(event)

    def free_bytes(self) -> int | None:
        free: int = self._torch_npu.npu.mem_get_info(self.device)[0]
        return free

    def choose_operators(
        self, config: DecoderConfig, *, dtype: torch.dtype, wanted: OperatorChoice, mode: str
    ) -> Operators:
        operators, self.choices = choose(
            self.family, config, dtype, torch_npu=self._torch_npu, wanted=wanted, in_graph=mode != EAGER
        )
        return operators

    def prepare(self, decoder: LlamaAdapterDecoder) -> None:
        """Lay the weights of linear layers out in tiles where the chip gains by it; embeddings stay as they are."""
        if not self.family.tiled_weights:
            return
        self._torch_npu.npu.config.allow_internal_format = True
        for module in decoder.modules():
            if isinstance(module, nn.Linear) and module.weight.dtype == torch.float16:
                module.weight.data = self._torch_npu.npu_format_cast(module.weight.data, FRACTAL_NZ)

    def compile(self, program: Callable[..., Tensor], *, mode: str) -> Callable[..., Tensor]:
        if mode not in self.capabilities.graph_modes:
            raise no_graph_mode(mode, backend=self.name, modes=self.capabilities.graph_modes)
        try:
            return GRAPH_COMPILERS[mode](program)
        except Exception as error:  # torchair lies in torch_npu, and wants more packages and libraries than that
            raise DeviceError(
                f"{self.name} cannot compile for `{mode}` ({type(error).__name__}: {_first_line(error)})",
                hint="install the packages of the extra `npu` and all of CANN; or pass `--mode eager`",
            ) from error


def _npugraph_ex(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # The weights never change, so the graph may keep their addresses.
    options: dict[str, Any] = {"frozen_parameter": True}
    return torch.compile(program, fullgraph=True, dynamic=False, backend="npugraph_ex", options=options)


def _ge_graph(program: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torchair: Any = importlib.import_module("torchair")  # comes inside torch_npu
    configs: Any = importlib.import_module("torchair.configs.compiler_config")
    backend = torchair.get_npu_backend(compiler_config=configs.CompilerConfig())
    return torch.compile(program, fullgraph=True, dynamic=False, backend=backend)


GRAPH_COMPILERS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "npugraph_ex": _npugraph_ex,
    "acl_graph": _npugraph_ex,  # its older name
    "ge_graph": _ge_graph,
}
