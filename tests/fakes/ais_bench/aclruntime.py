"""Simulates aclruntime, the compiled half of Ascend's ais_bench: runs the fake OM files of `tests.fakes.om_format`.

It keeps the behaviour that users of aclruntime must handle. It compares only numbers of bytes. It reads memory through
bare pointers. It leaves its own context current in the calling thread. Useful messages go only to C's stdout, and
errors are codes. Environment variables: FAKE_AIS_BENCH is the generation, 2023 or 2024, FAKE_SOC the chip of the
device, FAKE_DEVICES the number of devices, and FAKE_FAIL=execute makes execution fail.
"""

import ctypes
import enum
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime

from tests.fakes.om_format import read_fake_om

LIBC = ctypes.CDLL(None)

DTYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int64": 9, "double": 11, "bool": 12}
Dtype = enum.Enum("Dtype", DTYPES)

TWIN_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


class State(threading.local):
    """The state of a thread."""

    context: object = "the thread's own"


@dataclass
class Record:
    """Calls recorded for tests."""

    calls: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)  # thread, operation, shape
    concurrent: int = 0
    most_concurrent: int = 0
    finalized: int = 0
    loaded: int = 0
    freed: int = 0
    lock: Any = field(default_factory=threading.Lock)


STATE, RECORD = State(), Record()


def say(level: str, text: str) -> None:
    """Print like fprintf(stdout), through C's buffer."""
    LIBC.printf(b"%s\n", f"[{level}] {text}".encode())


def failure(code: int) -> RuntimeError:
    words = {-1: "ACL: general failure", 1: "ACL: invalid parameter", 3: "ACL: runtime failure"}
    return RuntimeError(f"[{code}][{words.get(code, 'Error code unknown')}] ")


def split_dims(text: str) -> tuple[str, str]:
    """`name:1,4` -> name, 1,4."""
    name, _, sizes = text.rpartition(":")
    return name, sizes


class Descriptor:
    """`tensor_desc`: name, datatype, format, shape, size, realsize."""

    def __init__(self, port: dict[str, Any], gears: list[dict[Any, int]]) -> None:
        self.name: str = port["name"]
        self.datatype = Dtype["double" if port["dtype"] == "float64" else port["dtype"]]
        self.shape = [-1 if isinstance(size, str) else size for size in port["shape"]]
        self.itemsize = np.dtype(port["dtype"]).itemsize
        sizes = [[gear.get(size, size) for size in port["shape"]] for gear in gears]
        self.size = self.itemsize * max(int(np.prod(shape)) for shape in sizes)
        self.realsize = self.size


