"""From a bundle to a captioner's parts, if the kernels compute all of it on the CPU. Imports no torch."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from llama_adapter.app.captioning.parts import GraphBackend, Parts, loaded_parts
from llama_adapter.app.models.array_model import open_arrays
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.sight import encoding_bytes
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.llm.config import EngineConfig
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.vision.backends.base import NoEncoder
from llama_adapter.vision.backends.kernels import KernelEncoder

_DTYPES = (AUTO, "float32", "bfloat16")  # the kernels compute in no others


class KernelBackend(GraphBackend):
    """The CPU, without torch."""

    @property
    def profiler(self) -> Callable[[Path], Any]:
        from llama_adapter.runtime.devices.cpu import CpuBackend

        return CpuBackend().profiler


def assemble_arrays(spec: CaptionerSpec) -> Parts | None:
    """The parts of a bundle's model, equal to those of `assemble_parts`; None if torch has to load it.

    Torch is needed for other models, devices and operators, for batch sizes that depend on the memory, and if memory
    is short.
    """
    is_bundle = spec.llama_dir is None and not spec.lora and spec.past_key_values is None
    is_plain = spec.operators == "auto" and spec.mode in (AUTO, "eager") and spec.tensor_parallel == 1
    if not (spec.is_on_cpu and is_bundle and is_plain and spec.vision_kind == "torch" and spec.dtype in _DTYPES):
        return None
    if not isinstance(spec.batch_size, int) or (library := find_library().library) is None:
        return None
    with suppress(CheckpointError, OSError, KeyError, TypeError, ValueError):
        if (model := open_arrays(bundle_folder(spec.model), spec=spec, library=library)) is None:
            return None
        decoder, pictures, itemsize = model.decoder_config, model.picture_format, 4 if model.dtype == "float32" else 2
        engine = EngineConfig(
            decoder=decoder,
            dtype=np.dtype(np.float32),
            num_slots=spec.batch_size,
            kept_places=0 if pictures is None else decoder.context,
            encoding_bytes=encoding_bytes(pictures, model.vision_config, decoder, itemsize=itemsize),
        )
        options: Any = {"arrays": model.arrays, "dtype": model.dtype, "library": library}
        runner = KernelRunner(engine, **options)
        vision: KernelEncoder | NoEncoder = NoEncoder()
        if model.has_encoder:
            vision = KernelEncoder(model.vision_config, **options)
        model.arrays.require_all_read()
        return loaded_parts(
            spec,
            model,
            backend=KernelBackend("cpu"),
            vision=vision,
            runner=runner,
            dtype=model.dtype,
            mode="eager",
            is_for_texts=not model.has_encoder,
            notes=model.notes,
        )
    return None
