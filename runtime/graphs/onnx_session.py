"""An ONNX file run by onnxruntime, on the CPU or with another execution provider."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import Port, check_dtypes, find_card
from llama_adapter.runtime.graphs.ladder import run_ladder
from llama_adapter.runtime.graphs.onnx_provider import BY_NAME, CPU, OnnxProvider
from llama_adapter.runtime.graphs.packages import import_package
from llama_adapter.runtime.graphs.seal import SEAL_KEY, check_seal
from llama_adapter.runtime.graphs.session import GraphInfo, as_inputs, check_fixed_batch, check_outputs, closed_error
from llama_adapter.runtime.text import one_line
from llama_adapter.runtime.torch_import import decline_telemetry

_HINT: Final = "export the model with `llama-adapter export onnx`"
# Occurs in messages about the provider or its options, in contrast to messages about the file.
_FAILS_ON_PROVIDER: Final = (
    r"create \w+ ExecutionProvider fail|provider option|Failed to load library|fallback to CPU EP"
)
_PLACE: Final = r"^/.*?&\) (\[ONNXRuntimeError\] : \d+ : \w+ : )?"  # a place in onnxruntime's sources, before a reason
_START_HINTS: Final = {
    "CANNExecutionProvider": "source CANN's `set_env.sh`, whose libraries it loads, and look for the device in "
    "`npu-smi info`; onnxruntime wrote on stderr what it misses",
    "CUDAExecutionProvider": "it loads the libraries of CUDA and cuDNN, and needs a GPU in `nvidia-smi`; onnxruntime "
    "wrote on stderr what it misses",
}
_DTYPES: Final = {"tensor(float)": "float32", "tensor(double)": "float64"}  # all other names are numpy's


class OnnxSession:
    """See `GraphSession`."""

    device_ms = None

    def __init__(self, path: str | os.PathLike[str], *, threads: int, provider: OnnxProvider = CPU) -> None:
        """Load the graph. `threads`, at least 1, is the number of CPU threads for one call.

        Raises GraphError for a file that cannot be run, or that was changed after its export.
        """
        file = str(path)
        self._session = open_inference_session(path, threads=threads, provider=provider)
        metadata = self._session.get_modelmeta().custom_metadata_map
        inputs, outputs = _ports(self._session.get_inputs()), _ports(self._session.get_outputs())
        check_fixed_batch(inputs, file=file, hint=_HINT)
        fixed = [port.shape[0] for port in inputs if port.shape and port.shape[0] > 0]
        self.info = GraphInfo(
            name=f"onnxruntime ({provider.name})",
            file=file,
            inputs=inputs,
            outputs=outputs,
            card=find_card(metadata, file=file),
            batch_sizes=tuple(fixed[:1]) or None,
            hint=_HINT,
        )
        check_dtypes(self.info.card, (*inputs, *outputs), file=file)
        check_seal(Path(path), metadata.get(SEAL_KEY))  # reads the file again, which is faster than opening the session

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
        """A hint that saves memory. If the graph has a fixed batch, the caller's batch size does not matter."""
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


def open_inference_session(path: str | os.PathLike[str], *, threads: int, provider: OnnxProvider = CPU) -> Any:
    """An onnxruntime `InferenceSession` whose first provider is `provider`. The CPU runs operators that it lacks.

    `threads`, at least 1, is the number of CPU threads for one call. Raises GraphError for a file that cannot
    be opened, and for a provider that is not installed or does not start; onnxruntime would then silently
    compute on the CPU.
    """
    path = Path(path)
    if path.suffix == ".om":
        raise GraphError(
            f"`{path}` is an OM file by its name, and ONNX is needed here",
            hint="use `--vision om`, or the ONNX file that the OM was made from",
        )
    if not path.is_file():
        kind = "is not a file" if path.exists() else "does not exist"
        raise GraphError(f"The ONNX file `{path}` {kind}", hint=_HINT)
    runtime = _onnxruntime()
    _check_registered(runtime, provider)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.use_deterministic_compute = True
    # Spinning threads would keep the cores busy that the language model needs next.
    entries = {"session.intra_op.allow_spinning": "0", **provider.session_entries}
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    options.log_severity_level = 4  # errors are raised as exceptions, so stderr would only repeat them
    providers = list(dict.fromkeys((provider.name, CPU.name)))
    try:
        # The fallback would try the same provider again, and print a message on stdout.
        session = runtime.InferenceSession(
            str(path),
            options,
            providers=providers,
            provider_options=[dict(provider.options) if name == provider.name else {} for name in providers],
            enable_fallback=0,
        )
    except Exception as error:
        reason = re.sub(_PLACE, "", one_line(str(error)))
        if re.search(_FAILS_ON_PROVIDER, reason):
            raise _not_started(runtime, provider, reason=reason) from error
        raise GraphError(
            f"onnxruntime {runtime.__version__} cannot open `{path}`: {reason}",
            hint=f"the file is damaged, incomplete (its .data file?) or no ONNX file: {_HINT}",
        ) from error
    if provider.name not in session.get_providers():
        raise _not_started(runtime, provider, reason=f"it opened the graph with {', '.join(session.get_providers())}")
    return session


def _check_registered(runtime: Any, provider: OnnxProvider) -> None:
    registered = runtime.get_available_providers()
    if provider.name not in registered:
        packages = BY_NAME[provider.name].packages
        raise GraphError(
            f"The installed onnxruntime {runtime.__version__} has no {provider.name}; it has {', '.join(registered)}",
            hint=f"pip uninstall onnxruntime; pip install {packages} (docs/exported-encoders.md)",
        )


def _not_started(runtime: Any, provider: OnnxProvider, *, reason: str) -> GraphError:
    """The error for a provider that is registered but cannot be used."""
    device = provider.options.get("device_id")
    return GraphError(
        f"{provider.name} of onnxruntime {runtime.__version__} does not start"
        f"{'' if device is None else f' on device {device}'}: {reason}",
        hint=_START_HINTS.get(provider.name, "see docs/exported-encoders.md"),
    )


def zeros_on_device(shape: Sequence[int], dtype: np.dtype, *, device: str, device_id: int) -> Any:
    """An onnxruntime `OrtValue` of zeros in the memory of `device`, which is onnxruntime's name of a device."""
    value = _onnxruntime().OrtValue.ortvalue_from_shape_and_type(list(shape), dtype.type, device, device_id)
    value.update_inplace(np.zeros(shape, dtype))
    return value


def _onnxruntime() -> Any:
    decline_telemetry()
    return import_package("onnxruntime")


def _ports(arguments: Sequence[Any]) -> tuple[Port, ...]:
    return tuple(
        Port(
            name=argument.name,
            dtype=_DTYPES.get(argument.type, argument.type.removeprefix("tensor(").removesuffix(")")),
            shape=tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape),
        )
        for argument in arguments
    )
