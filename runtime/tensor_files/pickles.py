"""Reads torch's pickles as data: no class is looked up and no function is called.

Python's own unpickler calls any function that a pickle names, and even a restricted unpickler lets a few bytes allocate
gigabytes. Here, names are only compared with those that a checkpoint needs: plain values, dictionaries, tensors in
storages, and attributes of the modules of a TorchScript archive.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from llama_adapter.runtime.errors import CheckpointError

MAX_BYTES: Final = 4 << 20  # of one pickle; that of LLaMA-65B with its optimiser has a tenth of this
_MAX_SIDE: Final = 1 << 48
_MAX_DIMS: Final = 16

STORAGES: Final = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Double": torch.float64,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
        # Quantised numbers, read as bytes. Such tensors are not used as weights.
        "QInt8": torch.int8,
        "QUInt8": torch.uint8,
        "QUInt4x2": torch.uint8,
        "QUInt2x4": torch.uint8,
        "QInt32": torch.int32,
    }.items()
}
_DICTIONARY = "collections.OrderedDict"
_TENSOR = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_WRAPPED = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_SUBCLASS = "torch._tensor._rebuild_from_type_v2"  # a tensor with additional attributes, which are ignored
# Harmless objects that are not used; they become `Unread`. The adapters' trainer stores its command line as a
# Namespace. Tensors of these kinds are not used as weights.
_OTHER_KIND = "torch._utils._rebuild_"
_UNREAD = frozenset(
    {
        "argparse.Namespace",
        "_codecs.encode",
        *(f"builtins.{name}" for name in ("bytearray", "complex", "set")),
        *(f"__builtin__.{name}" for name in ("bytearray", "complex", "set")),
        "collections.Counter",
        *(f"torch.{name}" for name in ("Size", "device", "Tensor")),
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
        *(
            _OTHER_KIND + kind
            for kind in (
                "device_tensor_from_cpu_tensor",
                "device_tensor_from_numpy",
                "meta_tensor_no_storage",
                "nested_tensor",
                "qtensor",
                "sparse_tensor",
                "tensor_v3",
            )
        ),
        *(
            f"torch.jit._pickle.{name}"
            for name in ("build_boollist", "build_doublelist", "build_intlist", "build_tensorlist", "restore_type_tag")
        ),
    }
)
_DTYPE = re.compile(r"torch\.(b?float|complex|q?u?int|bool|bits|per_tensor|per_channel)\w*", re.ASCII)
_MODULE = re.compile(r"__torch__(\.\w+)+", re.ASCII)
_CUSTOM = "__torch__.torch.classes."  # classes implemented in C++, which have their own serialised form


class PickleError(CheckpointError):
    """Bytes that are not a pickle of torch, or a damaged one."""


class ForeignObjectError(PickleError):
    """A pickle with an object that no checkpoint needs. `name` is the name of its class or function."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True)
class StorageHeader:
    """Numbers of one type, stored in the file under `key`. `start` is the index where a view of them begins."""

    dtype: torch.dtype
    key: str
    numel: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor whose numbers have not been read yet. Offset and strides count elements of its storage."""

    storage: StorageHeader
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The index of the last element of the storage that the tensor uses, plus one."""
        if not self.numel:
            return self.offset
        return self.offset + sum((side - 1) * step for side, step in zip(self.shape, self.stride, strict=True)) + 1


