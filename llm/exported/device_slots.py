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


class DeviceSlots:
    """`HostSlots` on a device. A graph moves rows on the device. Rare operations copy the data to the host and back."""

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
        past: PastKeyValues | None = None,
    ) -> None:
        """`mover` is an onnxruntime session of the graph `slots.onnx`. `device` is onnxruntime's name of the device."""
        self._host = HostSlots(
            config, num_slots=num_slots, dtype=dtype, past=past
        )  # prefixes, and the shapes of the cache
        self._device, self._device_id, self._allocate, self._mover = device, device_id, allocate, mover
        self._cache_ports, self._kept_ports = (layer_ports(name, config.num_layers) for name in ("cache", "kept"))
        self._prefix = [allocate(whole.shape, dtype) for whole in self._host.prefix]
        self._cache: list[Any] = []
        self._upload_cache()

    @property
    def capacity(self) -> int:
        """See `DecoderProgram.capacity`."""
        return self._host.capacity

    def reserve(self, num_places: int) -> None:
        """See `DecoderProgram.reserve`. A larger cache is filled through the host."""
        if num_places <= self.capacity:
            return
        self._host.cache = [value.numpy() for value in self._cache]
        self._host.reserve(num_places)
        self._upload_cache()

    def place(self, prefixes: Sequence[Prefix], *, first_slot: int) -> None:
        """See `DecoderProgram.place`."""
        self._host.place(prefixes, first_slot=first_slot)
        self._upload_prefixes()

    def prefix(self, rows: slice) -> list[Buffer]:
        """The prefixes of rows, in the order of the ports."""
        return [self._rows(value, rows) for value in self._prefix]

    def cache(self, rows: slice) -> list[Buffer]:
        """The cache of rows, in the order of the ports."""
        return [self._rows(value, rows) for value in self._cache]

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        """See `DecoderProgram.move`."""
        binding = self._mover.io_binding()
        places = {name: np.array([slot], np.int64) for name, slot in ((SOURCE, source), (TARGET, target))}
        for name, place in places.items():
            binding.bind_input(name, *Buffer.of(place))
        for name, kept, buffer in zip(self._cache_ports, self._kept_ports, self.cache(slice(None)), strict=True):
            binding.bind_input(name, *buffer)
            binding.bind_output(kept, *buffer)
        self._mover.run_with_iobinding(binding)
        for whole in self._host.prefix:
            whole[target] = whole[source]
        self._upload_prefixes()

    def clear(self, slot: int) -> None:
        """See `DecoderProgram.clear`."""
        for value in self._cache:
            whole = value.numpy().copy()
            whole[slot, :, self._host.start :] = 0
            value.update_inplace(whole)
        for whole in self._host.prefix:
            whole[slot] = 0
        self._upload_prefixes()

    def fresh(self, num_rows: int, num_places: int) -> list[np.ndarray]:
        """See `HostSlots.fresh`."""
        return self._host.fresh(num_rows, num_places)

    def _upload_cache(self) -> None:
        """Allocate the cache on the device, copy the host's cache into it, and release the host's cache."""
        whole_arrays, self._host.cache, self._cache = self._host.cache, [], []
        for whole in whole_arrays:
            self._cache.append(self._allocate(whole.shape, whole.dtype))
            self._cache[-1].update_inplace(whole)

    def _upload_prefixes(self) -> None:
        for value, whole in zip(self._prefix, self._host.prefix, strict=True):
            value.update_inplace(whole)

    def _rows(self, value: Any, rows: slice) -> Buffer:
        shape = tuple(value.shape())
        start, stop, _ = rows.indices(shape[0])
        dtype = self._host.dtype
        row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        address = value.data_ptr() + start * row_bytes
        return Buffer(self._device, self._device_id, dtype, (stop - start, *shape[1:]), address)
