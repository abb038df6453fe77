"""OM files loaded by ais_bench. A file is checked before it is loaded, and the arguments of every call before it."""

import importlib
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import GraphCard, Port
from llama_adapter.runtime.graphs.om_failures import import_failed, opening_failed, running_failed
from llama_adapter.runtime.graphs.session import as_inputs, check_fixed_batch, check_outputs
from llama_adapter.runtime.graphs.sidecar import check_om_file, read_valid_sidecar, sidecar_path
from llama_adapter.runtime.graphs.stdout import root_logger_kept, stdout_caught

HINT: Final = "make the OM with `llama-adapter export om` from an ONNX of `llama-adapter export onnx`"
_LOG = logging.getLogger(__name__)
_DTYPES: Final = {"double": "float64"}  # all other names are numpy's


class OmModel:
    """An `InferSession` (ais_bench, 2023 or later) with its inputs and outputs.

    Create, use and free it in one thread, because it leaves its own ACL context in the calling thread. ais_bench
    compares only numbers of bytes, so the caller must check types and shapes.
    """

    def __init__(self, file: str, *, device_id: int, soc: str) -> None:
        """Load the file. `soc` is the chip that it was made for, empty if unknown. Raises GraphError."""
        self.file, self._device_id, self._soc = file, device_id, soc
        self.device_ms: float | None = None  # of the last call
        self._session: Any = None
        try:
            self.inputs, self.outputs, self.num_bytes = self._open(_infer_session_class())
        except BaseException:
            self.free()
            raise

    def infer(self, inputs: Sequence[np.ndarray], *, mode: str, wanted: str) -> list[np.ndarray]:
        """Call `infer` in a mode of ais_bench. `wanted` describes the file's inputs in messages. Raises GraphError.

        The arrays must be contiguous. They are kept alive until the call ends, because it reads their memory.
        """
        try:
            with stdout_caught() as caught:
                outputs: list[np.ndarray] = self._session.infer(list(inputs), mode=mode)
                self.device_ms = self._read_device_ms()
        except Exception as error:
            raise running_failed(
                error,
                said=caught.complaints(),
                file=self.file,
                soc=self._soc,
                device=self._device_id,
                wanted=wanted,
                given=_list(f"{array.dtype} {array.shape} of {array.nbytes:,} bytes" for array in inputs),
            ) from error
        return outputs

    def free(self) -> None:
        """Unload the file. Does not call `finalize`, which would reset the device for the whole process."""
        # The last reference is dropped here too, because the destructor uses the device.
        session, self._session = self._session, None
        try:
            with stdout_caught() as caught:
                if hasattr(session, "free_resource"):
                    session.free_resource()
                del session
        except Exception as error:  # it cannot be handled, only reported
            _LOG.warning("ais_bench cannot unload `%s`: %s | %s", self.file, error, caught.complaints())

    def _open(self, infer_session: Any) -> tuple[tuple[Port, ...], tuple[Port, ...], list[int]]:
        """Load the file; returns inputs, outputs, and the bytes of each input at the largest batch."""
        try:
            with stdout_caught() as caught:
                self._session = infer_session(self._device_id, self.file)
                inputs, outputs = list(self._session.get_inputs()), list(self._session.get_outputs())
                num_bytes = [int(description.size) for description in inputs]
        except Exception as error:
            said = caught.complaints()
            raise opening_failed(error, said=said, file=self.file, soc=self._soc, device=self._device_id) from error
        return tuple(map(_port, inputs)), tuple(map(_port, outputs)), num_bytes

    def _read_device_ms(self) -> float | None:
        """Milliseconds of the last execution; None if ais_bench does not report them.

        Since autumn 2023, ais_bench reports a pair of start and end, before that the duration. Times are float32
        numbers that count from loading, so they are coarse after hours.
        """
        try:
            last = self._session.summary().exec_time_list[-1]
            milliseconds = float(last[1] - last[0]) if hasattr(last, "__len__") else float(last)
            self._session.reset_summaryinfo()  # otherwise the list grows with every call
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None
        return milliseconds


