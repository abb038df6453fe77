"""An exported decoder in onnxruntime, which writes its cache in place, in the memory of its device."""

# R rows, P places, N heads, H head size, Q queries

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.exported.card import ExportCard
from llama_adapter.llm.exported.export import DECODER_FILE, PREFIX_FILE, SLOTS_FILE
from llama_adapter.llm.exported.program import DecoderProgram, HostSlots, by_ports, stacked
from llama_adapter.llm.exported.step import (
    EMBEDDINGS,
    IDS,
    LOGITS,
    MASK,
    PLACES,
    POSITIONS,
    SAMPLING,
    SOURCE,
    TARGET,
    TOKENS,
    VISUAL_QUERY,
    WANTED,
    Step,
    layer_ports,
    num_prefix_layers,
    score_step,
)
from llama_adapter.llm.model.blocks import Past
from llama_adapter.llm.past import PastKeyValues
from llama_adapter.llm.prefix import Prefix
from llama_adapter.llm.runners.host import Prediction
from llama_adapter.llm.runners.score_layout import ScoreLayout
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.onnx_provider import CPU, KINDS, OnnxProvider
from llama_adapter.runtime.graphs.onnx_session import open_inference_session, zeros_on_device
from llama_adapter.runtime.text import one_line

_DEVICES: Final = {  # execution provider -> onnxruntime's name of its memory
    CPU.name: "cpu",
    KINDS["cuda"].name: "cuda",
    KINDS["npu"].name: "cann",
}
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


