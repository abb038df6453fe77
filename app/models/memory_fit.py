"""Places a model on its device with the batch size of the spec; with `auto`, with as many rows as fit into memory.

If memory runs out later, app/models/oom_retry.py reduces the rows.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from llama_adapter.app.models.checkpoints import LoadedModel
from llama_adapter.app.models.number_formats import memory_plans
from llama_adapter.app.models.oom_retry import attempt, free_memory
from llama_adapter.app.models.sight import encoding_bytes
from llama_adapter.app.models.spec import DEFAULT_BATCH_SIZE, CaptionerSpec
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.load import PlacedDecoder, place_decoder
from llama_adapter.llm.memory_plan import MemoryPlan, check_memory, fitting_rows, least_cache, widest_cache
from llama_adapter.llm.runners.base import Runner
from llama_adapter.llm.runners.shapes import powers_of_two
from llama_adapter.llm.split import share_of
from llama_adapter.llm.weights.past import read_past
from llama_adapter.runtime.devices import EAGER, Backend
from llama_adapter.runtime.devices.cpu import is_file_backed
from llama_adapter.runtime.devices.cpu_linear import kernel_arrays
from llama_adapter.runtime.devices.programs import GraphMode
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import OperatorChoice
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.vision.backends.kernels import KernelEncoder, can_run
from llama_adapter.vision.backends.torch import TorchVisionBackend
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.encoder import encoder_from_state, scale_activations


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A model on its device, ready to compute. The number of the runner's slots is the batch size."""

    runner: Runner
    vision: TorchVisionBackend | KernelEncoder | None  # None if an exported encoder is used
    note: str = ""  # for the user


def place_model(
    model: LoadedModel,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    spec: CaptionerSpec,
    backend: Backend,
    mode: str,
    has_encoder: bool = False,
    ranks: Alone = ALONE,
    ranks_here: int = 1,
    lead: Callable[[PlacedDecoder, Runner], Runner] | None = None,
) -> Placed:
    """Put a model on the device of `backend`: the decoder from `tensors`, and the encoder unless `has_encoder`.

    `has_encoder` means that another encoder is used. With `ranks`, `tensors` are the share of this process,
    `ranks_here` ranks use this machine's free memory together, and `lead` turns this rank's runner into the runner that
    leads all ranks. The model's `vision_state` is emptied, see `place_encoder`. Raises TooLittleMemoryError, before
    `tensors` are read, if the model does not fit into the device's memory.
    """
    config = engine_config(model, spec, ranks, mode=mode)
    encoder_bytes = _bytes_to_come(model.vision_state, backend)
    planned = memory_plans(
        config,
        spec,
        precision=model.precision,
        finer_weights=model.finer_weights,
        encoder_bytes=encoder_bytes,
        backend=backend,
    )
    if ranks_here > 1:
        planned = _together(planned, ranks_here)
    free, num_rows = backend.free_bytes(), spec.batch_size
    is_auto = num_rows == "auto"
    if num_rows == "auto":  # a tenth of the memory is left
        most = backend.capabilities.most_rows
        num_rows = fitting_rows(planned, free=free, most=most, unknown=DEFAULT_BATCH_SIZE)
    plan, least = planned(num_rows), least_cache(replace(config, num_slots=num_rows))
    check_memory(plan, least, free=free, device=backend.name)
    config = widest_cache(least, plan, free=free)
    decoder = place_decoder(config, tensors, backend=backend, ranks=ranks)
    vision = None
    if not has_encoder:
        vision = place_encoder(
            model.vision_config,
            model.vision_state,
            num_rows=num_rows,
            operators=spec.operators,
            backend=backend,
            mode=mode,
        )
    lead = lead or (lambda decoder, runner: runner)
    runner = lead(decoder, _halving(decoder, num_rows, backend=backend) if is_auto else decoder.runner(num_rows))
    if is_auto and isinstance(vision, TorchVisionBackend):
        vision.batch_sizes = _batch_sizes(runner.config.num_slots, backend)
    return Placed(runner=runner, vision=vision, note=decoder.operators.note)


