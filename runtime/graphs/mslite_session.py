"""A MindIR file run by MindSpore Lite. Tested with a stand-in that follows the documentation of release 2.10."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port
from llama_adapter.runtime.graphs.ge_config import GeConfig
from llama_adapter.runtime.graphs.mindir import HINT
from llama_adapter.runtime.graphs.mindspore_session import check_sizes
from llama_adapter.runtime.graphs.packages import import_package
from llama_adapter.runtime.graphs.session import GraphInfo, as_inputs, closed_error
from llama_adapter.runtime.text import one_line

_INSTALL: Final = (
    "MindSpore Lite is on no package index: install the wheel of its download page, for this Python and CANN"
)


class MsliteSession:
    """See `GraphSession`. Dynamic sizes of inputs may have any value; new sizes resize the model."""

    device_ms = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        target: str = "cpu",
        device_id: int = 0,
        config: GeConfig | None = None,
    ) -> None:
        """Load the graph for `cpu` or `ascend`. `config` is passed to MindSpore Lite as its file.

        Raises GraphError for a file, an installation or a device that cannot be used.
        """
        file = str(path)
        if not Path(path).is_file():
            raise GraphError(f"The MindIR file `{file}` does not exist", hint=HINT)
        mslite = import_package("mindspore_lite", hint=_INSTALL)
        try:
            context = _context(mslite, target, device_id=device_id, config=config)
            self._model: Any = mslite.Model()
            self._model.build_from_file(
                file, mslite.ModelType.MINDIR, context, config_path="" if config is None else config.path
            )
            self._inputs: list[Any] = self._model.get_inputs()
            inputs = tuple(_port(tensor) for tensor in self._inputs)
            outputs = tuple(_port(tensor) for tensor in self._model.get_outputs())
        except Exception as error:
            self._model = None
            raise GraphError(
                f"MindSpore Lite cannot open `{file}` on {target}: {one_line(str(error))}",
                hint="its log (GLOG_v=1) says more; on Ascend, CANN is needed (source its set_env.sh)",
            ) from error
        self._shapes = [list(port.shape) for port in inputs]
        # The card cannot be read without MindSpore; the folder's card is used instead.
        self.info = GraphInfo(
            name=f"mindspore_lite ({target})",
            file=file,
            inputs=inputs,
            outputs=outputs,
            hint=HINT,
        )

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `GraphSession.run`."""
        if self._model is None:
            raise closed_error(self.info.file)
        arrays = as_inputs(inputs, self.info.inputs)
        check_sizes(arrays, self.info.inputs, file=self.info.file)
        shapes = [list(array.shape) for array in arrays]
        try:
            if shapes != self._shapes:
                self._model.resize(self._inputs, shapes)
                self._shapes = shapes
            for tensor, array in zip(self._inputs, arrays, strict=True):
                tensor.set_data_from_numpy(array)
            return [output.get_data_to_numpy().copy() for output in self._model.predict(self._inputs)]
        except Exception as error:
            self._shapes = []  # only some inputs may have been resized
            raise GraphError(
                f"MindSpore Lite failed on `{self.info.file}`: {one_line(str(error))}",
                hint="its log (GLOG_v=1) says more",
            ) from error

    def close(self) -> None:
        """Release memory and device."""
        self._model, self._inputs = None, []


def _context(mslite: Any, target: str, *, device_id: int, config: GeConfig | None) -> Any:
    context = mslite.Context()
    context.target = [target]
    if target == "ascend":
        context.ascend.device_id = device_id
        if config is not None and config.provider:
            context.ascend.provider = config.provider
    return context


def _port(tensor: Any) -> Port:
    """`DataType.FLOAT32` -> float32."""
    return Port(name=tensor.name, dtype=tensor.dtype.name.lower(), shape=tuple(int(size) for size in tensor.shape))
