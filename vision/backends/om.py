"""The encoder as OM files, run through ais_bench in a thread of its own."""

import atexit
import functools
import os
import threading
import weakref
from pathlib import Path

import numpy as np
from torch import Tensor

from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.card import EncoderCard, is_same
from llama_adapter.runtime.graphs.ladder import run_ladder
from llama_adapter.runtime.graphs.worker import Worker
from llama_adapter.vision.backends.exported import check_owner, to_tensor
from llama_adapter.vision.backends.om_session import OmSession


class OmVisionBackend:
    """Runs one OM, with a fixed batch size or with gears, or a folder of OMs of several batch sizes.

    ais_bench makes an ACL context of its own current in the thread that calls it and never restores the one before, on
    which torch_npu's streams depend. Contexts belong to threads, so the sessions live in one thread that nobody else
    uses. Where a decoder runs on the same device, bring that device up first. Not tried on hardware so far.
    """

    def __init__(self, path: str | os.PathLike[str], *, device_id: int = 0) -> None:
        """Raises GraphError for files, installations and devices that are of no use."""
        self._file = str(path)
        self._name = f"ais_bench (device {device_id})"
        self.device_ms: float | None = None  # of the last `encode`, as ais_bench measured it; None where it did not
        files = _om_files(Path(path))
        self._owner = os.getpid()
        self._worker = Worker(name=self._name)
        self._sessions: list[OmSession] = []
        # Also when nobody calls close: at the end of the object, or of the program. There it must come before what
        # was registered earlier, such as torch_npu's own end, so weakref's place among the exit functions will not do.
        self._finalizer = weakref.finalize(self, _shut_down, self._worker, self._sessions, self._owner)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)
        try:
            for file in files:
                self._sessions.append(self._worker.call(functools.partial(OmSession, file, device_id=device_id)))
            self._by_size = _by_size(self._sessions, path=self._file)
        except BaseException:
            self.close()
            raise
        self._signature = self._sessions[0].signature
        self.card: EncoderCard | None = self._sessions[0].card

    @property
    def name(self) -> str:
        """What runs it, and where."""
        return self._name

    @property
    def image_size(self) -> int:
        return self._signature.image_size

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """Ascending: gears, or the batch sizes of the files."""
        return tuple(self._by_size)

    def encode(self, pixels_BHWC: np.ndarray) -> Tensor:
        """Pixels uint8 (B, S, S, 3) RGB -> visual query (B, Q, D) on the CPU, in the graph's type.

        Raises GraphError for other pixels, and when the device fails.
        """
        if not self._finalizer.alive:
            raise GraphError(f"`{self._file}` was closed and encodes nothing more")
        check_owner(self._owner, file=self._file)
        self._signature.check_pixels(pixels_BHWC)
        return to_tensor(self._worker.call(lambda: self._encode(pixels_BHWC)))

    def close(self) -> None:
        """Unload the files and end the thread."""
        atexit.unregister(self._finalizer)
        if self._finalizer.detach() and os.getpid() == self._owner:
            _end(self._worker, self._sessions, wait=True)

    def _encode(self, pixels_BHWC: np.ndarray) -> np.ndarray:
        """In the sessions' thread."""
        times: list[float | None] = []

        def run(batch_BHWC: np.ndarray) -> np.ndarray:
            session = self._by_size[len(batch_BHWC)]
            output = session.run(batch_BHWC)
            times.append(session.device_ms)
            return output

        result = run_ladder(pixels_BHWC, self.batch_sizes, run)
        known = [time for time in times if time is not None]
        self.device_ms = sum(known) if len(known) == len(times) else None
        return result


def _om_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.om"))
    if not files:
        raise GraphError(
            f"The folder `{path}` holds no .om file", hint="`llama-adapter export om --out FOLDER/NAME` makes some"
        )
    return files


def _by_size(sessions: list[OmSession], *, path: str) -> dict[int, OmSession]:
    """Which session runs which batch size, ascending; raises GraphError when they are not of one encoder."""
    found: dict[int, OmSession] = {}
    first = sessions[0]
    for session in sessions:
        same = all(
            getattr(session.signature, field) == getattr(first.signature, field)
            for field in ("image_size", "output_dtype", "output_shape")
        )
        if not same or not _is_one_encoder(session.card, first.card):
            raise GraphError(
                f"The OM files of `{path}` are not of one encoder: `{session.signature.file}` differs from "
                f"`{first.signature.file}`",
                hint="keep one encoder's files in a folder, each with its side-car",
            )
        for size in session.batch_sizes:
            if size in found:
                raise GraphError(
                    f"The folder `{path}` has two files for a batch of {size}: `{found[size].signature.file}` and "
                    f"`{session.signature.file}`",
                    hint="keep one of them",
                )
            found[size] = session
    return dict(sorted(found.items()))


def _is_one_encoder(one: EncoderCard | None, other: EncoderCard | None) -> bool:
    """Sizes, heads and order of colours too: the same weights make other queries with those of another model."""
    if one is None or other is None:
        return one is other
    halves = one.fingerprint.keys() | other.fingerprint.keys()
    return one.vision == other.vision and all(
        is_same(one.fingerprint.get(half), other.fingerprint.get(half)) for half in halves
    )


def _shut_down(worker: Worker, sessions: list[OmSession], owner: int) -> None:
    """For a backend that nobody closed: waits at the end of the program only.

    An object may be collected in any thread, also in one that the sessions' thread waits for. A process that was
    forked off has neither that thread nor a say in the device.
    """
    if os.getpid() == owner:
        _end(worker, sessions, wait=threading.current_thread() is threading.main_thread())


def _end(worker: Worker, sessions: list[OmSession], *, wait: bool) -> None:
    def free() -> None:
        while sessions:
            sessions.pop().free()

    worker.end(free, wait=wait)
