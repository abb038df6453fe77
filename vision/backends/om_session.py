"""One OM file loaded by ais_bench: checked before it is loaded, and every call checked before it is made.

Which thread this happens in is decided in `vision.backends.om`.
"""

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import EncoderCard
from llama_adapter.runtime.graphs.om_failures import import_failed, opening_failed, running_failed
from llama_adapter.runtime.graphs.ports import Port
from llama_adapter.runtime.graphs.sidecar import check_om_file, read_valid_sidecar, sidecar_path
from llama_adapter.runtime.graphs.stdout import root_logger_kept, stdout_caught
from llama_adapter.vision.backends.exported import Signature, read_signature

_LOG = logging.getLogger(__name__)
_HINT = "make the OM with `llama-adapter export om` from an ONNX of `llama-adapter export onnx`"
_DTYPES = {"double": "float64"}  # all other names are numpy's


class OmSession:
    """An `InferSession` (ais_bench, 2023 or later), its signature and its batch sizes.

    To be made, used and freed in one thread: it puts an ACL context of its own into the thread that calls it and leaves
    it there. ais_bench compares numbers of bytes only, so shapes and types are checked here.
    """

    def __init__(self, path: Path, *, device_id: int) -> None:
        """Raises GraphError for everything that is in the way."""
        self._file, self._device_id = os.path.abspath(path), device_id
        check_om_file(self._file)
        self._sidecar = read_valid_sidecar(self._file)
        self._session = self._open(_infer_session_class())
        try:
            self._port, self.signature = self._describe()
            self._check_sidecar()
            self.batch_sizes = self._find_batch_sizes()
        except BaseException:
            self.free()
            raise
        self.device_ms: float | None = None  # of the last call

    @property
    def card(self) -> EncoderCard | None:
        """From the side-car; None without one."""
        return None if self._sidecar is None else self._sidecar.card

    def run(self, batch_BHWC: np.ndarray) -> np.ndarray:
        """Pixels uint8 (B, S, S, 3), B one of the batch sizes -> visual query (B, Q, D)."""
        # Kept alive to the end of the call, which reads its memory.
        pixels = self.signature.to_input(batch_BHWC)
        wanted = self._bytes_wanted(len(pixels))
        if len(pixels) not in self.batch_sizes or pixels.nbytes != wanted:
            raise AssertionError(f"{pixels.shape} is none of the batch sizes {self.batch_sizes}")
        mode = "dymbatch" if self._has_gears else "static"
        try:
            with stdout_caught() as caught:
                outputs = self._session.infer([pixels], mode=mode)
                self.device_ms = self._read_device_ms()
        except Exception as error:
            raise running_failed(
                error,
                said=caught.complaints(),
                file=self._file,
                soc=self._soc,
                device=self._device_id,
                wanted=f"{self._port} of batch {_list(self.batch_sizes)}",
                given=f"{pixels.dtype} {pixels.shape} of {pixels.nbytes:,} bytes",
            ) from error
        output = outputs[0]
        self.signature.check_output(output, batch=len(pixels))
        result: np.ndarray = output
        return result

    def free(self) -> None:
        """Unload. Never calls `finalize`, which resets the device for everything in the process."""
        # The last reference goes here too, since the destructor talks to the device.
        session, self._session = self._session, None
        try:
            with stdout_caught() as caught:
                if hasattr(session, "free_resource"):
                    session.free_resource()
                del session
        except Exception as error:  # nobody can do anything about it
            _LOG.warning("ais_bench cannot unload `%s`: %s | %s", self._file, error, caught.complaints())

    @property
    def _soc(self) -> str:
        return "" if self._sidecar is None else self._sidecar.soc_version

    @property
    def _has_gears(self) -> bool:
        return self.signature.batch is None

    def _open(self, infer_session: Any) -> Any:
        try:
            with stdout_caught() as caught:
                return infer_session(self._device_id, self._file)
        except Exception as error:
            raise self._opening_failed(error, said=caught.complaints()) from error

    def _opening_failed(self, error: Exception, *, said: str) -> GraphError:
        return opening_failed(error, said=said, file=self._file, soc=self._soc, device=self._device_id)

    def _describe(self) -> tuple[Port, Signature]:
        try:
            with stdout_caught() as caught:
                descriptions = list(self._session.get_inputs()), list(self._session.get_outputs())
                self._size = [int(description.size) for description in descriptions[0]]
        except Exception as error:
            raise self._opening_failed(error, said=caught.complaints()) from error
        inputs, outputs = ([_port(description) for description in group] for group in descriptions)
        return inputs[0], read_signature(inputs, outputs, file=self._file, card=self.card, hint=_HINT)

    def _check_sidecar(self) -> None:
        """Raise GraphError when the input that the side-car tells of is not the one that the file has."""
        if self._sidecar is None:
            return
        told = self._sidecar.input
        if (told.dtype, told.shape) != (self._port.dtype, self._port.shape):
            raise GraphError(
                f"`{self._file}` takes {self._port}, and its side-car says that it takes {told}",
                hint=f"the side-car was changed, or is that of another file: {_HINT}",
            )

    def _find_batch_sizes(self) -> tuple[int, ...]:
        """From the side-car or, for a fixed OM without one, from the file."""
        fixed, sidecar = self.signature.batch, self._sidecar
        if fixed is None and sidecar is None:
            raise GraphError(
                f"`{self._file}` takes several batch sizes (gears), and without its side-car "
                f"`{sidecar_path(self._file).name}` nobody can tell which",
                hint=f"put the side-car beside it, or {_HINT}",
            )
        sizes = sidecar.batch_sizes if sidecar is not None else (fixed or 0,)
        matches = sidecar is None or (sidecar.has_gears if fixed is None else sidecar.batch_sizes == (fixed,))
        if not matches or self._size != [self._bytes_of(max(sizes))]:
            raise GraphError(
                f"`{self._file}` takes {self._port} of {self._size[0]:,} bytes, which is not the batch {_list(sizes)} "
                "that was to be expected",
                hint=f"its side-car is that of another file: {_HINT}" if sidecar is not None else _HINT,
            )
        return sizes

    def _bytes_of(self, batch: int) -> int:
        return batch * self.signature.image_size**2 * 3 * self.signature.dtype.itemsize

    def _bytes_wanted(self, batch: int) -> int:
        """What ais_bench will demand."""
        return self._size[0] * batch // max(self.batch_sizes)

    def _read_device_ms(self) -> float | None:
        """Milliseconds of the last execution; they are counted in C's float from the loading on, so coarse hours later.

        A pair of start and end since autumn 2023, the time itself before; missing it is no reason to fail.
        """
        try:
            last = self._session.summary().exec_time_list[-1]
            milliseconds = float(last[1] - last[0]) if hasattr(last, "__len__") else float(last)
            self._session.reset_summaryinfo()  # or it grows with every call
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None
        return milliseconds


def _infer_session_class() -> Any:
    """ais_bench's InferSession; imported only here, in the thread that uses it."""
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


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in sizes)
