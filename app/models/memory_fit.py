"""A model's halves on their device, with as many rows as the spec says: for `auto`, as the device's memory is good for.

Less memory than that may turn up later, while pictures are answered: see app/models/oom_retry.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llama_adapter.app.models.batch_size_cache import Setting
from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.encoders import encoder_bytes
from llama_adapter.app.models.native_encoder import KernelsFirst, install_block_kernels
from llama_adapter.app.models.oom_retry import attempt, free_memory
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE, CaptionerSpec
from llama_adapter.llm.load import PlacedDecoder, place_decoder, planner
from llama_adapter.llm.memory_plan import MemoryPlan, check_memory, fitting_rows
from llama_adapter.llm.runners.eager import Executor
from llama_adapter.llm.runners.shapes import powers_of_two
from llama_adapter.runtime.devices.backend import Backend
from llama_adapter.vision.backends.torch import TorchVisionBackend
from llama_adapter.vision.encoder import encoder_from_state
from llama_adapter.vision.inference import HostEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Halves:
    """What computes on the device; the executor's slots are the batch size."""

    executor: Executor
    vision: TorchVisionBackend | None  # None where an exported encoder takes its place


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A model on its device, ready to compute."""

    halves: Halves
    note: str  # for people, or empty
    remember_rows: Callable[[int], str] | None  # keeps a ceiling for later runs; None where the user gave the number


def place_model(model: LoadedModel, *, spec: CaptionerSpec, backend: Backend, mode: str) -> Placed:
    """Put `model` on the device of `backend`.

    Raises DeviceError, before anything large is made, when it would not fit into the device's memory.
    """
    config, state, operators = model.decoder_config, model.decoder_state, spec.operators
    reserved = encoder_bytes(spec, model, backend=backend)
    planned = planner(config, state, backend=backend, operators=operators, reserved=reserved)
    setting = _setting(model, dtype=spec.dtype, backend=backend, mode=mode)
    num_rows, note = spec.batch_size, ""
    is_auto = num_rows == "auto"
    if num_rows == "auto":
        num_rows, note = auto_rows(planned, backend=backend, setting=setting)
    check_memory(planned(num_rows), config, num_slots=num_rows, free=backend.free_bytes(), device=backend.name)
    decoder = place_decoder(config, state, backend=backend, mode=mode, operators=operators)

    def load(rows: int) -> Halves:
        return _halves(decoder, rows, spec=spec, model=model)

    halves = load_halving(load, num_rows, backend=backend, setting=setting) if is_auto else load(num_rows)
    return Placed(halves=halves, note=note, remember_rows=setting.remember if is_auto else None)


def auto_rows(planned: Callable[[int], MemoryPlan], *, backend: Backend, setting: Setting) -> tuple[int, str]:
    """The rows that `auto` begins with, and a note for people or nothing.

    The largest power of two whose memory plan leaves a tenth of what is free, at most what the device is still faster
    with, and what earlier runs remember as the ceiling. At least 1, be it too much.
    """
    ceiling, note = setting.ceiling()
    most = backend.capabilities.most_rows
    most = most if ceiling is None else min(most, ceiling)
    return fitting_rows(planned, free=backend.free_bytes(), most=most, unknown=DEFAULT_BATCH_SIZE), note


def load_halving(load: Callable[[int], Halves], num_rows: int, *, backend: Backend, setting: Setting) -> Halves:
    """What `load` makes of `num_rows`, halved while memory is not enough; raises what it raises with one."""
    first = num_rows
    while (halves := attempt(lambda: load(num_rows), is_least=num_rows == 1)) is None:  # noqa: B023 - called at once
        num_rows //= 2
        free_memory(backend.empty_caches)
    if num_rows < first:
        setting.remember(num_rows)  # where that fails, the next run finds out again
    return halves


def _halves(decoder: PlacedDecoder, num_rows: int, *, spec: CaptionerSpec, model: LoadedModel) -> Halves:
    executor, backend = decoder.executor(num_rows), decoder.backend
    if spec.vision_kind != "torch":
        return Halves(executor=executor, vision=None)
    encoder = encoder_from_state(model.vision_config, model.vision_state)
    sizes = powers_of_two(num_rows) if backend.capabilities.static_shapes else None
    vision = TorchVisionBackend(encoder, device=backend.device, batch_sizes=sizes)
    backend.prepare(vision.module, wanted=spec.operators)
    if backend.kernels is not None and isinstance(vision.module, HostEncoder):
        install_block_kernels(vision.module, library=backend.kernels)
        vision.module = KernelsFirst(vision.module)
    return Halves(executor=executor, vision=vision)


def _setting(model: LoadedModel, *, dtype: str, backend: Backend, mode: str) -> Setting:
    return Setting(
        model=model.digest,
        device=backend.name,
        dtype=dtype,
        precision=model.precision,
        context=model.decoder_config.context,
        mode=mode,
        device_bytes=backend.total_bytes(),
    )
