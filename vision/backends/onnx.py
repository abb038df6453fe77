"""The encoder as an ONNX file, run by onnxruntime on the CPU."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import METADATA_KEY, EncoderCard, check_dtypes
from llama_adapter.runtime.graphs.ladder import run_ladder
from llama_adapter.runtime.graphs.packages import INSTALL_HINT
from llama_adapter.runtime.graphs.ports import Port
from llama_adapter.runtime.graphs.seal import SEAL_KEY, check_seal
from llama_adapter.vision.backends.exported import read_signature, to_tensor

_HINT = "export the encoder with `llama-adapter export onnx`"
_NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # since 1.31 it keeps a diary of its use in the home folder
_DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}


class OnnxVisionBackend:
    """Runs an ONNX file: one of our export, or any that takes (B, S, S, 3) pixels 0..255 and normalises inside.

    Raises GraphError for a file or an installation that is of no use.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None) -> None:
        """`threads` for the arithmetic of one call; None takes torch's number."""
        self._file = str(path)
        self._session = _open(Path(path), threads=threads or torch.get_num_threads())
        self.card = _card(self._session, file=self._file)
        self._signature = read_signature(
            _ports(self._session.get_inputs()),
            _ports(self._session.get_outputs()),
            file=self._file,
            card=self.card,
            hint=_HINT,
        )
        signature = self._signature
        check_dtypes(self.card, (signature.dtype.name, signature.output_dtype.name), file=self._file)
        # Reads the file once more: less time than opening the session takes.
        check_seal(Path(path), self._session.get_modelmeta().custom_metadata_map.get(SEAL_KEY))
        self._input, self._output = self._session.get_inputs()[0].name, self._session.get_outputs()[0].name

    @property
    def name(self) -> str:
        """The runtime and what it computes with."""
        return "onnxruntime (CPUExecutionProvider)"

    @property
    def image_size(self) -> int:
        return self._signature.image_size

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """None where the file takes any number of pictures, else the one it is fixed to."""
        return None if self._signature.batch is None else (self._signature.batch,)

    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels uint8 (B, S, S, 3) RGB -> visual query (B, Q, D) on the CPU, in the graph's type.

        Raises GraphError for other pixels, and when onnxruntime fails.
        """
        if self._session is None:
            raise GraphError(f"`{self._file}` was closed and encodes nothing more")
        self._signature.check_pixels(pixels_BHWC)
        try:
            return to_tensor(run_ladder(pixels_BHWC, self.batch_sizes, self._run))
        except MemoryError:
            raise GraphError(f"The memory is not enough to run `{self._file}`", hint=self._smaller()) from None

    def close(self) -> None:
        """Give back the memory of the graph."""
        self._session = None

    def _smaller(self) -> str:
        """What needs less memory; how many pictures a caller gives changes nothing for a file with a fixed batch."""
        if self._signature.batch is None:
            return "try a smaller --batch-size"
        return f"the file was compiled for {self._signature.batch} pictures at once, make one for fewer: {_HINT}"

    def _run(self, batch_BHWC: np.ndarray) -> np.ndarray:
        pixels = self._signature.to_input(batch_BHWC)
        try:
            (output,) = self._session.run([self._output], {self._input: pixels})
        except Exception as error:  # onnxruntime's classes have no base of their own
            raise GraphError(
                f"onnxruntime failed on `{self._file}` with {pixels.dtype} {pixels.shape}: {_words(error)}",
                hint=f"if it is the memory: {self._smaller()}; else export the encoder again",
            ) from error
        self._signature.check_output(output, batch=len(pixels))
        result: np.ndarray = output
        return result


def _open(path: Path, *, threads: int) -> Any:
    """An onnxruntime InferenceSession."""
    if path.suffix == ".om":
        raise GraphError(
            f"`{path}` is an OM file by its name, where ONNX is wanted",
            hint="use `--vision om`, or the ONNX file that it was made from",
        )
    if not path.is_file():
        kind = "is not a file" if path.exists() else "does not exist"
        raise GraphError(f"The ONNX file `{path}` {kind}", hint=_HINT)
    runtime = _onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.use_deterministic_compute = True
    # Its threads would keep the cores busy while waiting, and the language model's turn is next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors come as exceptions; what it writes to stderr repeats them
    try:
        # Without its fallback, to the same provider again, which it announces on stdout.
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:
        raise GraphError(
            f"onnxruntime {runtime.__version__} cannot open `{path}`: {_words(error)}",
            hint=f"the file is damaged, incomplete (its .data file?) or no ONNX file: {_HINT}",
        ) from error


def _onnxruntime() -> Any:
    if importlib.util.find_spec("onnxruntime") is None:
        raise GraphError("Running an ONNX file needs onnxruntime, which is not installed", hint=INSTALL_HINT)
    os.environ.setdefault(_NO_TELEMETRY, "1")  # read when it is imported
    try:
        return importlib.import_module("onnxruntime")
    except Exception as error:  # a wheel built against another numpy, a library that is missing
        raise GraphError(
            f"onnxruntime is installed and cannot be imported: {_words(error)}", hint=INSTALL_HINT
        ) from error


def _card(session: Any, *, file: str) -> EncoderCard | None:
    text = session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
    return None if text is None else EncoderCard.from_json(text, file=file)


def _ports(arguments: Sequence[Any]) -> list[Port]:
    return [
        Port(
            name=argument.name,
            dtype=_DTYPES.get(argument.type, argument.type.removeprefix("tensor(").removesuffix(")")),
            shape=tuple(size if isinstance(size, int) and size >= 0 else -1 for size in argument.shape),
        )
        for argument in arguments
    ]


def _words(error: Exception) -> str:
    return " ".join(str(error).split())
