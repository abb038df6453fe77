"""Plays aclruntime, the compiled half of Ascend's ais_bench: runs the fake OM files of `tests.fakes.om_format`.

Keeps the rules that its users meet: numbers of bytes are all it compares, memory is read through bare pointers, a
context of its own stays current in the calling thread, useful words go to C's stdout only, and errors are codes.
Environment: FAKE_SOC is the chip of the device, FAKE_DEVICES how many there are, FAKE_FAIL=execute makes it fail.
"""

import ctypes
import enum
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime

from tests.fakes.om_format import read_fake_om

GENERATION = int(os.environ.get("FAKE_AIS_BENCH", "2024"))
LIBC = ctypes.CDLL(None)

Dtype = enum.Enum("Dtype", {"float32": 0, "float16": 1, "int8": 2, "uint8": 4, "int64": 9, "double": 11})


class State(threading.local):
    """What belongs to a thread."""

    context: object = "the thread's own"


@dataclass
class Record:
    """What tests look at."""

    calls: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)  # thread, what, shape
    concurrent: int = 0
    most_concurrent: int = 0
    finalized: int = 0
    loaded: int = 0
    freed: int = 0
    lock: Any = field(default_factory=threading.Lock)


STATE, RECORD = State(), Record()


def say(level: str, text: str) -> None:
    """As fprintf(stdout) does it, through C's buffer."""
    LIBC.printf(b"%s\n", f"[{level}] {text}".encode())


def failure(code: int) -> RuntimeError:
    words = {-1: "ACL: general failure", 1: "ACL: invalid parameter"}
    return RuntimeError(f"[{code}][{words.get(code, 'Error code unknown')}] ")


class Descriptor:
    """`tensor_desc`: name, datatype, format, shape, size, realsize."""

    def __init__(self, port: dict[str, Any], *, largest: int) -> None:
        self.name: str = port["name"]
        self.datatype = Dtype["double" if port["dtype"] == "float64" else port["dtype"]]
        self.shape: list[int] = list(port["shape"])
        self.format = 2
        sizes = [largest if size < 0 else size for size in self.shape]
        self.size = int(np.prod(sizes)) * np.dtype(port["dtype"]).itemsize
        self.realsize = self.size


class BaseTensor:
    """An address and a number of bytes; the memory is not kept alive."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size


class Tensor:
    """A result on the device."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self._host = array, False

    def to_host(self) -> None:
        self._host = True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        assert self._host, "still on the device"
        return self._array.copy()


class Summary:
    def __init__(self, times: list[Any]) -> None:
        self.exec_time_list = times


class InferenceSession:
    """A loaded OM."""

    _opened: ClassVar[set[int]] = set()

    def __init__(self, path: str, device_id: int) -> None:
        if not type(self)._opened:
            say("INFO", "acl init success")
        if device_id >= int(os.environ.get("FAKE_DEVICES", "1")):
            say("ACL ERROR", "EE1001: Set device failed, invalid device.")
            say("ERROR", f"acl open device {device_id} failed")
            raise failure(507033)
        if device_id not in type(self)._opened:
            type(self)._opened.add(device_id)
            say("INFO", f"open device {device_id} success")
        self._context = STATE.context = object()
        try:
            self.header, onnx = read_fake_om(Path(path))
        except ValueError:
            self._refuse(path, "EE4001: The model file is invalid, magic number check failed.")
        soc = os.environ.get("FAKE_SOC", "Ascend310P3")
        if self.header["soc_version"] != soc:
            self._refuse(path, f"EE4002: The model was built for {self.header['soc_version']}, the device is {soc}.")
        threads = onnxruntime.SessionOptions()
        threads.intra_op_num_threads = 1
        self._twin = onnxruntime.InferenceSession(onnx, threads, providers=["CPUExecutionProvider"])
        self.gears: list[int] = self.header["batch_sizes"] if self.header["has_gears"] else []
        largest = max(self.header["batch_sizes"])
        self._inputs = [Descriptor(self.header["input"], largest=largest)]
        self._outputs = [Descriptor(self.header["output"], largest=largest)]
        self._batch = largest
        self._times: list[Any] = []
        RECORD.loaded += 1
        say("INFO", f"load model {path} success")
        say("INFO", "create model description success")

    def _refuse(self, path: str, reason: str) -> None:
        say("ACL ERROR", reason)
        say("ERROR", f"load model from file failed, model file is {path}")
        raise failure(1)

    def get_inputs(self) -> list[Descriptor]:
        return self._inputs

    def get_outputs(self) -> list[Descriptor]:
        return self._outputs

    def set_context(self) -> None:
        STATE.context = self._context

    def set_staticbatch(self) -> None:
        self.set_context()  # and realsize stays as it is

    def set_dynamic_batchsize(self, batch: int) -> None:
        self.set_context()
        if not self.gears:
            say("ERROR", "the dynamic_batch_size parameter is not specified for model conversion")
            raise failure(1)
        if batch not in self.gears:
            say("ERROR", "the dymBatch parameter is not correct")
            raise failure(1)
        say("INFO", "check dynamic batch success")
        self._batch = batch
        self._inputs[0].realsize = self._inputs[0].size * batch // max(self.gears)

    def run(self, names: list[str], feeds: list[BaseTensor]) -> list[Tensor]:
        with RECORD.lock:
            RECORD.concurrent += 1
            RECORD.most_concurrent = max(RECORD.most_concurrent, RECORD.concurrent)
        try:
            self.set_context()
            return [self._run(names, feeds)]
        finally:
            with RECORD.lock:
                RECORD.concurrent -= 1

    def _run(self, names: list[str], feeds: list[BaseTensor]) -> Tensor:
        wanted = self._inputs[0]
        if feeds[0].size != wanted.realsize:
            say("ERROR", f"check i:0 name:{wanted.name} in size:{feeds[0].size} needsize:{wanted.realsize} not match")
            raise failure(-1)
        started = time.perf_counter()
        if os.environ.get("FAKE_FAIL") == "execute":
            say("ERROR", "acl execute failed:1")
            raise failure(-1)
        twin = self._twin.get_inputs()[0]
        dtype = np.dtype(np.float16 if "float16" in twin.type else np.float32)
        buffer = np.frombuffer(ctypes.string_at(feeds[0].address, feeds[0].size), dtype=dtype)
        batch = self._batch if self.gears else self.header["batch_sizes"][0]
        RECORD.calls.append((threading.get_ident(), "run", (batch, *twin.shape[1:])))
        (output,) = self._twin.run(None, {twin.name: buffer.reshape(batch, *twin.shape[1:])})
        time.sleep(0.002)  # long enough that concurrent calls would be seen
        start, end = 1e3 * started, 1e3 * time.perf_counter()
        self._times.append((start, end) if GENERATION >= 2024 else end - start)
        return Tensor(output.astype(self.header["output"]["dtype"]))

    def sumary(self) -> Summary:
        return Summary(list(self._times))

    def reset_sumaryinfo(self) -> None:
        self._times.clear()

    def free_resource(self) -> None:
        self.set_context()
        RECORD.calls.append((threading.get_ident(), "free", ()))
        RECORD.freed += 1

    @staticmethod
    def finalize() -> None:
        RECORD.finalized += 1