class OmFile(OmModel):
    """An OM with a fixed batch size, or with batch sizes as gears."""

    def __init__(self, path: Path, *, device_id: int) -> None:
        """Raises GraphError for files, side-cars, installations and devices that cannot be used."""
        file = os.path.abspath(path)
        check_om_file(file)
        self._sidecar = read_valid_sidecar(file)
        super().__init__(file, device_id=device_id, soc="" if self._sidecar is None else self._sidecar.soc_version)
        try:
            self._check_sidecar()
            check_fixed_batch(self.inputs, file=self.file, hint=HINT)
            self.batch_sizes = self._find_batch_sizes()
        except BaseException:
            self.free()
            raise

    @property
    def card(self) -> GraphCard | None:
        """The card in the side-car; None without a side-car."""
        return None if self._sidecar is None else self._sidecar.card

    def run(self, batch: Sequence[np.ndarray]) -> list[np.ndarray]:
        """One array per input, with one of the batch sizes -> one array per output."""
        inputs = as_inputs(batch, self.inputs)
        size, largest = len(inputs[0]), max(self.batch_sizes)
        wanted = [num_bytes * size // largest for num_bytes in self.num_bytes]  # ais_bench requires this
        if size not in self.batch_sizes or [array.nbytes for array in inputs] != wanted:
            raise AssertionError(f"{[array.shape for array in inputs]} is none of the batch sizes {self.batch_sizes}")
        told = f"{_list(self.inputs)} of batch {_list(self.batch_sizes)}"
        outputs = self.infer(inputs, mode="dymbatch" if self._has_gears else "static", wanted=told)
        check_outputs(outputs, self.outputs, batch=size, file=self.file)
        return outputs

    @property
    def _has_gears(self) -> bool:
        return self.inputs[0].shape[:1] == (-1,)

    def _check_sidecar(self) -> None:
        """Raise GraphError if the side-car describes an input that differs from the file's."""
        if self._sidecar is None:
            return
        stored = self._sidecar.input
        if [(stored.dtype, stored.shape)] != [(port.dtype, port.shape) for port in self.inputs]:
            has_aipp = any(port.dtype == "uint8" for port in self.inputs)
            raise GraphError(
                f"`{self.file}` takes {_list(self.inputs)}, and its side-car says that it takes {stored}",
                hint=f"the side-car was changed, or belongs to another file: {HINT}"
                + "; preprocessing compiled into the file (AIPP) is not used here" * has_aipp,
            )

    def _find_batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes from the side-car or, for a fixed OM without a side-car, from the file."""
        sidecar, fixed = self._sidecar, None if self._has_gears else (self.inputs[0].shape or (0,))[0]
        if fixed is None and sidecar is None:
            raise GraphError(
                f"`{self.file}` takes several batch sizes (gears), which only its side-car "
                f"`{sidecar_path(self.file).name}` lists, but the side-car is missing",
                hint=f"put the side-car next to it, or {HINT}",
            )
        sizes = sidecar.batch_sizes if sidecar is not None else (fixed or 0,)
        matches = sidecar is None or (sidecar.has_gears if fixed is None else sidecar.batch_sizes == (fixed,))
        wanted = [math.prod((max(sizes), *port.shape[1:])) * np.dtype(port.dtype).itemsize for port in self.inputs]
        if not matches or self.num_bytes != wanted:
            num_bytes = _list(f"{size:,}" for size in self.num_bytes)
            raise GraphError(
                f"`{self.file}` takes {_list(self.inputs)} of {num_bytes} bytes, "
                f"which is not the expected batch {_list(sizes)}",
                hint=f"its side-car is that of another file: {HINT}" if sidecar is not None else HINT,
            )
        return sizes


def _infer_session_class() -> Any:
    """The class InferSession of ais_bench. It is imported only here, in the thread that uses it."""
    try:
        with root_logger_kept(), stdout_caught() as caught:
            return importlib.import_module("ais_bench.infer.interface").InferSession
    except Exception as error:
        raise import_failed(error, said=caught.complaints()) from error


def _port(description: Any) -> Port:
    name = description.datatype.name
    return Port(
        name=description.name,
        dtype=_DTYPES.get(name, name),
        shape=tuple(int(size) for size in description.shape),
    )


def _list(things: Any) -> str:
    return ", ".join(map(str, things))
