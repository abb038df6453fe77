"""A MindIR file run by MindSpore, on the CPU or on an Ascend chip."""

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.ge_config import GeConfig
from llama_adapter.runtime.graphs.mindir import HINT, graph_mode, import_mindspore, open_tensor, read_mindir
from llama_adapter.runtime.graphs.session import GraphInfo, as_inputs, closed_error
from llama_adapter.runtime.text import one_line


class MindsporeSession:
    """See `GraphSession`. Dynamic sizes of inputs may have any value; the graph is compiled once for all of them.

    MindSpore uses one device per process. Ascend is not tested on hardware.
    """

    device_ms = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        target: str = "CPU",
        device_id: int = 0,
        config: GeConfig | None = None,
    ) -> None:
        """`target` is `CPU` or `Ascend`; `config` is for Ascend.

        Raises GraphError for a file, an installation or a device that cannot be used.
        """
        file = str(path)
        self._mindspore = mindspore = import_mindspore()
        described = read_mindir(Path(path))
        _set_device(mindspore, target, device_id=device_id, config=config)
        try:
            with graph_mode(mindspore):
                graph = mindspore.load(file)
                cell = mindspore.nn.GraphCell(graph)
        except Exception as error:
            raise GraphError(f"MindSpore cannot open `{file}`: {one_line(str(error))}", hint=HINT) from error
        # Dynamic sizes are declared, so that new sizes do not compile the graph again.
        cell.set_inputs(*(open_tensor(mindspore, port) for port in described.inputs))
        self._held: list[Any] = [cell]
        # The cell is also released at the end of the program, while MindSpore, which it needs, still exists.
        self._finalizer = weakref.finalize(self, self._held.clear)
        self.info = GraphInfo(
            name=f"mindspore ({target})",
            file=file,
            inputs=described.inputs,
            outputs=described.outputs,
            card=described.card,
            hint=HINT,
        )

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `GraphSession.run`."""
        if not self._held:
            raise closed_error(self.info.file)
        arrays = as_inputs(inputs, self.info.inputs)
        check_sizes(arrays, self.info.inputs, file=self.info.file)
        try:
            with graph_mode(self._mindspore):
                # Memory is shared, not copied. This is safe because all outputs are computed when the call returns.
                given = self._held[0](*(self._mindspore.Tensor.from_numpy(array) for array in arrays))
                outputs = given if isinstance(given, tuple) else (given,)
                return [output.asnumpy() for output in outputs]
        except Exception as error:
            shapes = ", ".join(
                f"{port.name} {array.shape}" for port, array in zip(self.info.inputs, arrays, strict=True)
            )
            raise GraphError(
                f"MindSpore failed on `{self.info.file}` with {shapes[:300]}: {one_line(str(error))}", hint=HINT
            ) from error

    def close(self) -> None:
        """Release the memory of the graph."""
        self._finalizer()


def check_sizes(arrays: Sequence[np.ndarray], ports: Sequence[Port], *, file: str) -> None:
    """Raise GraphError for an array whose sizes do not fit the graph. The runtime would read beyond its end."""
    for array, port in zip(arrays, ports, strict=True):
        if not port.fits(Port.of(array)) or not array.size:
            raise GraphError(f"`{file}` takes `{port.name}` {port}, and was given {Port.of(array)}", hint=HINT)


def _set_device(mindspore: Any, target: str, *, device_id: int, config: GeConfig | None) -> None:
    try:
        if tuple(mindspore.get_current_device()) != (target, device_id):  # it cannot be set again after computing
            mindspore.set_device(target, device_id)
        if target == "Ascend" and config is not None and config.ge_options:
            mindspore.set_context(ascend_config={"ge_options": config.ge_options})
    except Exception as error:
        raise GraphError(
            f"MindSpore cannot use {target} {device_id}: {one_line(str(error))}",
            hint="a process has one device of MindSpore's; on Ascend, CANN is needed (source its set_env.sh)",
        ) from error
