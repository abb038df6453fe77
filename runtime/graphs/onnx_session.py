"""An ONNX file run by onnxruntime on the CPU."""

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port, check_dtypes, find_card
from llama_adapter.runtime.graphs.ladder import run_ladder
from llama_adapter.runtime.graphs.packages import INSTALL_HINT
from llama_adapter.runtime.graphs.seal import SEAL_KEY, check_seal
from llama_adapter.runtime.graphs.session import GraphInfo, as_inputs, check_fixed_batch, check_outputs, closed_error
from llama_adapter.runtime.text import one_line
from llama_adapter.runtime.torch_import import decline_telemetry

PROVIDER: Final = "CPUExecutionProvider"
_HINT: Final = "export the model with `llama-adapter export onnx`"
_DTYPES: Final = {"tensor(float)": "float32", "tensor(double)": "float64"}  # all other names are numpy's


class OnnxSession:
    """See `GraphSession`."""

    device_ms = None

    def __init__(self, path: str | os.PathLike[str], *, threads: int) -> None:
        """`threads`, at least 1, compute one call.

        Raises GraphError for a file that cannot be run, or that was changed after its export.
        """
        file = str(path)
        self._session = open_inference_session(Path(path), threads=threads)
        metadata = self._session.get_modelmeta().custom_metadata_map
        inputs, outputs = _ports(self._session.get_inputs()), _ports(self._session.get_outputs())
        check_fixed_batch(inputs, file=file, hint=_HINT)
        fixed = [port.shape[0] for port in inputs if port.shape and port.shape[0] > 0]
        self.info = GraphInfo(
            name=f"onnxruntime ({PROVIDER})",
            file=file,
            inputs=inputs,
            outputs=outputs,
            card=find_card(metadata, file=file),
            batch_sizes=tuple(fixed[:1]) or None,
            hint=_HINT,
        )
        check_dtypes(self.info.card, (*inputs, *outputs), file=file)
        check_seal(Path(path), metadata.get(SEAL_KEY))  # reads the file again: quicker than opening the session

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """See `GraphSession.run`."""
        if self._session is None:
            raise closed_error(self.info.file)
        try:
            return run_ladder(inputs, self.info.batch_sizes, self._run)
        except MemoryError:
            raise GraphError(f"The memory is not enough to run `{self.info.file}`", hint=self._smaller()) from None

    def close(self) -> None:
        """Release the memory of the graph."""
        self._session = None

    def _smaller(self) -> str:
        """What needs less memory; with a fixed batch the caller's own batch size does not matter."""
        if self.info.batch_sizes is None:
            return "try a smaller --batch-size"
        return f"the file was compiled for a batch of {self.info.batch_sizes[0]}, make one for fewer: {_HINT}"

    def _run(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        inputs = as_inputs(batch, self.info.inputs)
        feeds = {port.name: array for port, array in zip(self.info.inputs, inputs, strict=True)}
        try:
            outputs: list[np.ndarray] = self._session.run([port.name for port in self.info.outputs], feeds)
        except Exception as error:  # onnxruntime's exceptions have no common base
            given = ", ".join(f"{array.dtype} {array.shape}" for array in inputs)
            raise GraphError(
                f"onnxruntime failed on `{self.info.file}` with {given}: {one_line(str(error))}",
                hint=f"if it is the memory: {self._smaller()}; else export the model again",
            ) from error
        check_outputs(outputs, self.info.outputs, batch=len(inputs[0]), file=self.info.file)
        return outputs


def open_inference_session(path: Path, *, threads: int, entries: Mapping[str, str] = {}) -> Any:
    """An onnxruntime InferenceSession."""
    if path.suffix == ".om":
        raise GraphError(
            f"`{path}` is an OM file by its name, and ONNX is needed here",
            hint="use `--vision om`, or the ONNX file that the OM was made from",
        )
    if not path.is_file():
        kind = "is not a file" if path.exists() else "does not exist"
        raise GraphError(f"The ONNX file `{path}` {kind}", hint=_HINT)
    runtime = _onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.use_deterministic_compute = True
    # Waiting threads would keep the cores busy, and the language model is next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    options.log_severity_level = 4  # errors come as exceptions; stderr would repeat them
    try:
        # The fallback would try the same provider again, and announce it on stdout.
        return runtime.InferenceSession(str(path), options, providers=[PROVIDER], enable_fallback=0)
    except Exception as error:
        raise GraphError(
            f"onnxruntime {runtime.__version__} cannot open `{path}`: {one_line(str(error))}",
            hint=f"the file is damaged, incomplete (its .data file?) or no ONNX file: {_HINT}",
        ) from error


def _onnxruntime() -> Any:
    if importlib.util.find_spec("onnxruntime") is None:
        raise GraphError("Running an ONNX file needs onnxruntime, which is not installed", hint=INSTALL_HINT)
    decline_telemetry()
    try:
        return importlib.import_module("onnxruntime")
    except Exception as error:  # built against another numpy, a library is missing, ...
        raise GraphError(
            f"onnxruntime is installed and cannot be imported: {one_line(str(error))}", hint=INSTALL_HINT
        ) from error


def _ports(arguments: Sequence[Any]) -> tuple[Port, ...]:
    return tuple(
        Port(
            name=argument.name,
            dtype=_DTYPES.get(argument.type, argument.type.removeprefix("tensor(").removesuffix(")")),
            shape=tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape),
        )
        for argument in arguments
    )
