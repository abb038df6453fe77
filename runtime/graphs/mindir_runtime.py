"""What runs MindIR graphs, and on which device: MindSpore, or MindSpore Lite."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from llama_adapter.runtime.graphs.ge_config import read_ge_config
from llama_adapter.runtime.graphs.session import GraphSession

MindirBackend = Literal["ms", "mslite"]  # as MindFormers calls them


@dataclass(frozen=True, kw_only=True, slots=True)
class MindirRuntime:
    """How to run MindIR graphs. It can be pickled and printed."""

    backend: MindirBackend = "ms"
    is_ascend: bool = False  # else the CPU
    device_id: int = 0
    config_path: str | None = None  # a `config.ini`, for Ascend

    def __post_init__(self) -> None:
        if self.backend not in get_args(MindirBackend):
            raise ValueError(f"backend must be ms or mslite, got {self.backend!r}")

    def open(self, path: Path) -> GraphSession:
        """The graph of a file, loaded. Raises GraphError, and UsageError for a damaged configuration."""
        config = None if self.config_path is None else read_ge_config(self.config_path)
        if self.backend == "mslite":
            from llama_adapter.runtime.graphs.mslite_session import MsliteSession

            target = "ascend" if self.is_ascend else "cpu"
            return MsliteSession(path, target=target, device_id=self.device_id, config=config)
        from llama_adapter.runtime.graphs.mindspore_session import MindsporeSession

        return MindsporeSession(
            path, target="Ascend" if self.is_ascend else "CPU", device_id=self.device_id, config=config
        )
