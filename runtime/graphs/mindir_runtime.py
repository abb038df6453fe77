"""The runtime of MindIR graphs, MindSpore or MindSpore Lite, and its device."""

from dataclasses import dataclass
from pathlib import Path

from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.graphs.defaults import MindirBackend
from llama_adapter.runtime.graphs.ge_config import read_ge_config
from llama_adapter.runtime.graphs.session import GraphSession


@dataclass(frozen=True, kw_only=True, slots=True)
class MindirRuntime:
    """How to run MindIR graphs. It can be pickled and printed."""

    backend: MindirBackend = "ms"
    is_ascend: bool = False  # else the CPU
    device_id: int = 0
    config_path: str | None = None  # a `config.ini`, for Ascend

    @property
    def device(self) -> str:
        """This project's name of the device."""
        return f"npu:{self.device_id}" if self.is_ascend else "cpu"

    def open(self, path: Path) -> GraphSession:
        """Load the graph of a file. Raises GraphError, and UsageError for a damaged configuration."""
        config = None if self.config_path is None else read_ge_config(self.config_path)
        if self.backend == "mslite":
            from llama_adapter.runtime.graphs.mslite_session import MsliteSession

            target = "ascend" if self.is_ascend else "cpu"
            return MsliteSession(path, target=target, device_id=self.device_id, config=config)
        from llama_adapter.runtime.graphs.mindspore_session import MindsporeSession

        return MindsporeSession(
            path, target="Ascend" if self.is_ascend else "CPU", device_id=self.device_id, config=config
        )


def mindir_runtime(device: str, *, backend: MindirBackend, config_path: str | None) -> MindirRuntime:
    """The runtime for `cpu`, `npu`, `npu:1` or `auto`, which is an Ascend chip if there is one, else the CPU.

    Raises UsageError for other devices.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "npu") or (number and not number.isdecimal()):
        raise UsageError(f"device {device}: MindIR graphs run on the CPU or an Ascend chip", hint="leave out --device")
    return MindirRuntime(
        backend=backend,
        is_ascend=kind == "npu" or (kind == "auto" and any(Path("/dev").glob("davinci[0-9]*"))),
        device_id=int(number or 0),
        config_path=config_path,
    )