class BaseTensor:
    """An address and a number of bytes. It does not keep the memory alive."""

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
        if int(os.environ.get("FAKE_AIS_BENCH", "2024")) >= 2024 and os.path.abspath(path).count("/") > 32:
            say("ERROR", "path depth invalid")
            raise RuntimeError("please check model path")
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
        self._has_dims = "gears" in self.header
        if self._has_dims:
            inputs, outputs, gears = (self.header[name] for name in ("inputs", "outputs", "gears"))
            self.gears: list[int] = []
        else:
            inputs, outputs = [self.header["input"]], [self.header["output"]]
            self.gears = self.header["batch_sizes"] if self.header["has_gears"] else []
            gears = [{-1: size} for size in self.header["batch_sizes"]]
        self._inputs = [Descriptor(port, gears) for port in inputs]
        self._outputs = [Descriptor(port, gears) for port in outputs]
        # As aclmdlGetOutputDims describes outputs, each in the gear where it is largest.
        for output, port in zip(self._outputs, outputs, strict=True):
            output.shape = max(([gear.get(size, size) for size in port["shape"]] for gear in gears), key=np.prod)
        self._shapes = [[max(gear.get(size, size) for gear in gears) for size in port["shape"]] for port in inputs]
        self._given = [port["dtype"] for port in inputs]
        self._dtypes = [port["dtype"] for port in outputs]
        self._dims_are_set = False
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
        if self._context is None:
            raise failure(107002)  # destroyed by `free_resource`
        STATE.context = self._context

    def set_staticbatch(self) -> None:
        self.set_context()  # realsize does not change
        self._dims_are_set = False

    def set_dynamic_batchsize(self, batch: int) -> None:
        self.set_context()
        if not self.gears:
            say("ERROR", "the dynamic_batch_size parameter is not specified for model conversion")
            raise failure(1)
        if batch not in self.gears:
            say("ERROR", "the dymBatch parameter is not correct")
            raise failure(1)
        say("INFO", "check dynamic batch success")
        self._shapes[0][0] = batch
        self._inputs[0].realsize = self._inputs[0].size * batch // max(self.gears)

    def set_dynamic_dims(self, text: str) -> None:
        self.set_context()
        one = r"[\w./-]{1,256}:(?=[\d,]{1,30}(;|$))[1-9]\d{0,8}(,[1-9]\d{0,8}){0,5}"
        if len(text) > 4096 or not re.fullmatch(rf"{one}(;{one})*", text, re.ASCII):
            raise RuntimeError("the format of dynamic dims string is illegal, please check")
        if not self._has_dims:
            say("INFO", "the dynamic_dims parameter is not specified for model conversion")
            raise failure(-1)
        shapes = {name: [int(size) for size in sizes.split(",")] for name, sizes in map(split_dims, text.split(";"))}
        dims = [size for shape in shapes.values() for size in shape]
        gears = [
            [gear.get(size, size) for port in self.header["inputs"] for size in port["shape"]]
            for gear in self.header["gears"]
        ]
        if dims not in gears:
            say("ERROR", "the dynamic_dims parameter is not correct")
            for number, gear in enumerate(gears):
                say("ERROR", f"dims[{number}]:{''.join(f'[{size}]' for size in gear)}")
            say("ERROR", "check dynamic dims failed, please set correct dymDims paramenter")
            raise failure(-1)
        self._shapes = list(shapes.values())
        for wanted in self._inputs:
            wanted.realsize = int(np.prod(shapes[wanted.name])) * wanted.itemsize
        self._dims_are_set = True

    def run(self, names: list[str], feeds: list[BaseTensor]) -> list[Tensor]:
        with RECORD.lock:
            RECORD.concurrent += 1
            RECORD.most_concurrent = max(RECORD.most_concurrent, RECORD.concurrent)
        try:
            self.set_context()
            return self._run(names, feeds)
        finally:
            with RECORD.lock:
                RECORD.concurrent -= 1

    def _run(self, names: list[str], feeds: list[BaseTensor]) -> list[Tensor]:
        if len(feeds) != len(self._inputs):
            say("ERROR", f"feeds size: {len(feeds)} not equal to model tensor desc size: {len(self._inputs)}")
            raise failure(3)
        for number, (feed, wanted) in enumerate(zip(feeds, self._inputs, strict=True)):
            if feed.size != wanted.realsize:
                sizes = f"in size:{feed.size} needsize:{wanted.realsize}"
                say("ERROR", f"check i:{number} name:{wanted.name} {sizes} not match")
                raise failure(-1)
        if self._has_dims and not self._dims_are_set:
            say("WARN", f"check failed dym gearcount:{len(self.header['gears'])} but dymtype:0 not set")
            raise failure(-1)
        started = time.perf_counter()
        if os.environ.get("FAKE_FAIL") == "execute":
            say("ERROR", "acl execute failed:1")
            raise failure(-1)
        arrays = {}
        twins = self._twin.get_inputs()
        for twin, feed, shape, dtype in zip(twins, feeds, self._shapes, self._given, strict=True):
            buffer = np.frombuffer(ctypes.string_at(feed.address, feed.size), dtype=dtype)
            arrays[twin.name] = buffer.reshape(shape).astype(TWIN_DTYPES[twin.type])
        RECORD.calls.append((threading.get_ident(), "run", tuple(self._shapes[0])))
        outputs = self._twin.run(None, arrays)
        time.sleep(0.002)  # long enough for concurrent calls to be noticed
        start, end = 1e3 * started, 1e3 * time.perf_counter()
        self._times.append((start, end) if int(os.environ.get("FAKE_AIS_BENCH", "2024")) >= 2024 else end - start)
        return [Tensor(output.astype(dtype)) for output, dtype in zip(outputs, self._dtypes, strict=True)]

    def sumary(self) -> Summary:
        return Summary(list(self._times))

    def reset_sumaryinfo(self) -> None:
        self._times.clear()

    def free_resource(self) -> None:
        self.set_context()
        RECORD.calls.append((threading.get_ident(), "free", ()))
        RECORD.freed += 1
        self._context = None

    @staticmethod
    def finalize() -> None:
        RECORD.finalized += 1