def engine_config(model: LoadedModel, spec: CaptionerSpec, ranks: Alone, *, mode: str = EAGER) -> EngineConfig:
    """Settings of the engine for this rank's share of a model's decoder."""
    sizes, pictures = model.decoder_config, model.picture_format
    past = None if spec.past_key_values is None else read_past(Path(spec.past_key_values), sizes)
    return EngineConfig(
        decoder=share_of(sizes, ranks),
        dtype=model.dtype,
        mode=mode,
        operators=spec.operators,
        past=past,
        # A further question about a picture computes its own tokens only.
        kept_places=0 if pictures is None else sizes.context,
        encoding_bytes=encoding_bytes(pictures, model.vision_config, sizes, itemsize=model.dtype.itemsize),
    )


def _together(planned: Callable[[int], MemoryPlan], count: int) -> Callable[[int], MemoryPlan]:
    """The plan of `count` ranks that share one memory and have equal plans."""

    return lambda num_rows: MemoryPlan(**{name: count * value for name, value in asdict(planned(num_rows)).items()})


def _bytes_to_come(state: Mapping[str, Tensor], backend: Backend) -> int:
    """Memory that the encoder will take on the device. Tensors already there are released when they are converted."""
    tensors = list(state.values())
    mapped = is_file_backed(tensors)
    return sum(
        tensor.nbytes
        for tensor, in_file in zip(tensors, mapped, strict=True)
        if tensor.device != backend.device or (in_file and backend.capabilities.copies_weights)
    )


def _halving(decoder: PlacedDecoder, num_rows: int, *, backend: Backend) -> Runner:
    """A runner of `num_rows`, or half the rows after each out-of-memory error; with one row the error is raised."""
    first, config = num_rows, decoder.config

    def open_runner(num_rows: int) -> Runner:
        spare = max(config.spare_blocks * num_rows // first, config.most_blocks - 1)
        return decoder.runner(num_rows, spare_blocks=spare)

    while (runner := attempt(lambda: open_runner(num_rows), is_least=num_rows == 1)) is None:  # noqa: B023 - called at once
        num_rows //= 2
        free_memory(backend.empty_caches)
    return runner


def place_encoder(
    config: VisionConfig,
    state: MutableMapping[str, Tensor],
    *,
    num_rows: int,
    operators: OperatorChoice,
    backend: Backend,
    mode: str = EAGER,
) -> TorchVisionBackend | KernelEncoder:
    """Put a model's picture encoder on its device, for batches of up to `num_rows` pictures.

    In a graph mode of a device that takes any shape, batches whose number of pictures occurs again are recorded.
    `state` is emptied, so that each weight is released when the device has its own copy of it.
    """
    records = mode != EAGER and not backend.capabilities.static_shapes
    vision = TorchVisionBackend(
        encoder_from_state(config, state),
        device=backend.device,
        batch_sizes=_batch_sizes(num_rows, backend),
        largest_batch=num_rows if config.clip.longest and backend.device.type != "cpu" else None,  # squares
        mode=GraphMode(backend, mode) if records else None,
    )
    state.clear()
    backend.prepare(vision.module, wanted=operators)
    if backend.capabilities.queued and operators != "aten":
        scale_activations(vision.module)
    backend.empty_caches()
    library = backend.kernels
    if library is not None and can_run(config.clip) and (arrays := kernel_arrays(vision.module)) is not None:
        return KernelEncoder(config, arrays, dtype=dtype_name(vision.dtype), library=library)
    return vision


def _batch_sizes(num_rows: int, backend: Backend) -> tuple[int, ...]:
    """Batch sizes to which batches are padded; empty if the device handles any shape without cost."""
    return powers_of_two(num_rows) if backend.capabilities.static_shapes else ()
