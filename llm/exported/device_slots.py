"""Keys, values and prefixes of all slots in the memory of onnxruntime's device; steps bind them by address."""

# R rows, P places, N heads, H head size, Q queries

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.program import HostSlots
from llama_adapter.llm.exported.step import SOURCE, TARGET, layer_ports
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix

# Allocates an array of zeros (shape, dtype) on the device.
Allocate = Callable[[Sequence[int], np.dtype], Any]


class Buffer(NamedTuple):
    """An array in device memory, with the arguments that onnxruntime's IO binding needs."""

    device: str
    device_id: int
    dtype: np.dtype
    shape: Sequence[int]
    address: int

    @classmethod
    def of(cls, array: np.ndarray) -> "Buffer":
        """The buffer of a contiguous array of the host. The caller must keep the array alive."""
        return cls("cpu", 0, array.dtype, array.shape, array.ctypes.data)


class DeviceSlots(HostSlots):
    """Slots on a device. A graph moves rows there. Rare operations copy the data to the host and back.

    The host keeps the prefixes too, and the cache only while it is copied.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_slots: int,
        dtype: np.dtype,
        device: str,
        device_id: int,
        allocate: Allocate,
        mover: Any,
        past: PastKeyValues | None,
    ) -> None:
        """`mover` is an onnxruntime session of the graph `slots.onnx`. `device` is onnxruntime's name of the device."""
        super().__init__(config, num_slots=num_slots, dtype=dtype, past=past)
        self._device, self._device_id, self._allocate, self._mover = device, device_id, allocate, mover
        self._cache_ports, self._kept_ports = (layer_ports(name, config.num_layers) for name in ("cache", "kept"))
        self._prefix = [allocate(whole.shape, dtype) for whole in self.prefix]
        self._cache: list[Any] = []
        self._upload_cache()

    def reserve(self, num_places: int) -> None:
        if num_places <= self.capacity:
            return
        self.cache = [value.numpy() for value in self._cache]
        super().reserve(num_places)
        self._upload_cache()

    def place(self, prefixes: Sequence[Prefix], *, first_slot: int) -> None:
        super().place(prefixes, first_slot=first_slot)
        self._upload_prefixes()

    def prefix_buffers(self, rows: slice) -> list[Buffer]:
        """The prefixes of rows, in the order of the ports."""
        return [self._rows(value, rows) for value in self._prefix]

    def cache_buffers(self, rows: slice) -> list[Buffer]:
        """The cache of rows, in the order of the ports."""
        return [self._rows(value, rows) for value in self._cache]

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        binding = self._mover.io_binding()
        places = {name: np.array([slot], np.int64) for name, slot in ((SOURCE, source), (TARGET, target))}
        for name, place in places.items():
            binding.bind_input(name, *Buffer.of(place))
        for name, kept, buffer in zip(
            self._cache_ports, self._kept_ports, self.cache_buffers(slice(None)), strict=True
        ):
            binding.bind_input(name, *buffer)
            binding.bind_output(kept, *buffer)
        self._mover.run_with_iobinding(binding)
        super().move(source, target, num_tokens=num_tokens)
        self._upload_prefixes()

    def clear(self, slot: int) -> None:
        for value in self._cache:
            whole = value.numpy().copy()
            whole[slot, :, self.start :] = 0
            value.update_inplace(whole)
        super().clear(slot)
        self._upload_prefixes()

    def _upload_cache(self) -> None:
        """Allocate the cache on the device, copy the host's cache into it, and release the host's cache."""
        whole_arrays, self.cache, self._cache = self.cache, [], []
        for whole in whole_arrays:
            self._cache.append(self._allocate(whole.shape, whole.dtype))
            self._cache[-1].update_inplace(whole)

    def _upload_prefixes(self) -> None:
        for value, whole in zip(self._prefix, self.prefix, strict=True):
            value.update_inplace(whole)

    def _rows(self, value: Any, rows: slice) -> Buffer:
        shape = tuple(value.shape())
        start, stop, _ = rows.indices(shape[0])
        row_bytes = int(np.prod(shape[1:])) * self.dtype.itemsize
        address = value.data_ptr() + start * row_bytes
        return Buffer(self._device, self._device_id, self.dtype, (stop - start, *shape[1:]), address)