@dataclass(slots=True, eq=False)
class Module:
    """A module of a TorchScript archive: its stored attributes. Its code is not read.

    A key that is not a string shows that the module has its own serialised form.
    """

    name: str
    attributes: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for a harmless object that is not used."""

    name: str

    @property
    def tensor_kind(self) -> str | None:
        """The kind of tensor, such as `sparse_tensor`; None if the object is not a tensor."""
        return self.name.removeprefix(_OTHER_KIND) if self.name.startswith(_OTHER_KIND) else None


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function as the pickle names it."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pickle:
    """The content of a pickle, the storages that it names, by key, and the index of the byte after it."""

    value: Any
    storages: Mapping[str, StorageHeader]
    end: int


def read_pickle(data: bytes, *, start: int = 0, torchscript: bool = False) -> Pickle:
    """Read the pickle that begins at byte `start`.

    Tensors become TensorHeader, modules Module (only with `torchscript`), and harmless unused objects Unread. Raises
    ForeignObjectError for any other object, and PickleError for bytes that are not a pickle of torch.
    """
    reader = _Reader(data, start, torchscript=torchscript)
    try:
        return Pickle(value=reader.read(), storages=reader.storages, end=reader.at)
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise PickleError(f"{type(error).__name__} at byte {reader.at}") from None


class _Reader:
    """Executes the opcodes of protocol 2 that torch writes, on a stack of plain values."""

    def __init__(self, data: bytes, start: int, *, torchscript: bool) -> None:
        self.data = data
        self.at = start
        self.torchscript = torchscript
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the stacks below each mark
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, StorageHeader] = {}

    def read(self) -> Any:
        while True:
            match self._bytes(1):
                case b".":  # STOP
                    return self.stack.pop()
                case b"(":  # MARK
                    self.marks.append(self.stack)
                    self.stack = []
                case b"t":  # TUPLE
                    self._push(tuple(self._above_mark()))
                case b"a":  # APPEND
                    value = self.stack.pop()
                    _require(self.stack[-1], list).append(value)
                case b"e":  # APPENDS
                    values = self._above_mark()
                    _require(self.stack[-1], list).extend(values)
                case b"s":  # SETITEM
                    value, key = self.stack.pop(), self.stack.pop()
                    self._set_items([key, value])
                case b"u":  # SETITEMS
                    self._set_items(self._above_mark())
                case b"R":  # REDUCE
                    arguments, name = self.stack.pop(), self.stack.pop()
                    self._push(_rebuilt(name, arguments))
                case b"\x81":  # NEWOBJ
                    arguments, name = self.stack.pop(), self.stack.pop()
                    self._push(_new(_require(name, _Name).name, arguments))
                case b"b":  # BUILD
                    state = self.stack.pop()
                    _set_state(self.stack[-1], state)
                case b"Q":  # BINPERSID
                    storage = _storage(self.stack.pop())
                    self.storages[storage.key] = storage
                    self._push(storage)
                case opcode:
                    self._read_value(opcode)

    def _read_value(self, opcode: bytes) -> None:
        """The opcodes that push a plain value, and those of the memo."""
        match opcode:
            case b"\x80":  # PROTO
                if self._bytes(1)[0] > 5:
                    raise ValueError("protocol")
            case b"c":  # GLOBAL
                self._push(_Name(self._name()))
            case b"q":  # BINPUT
                self.memo[self._bytes(1)[0]] = self.stack[-1]
            case b"r":  # LONG_BINPUT
                self.memo[self._number("<I")] = self.stack[-1]
            case b"h":  # BINGET
                self._push(self.memo[self._bytes(1)[0]])
            case b"j":  # LONG_BINGET
                self._push(self.memo[self._number("<I")])
            case b"X":  # BINUNICODE
                self._push(self._bytes(self._number("<I")).decode("utf-8", "surrogatepass"))
            case b"U":  # SHORT_BINSTRING, of Python 2
                self._push(self._bytes(self._bytes(1)[0]).decode())
            case b"K":  # BININT1
                self._push(self._bytes(1)[0])
            case b"M":  # BININT2
                self._push(self._number("<H"))
            case b"J":  # BININT
                self._push(self._number("<i"))
            case b"\x8a":  # LONG1
                self._push(int.from_bytes(self._bytes(self._bytes(1)[0]), "little", signed=True))
            case b"G":  # BINFLOAT
                self._push(struct.unpack(">d", self._bytes(8))[0])
            case b"N":
                self._push(None)
            case b"\x88":
                self._push(True)
            case b"\x89":
                self._push(False)
            case b"}":
                self._push({})
            case b"]":
                self._push([])
            case b")":
                self._push(())
            case b"\x85" | b"\x86" | b"\x87":  # TUPLE1 to TUPLE3
                count = opcode[0] - 0x84
                if len(self.stack) < count:
                    raise IndexError("stack")
                self.stack[-count:] = [tuple(self.stack[-count:])]
            case _:
                raise ValueError(f"opcode {opcode!r}")

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _bytes(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise IndexError("end of data")
        self.at += count
        return found

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form)))[0])

    def _name(self) -> str:
        """The two lines after GLOBAL as one dotted name. Raises ForeignObjectError if the name is not known."""
        words = []
        for _ in range(2):
            end = self.data.index(b"\n", self.at)
            words.append(self.data[self.at : end].decode())
            self.at = end + 1
        name = ".".join(words)
        if name in (_DICTIONARY, *_TENSOR, *_WRAPPED, _SUBCLASS) or name in _UNREAD or name in STORAGES:
            return name
        if _DTYPE.fullmatch(name):
            return name
        if self.torchscript and _MODULE.fullmatch(name) and not name.startswith(_CUSTOM):
            return name
        raise ForeignObjectError(name)

    def _above_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.marks.pop()
        return values

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Unread):
            return
        _require(target, dict).update(_pairs(values[::2], values[1::2]))


def _require(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def _pairs(keys: list[Any], values: list[Any]) -> dict[Any, Any]:
    # Tuples are refused as keys: Python would hash nested tuples recursively in C, without a limit on the depth.
    if any(not isinstance(key, str | int | float | None) for key in keys):
        raise TypeError("key")
    return dict(zip(keys, values, strict=True))


def _new(name: str, arguments: Any) -> Any:
    if name.startswith("__torch__.") and arguments == ():
        return Module(name)
    if name in _UNREAD:
        return Unread(name)
    raise TypeError(name)


def _set_state(target: Any, state: Any) -> None:
    """Keep the state of a module. The state of other objects is not used."""
    if isinstance(target, dict | Unread):
        return
    module = _require(target, Module)
    # The state of a module with a `__setstate__` can only be interpreted by running that. Keys are checked later, in
    # `module_tensors`, because many modules may share one dictionary.
    if type(state) is not dict or module.attributes:
        raise ForeignObjectError(module.name)
    module.attributes = state


def _rebuilt(function: Any, arguments: Any) -> Any:
    """The object that the named function would return for these arguments."""
    name = _require(function, _Name).name
    _require(arguments, tuple)
    if name == _SUBCLASS:
        function, _, arguments, _ = arguments
        name = _require(function, _Name).name
    if name == _DICTIONARY:
        [listed] = arguments or ([],)
        pairs = [_require(pair, list | tuple) for pair in _require(listed, list)]  # type: ignore[arg-type]
        listed.clear()  # a pickle could pass one list many times
        return _pairs([key for key, _ in pairs], [value for _, value in pairs])
    if name in _TENSOR:
        return _tensor(*arguments[:4])
    if name in _WRAPPED:
        return _require(arguments[0], TensorHeader | Unread)  # type: ignore[arg-type]
    if name in _UNREAD:
        return Unread(name)
    raise TypeError(name)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> TensorHeader:
    _require(storage, StorageHeader)
    _require(shape, tuple)
    _require(stride, tuple)
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or len(shape) > _MAX_DIMS:
        raise ValueError("shape")
    if any(type(number) is not int or not 0 <= number < _MAX_SIDE for number in numbers):
        raise ValueError("shape")
    return TensorHeader(storage, storage.start + offset, shape, stride)


def _storage(identity: Any) -> StorageHeader:
    """From the tuple ("storage", type, key, device, number of elements), and a view in files before torch 1.6.

    The device is the one from which the tensor was saved, and is not used.
    """
    word, kind, key, _, numel, *views = _require(identity, tuple)
    dtype = STORAGES[_require(kind, _Name).name]
    if word != "storage" or type(key) is not str or type(numel) is not int or not 0 <= numel < _MAX_SIDE:
        raise ValueError("storage")
    start = views[0][1] if views and views[0] is not None else 0
    if type(start) is not int or not 0 <= start < _MAX_SIDE:
        raise ValueError("storage")
    return StorageHeader(dtype, key, numel, start)