class OnnxProgram(DecoderProgram):
    """See `DecoderProgram`. The cache is input and output of the graph at the same addresses, so it is not copied."""

    def __init__(
        self,
        card: ExportCard,
        folder: Path,
        *,
        threads: int,
        num_slots: int,
        provider: OnnxProvider = CPU,
        on_device: bool = False,
        past: PastKeyValues | None = None,
    ) -> None:
        """On an accelerator, the cache is in device memory; with `on_device`, the host is treated as an accelerator.

        Slots begin with `past`. Raises GraphError for graphs that onnxruntime cannot open or that do not fit the card.
        """
        self.card, self._config, self._folder = card, card.config, folder
        self.name = f"onnxruntime ({provider.name})"
        self._dtype = np.dtype(card.dtype)
        self._step: Any = open_inference_session(folder / DECODER_FILE, threads=threads, provider=provider)
        self._cache_ports = layer_ports("cache", self._config.num_layers)
        self._kept_ports = layer_ports("kept", self._config.num_layers)
        self._prefix_ports = layer_ports("prefix", num_prefix_layers(self._config))
        wanted = {IDS, POSITIONS, PLACES, MASK, WANTED, *self._prefix_ports, *self._cache_ports}
        wanted |= set(SAMPLING) if card.has_sampling else set()
        wanted |= set() if card.picture_format is None else {EMBEDDINGS}
        found = {port.name for port in self._step.get_inputs()}
        if found != wanted:
            differing = ", ".join(sorted(found ^ wanted)[:4])
            raise GraphError(
                f"`{folder / DECODER_FILE}` has other inputs than a decoder of its card: {differing}",
                hint="the folder is mixed from two exports: copy it again, or export the decoder again",
            )
        self._prefix: Any = None
        if self._prefix_ports:
            # The matrices are those of the step's graph. They are read from the mapped file, not packed a second time.
            entries = {**provider.session_entries, "session.disable_prepacking": "1"}
            mapped = dataclasses.replace(provider, session_entries=entries)
            self._prefix = open_inference_session(folder / PREFIX_FILE, threads=threads, provider=mapped)
        if provider.name == CPU.name and not on_device:
            self.slots = HostSlots(self._config, num_slots=num_slots, dtype=self._dtype, past=past)
            self.keeps_prompts = True
        else:
            device, device_id = _DEVICES[provider.name], int(provider.options.get("device_id", "0"))
            self.slots = DeviceSlots(
                self._config,
                num_slots=num_slots,
                dtype=self._dtype,
                device=device,
                device_id=device_id,
                allocate=lambda shape, dtype: zeros_on_device(shape, dtype, device=device, device_id=device_id),
                mover=open_inference_session(folder / SLOTS_FILE, threads=threads, provider=provider),
                past=past,
            )

    def project(self, visual_query_BQD: np.ndarray) -> Prefix:
        if self._prefix is None:
            return stacked([], self._config, num_pictures=len(visual_query_BQD))
        outputs = self._guarded(lambda: self._prefix.run(self._prefix_ports, {VISUAL_QUERY: visual_query_BQD}))
        return stacked(outputs, self._config, num_pictures=len(visual_query_BQD))

    def run(self, step: Step, *, first_slot: int) -> Prediction:
        rows = slice(first_slot, first_slot + len(step.ids_RS))
        if isinstance(self.slots, DeviceSlots):
            return self._run(step, self.slots.prefix_buffers(rows), self.slots.cache_buffers(rows))
        prefix, cache = ([Buffer.of(whole[rows]) for whole in both] for both in (self.slots.prefix, self.slots.cache))
        return self._run(step, prefix, cache)

    def score(
        self, layouts: Sequence[ScoreLayout], prefixes: Sequence[Prefix], *, before: Past | None, keeps: bool = False
    ) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        step = score_step(layouts, start=0 if before is None else before[0].shape[2])
        num_rows, _, num_places = step.mask_RSP.shape
        if before is not None or keeps:  # what is cached differs between layers
            cache = self.slots.fresh(num_rows, num_places, before)
        else:  # one pair for all layers: each layer reads its values before the next layer writes
            shape = (num_rows, self._config.num_kv_heads, num_places, self._config.head_dim)
            cache = [np.zeros(shape, self._dtype) for _ in range(2)] * self._config.num_layers
        prefix = [np.ascontiguousarray(part, self._dtype) for part in by_ports(prefixes)]
        return self._run(step, list(map(Buffer.of, prefix)), list(map(Buffer.of, cache))).logits_RV, cache

    def close(self) -> None:
        self._step = self._prefix = None

    def _run(self, step: Step, prefix: Sequence[Buffer], cache: Sequence[Buffer]) -> Prediction:
        binding = self._guarded(lambda: self._step.io_binding())
        given = {
            IDS: step.ids_RS,
            POSITIONS: step.positions_RS,
            PLACES: step.places_RS,
            MASK: step.mask_RSP,
            WANTED: step.wanted_T,
            **(dict(zip(SAMPLING, step.sampling, strict=True)) if self.card.has_sampling else {}),
        }
        if self.card.picture_format is not None:
            given[IDS], given[EMBEDDINGS] = step.embedded(dim=self._config.dim, dtype=self._dtype)
        kept = {name: np.ascontiguousarray(array) for name, array in given.items()}  # kept alive until the step has run
        for name, array in kept.items():
            binding.bind_input(name, *Buffer.of(array))
        for name, buffer in zip((*self._prefix_ports, *self._cache_ports), (*prefix, *cache), strict=True):
            binding.bind_input(name, *buffer)
        for name in (TOKENS, LOGITS):
            binding.bind_output(name, "cpu")
        for name, buffer in zip(self._kept_ports, cache, strict=True):
            binding.bind_output(name, *buffer)
        self._guarded(lambda: self._step.run_with_iobinding(binding))
        tokens, logits = binding.get_outputs()[:2]
        return Prediction(logits.numpy(), tokens.numpy())

    def _guarded(self, action: Any) -> Any:
        try:
            return action()
        except Exception as error:  # onnxruntime's exceptions have no common base
            text = one_line(str(error))
            if "bad_alloc" in text or "Failed to allocate" in text:
                raise MemoryError(text) from error
            raise GraphError(
                f"onnxruntime failed on the decoder in `{self._folder}`: {text}", hint="export the decoder again"
            ) from error
