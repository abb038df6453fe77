"""From a known model to a captioner's parts: its weights are mapped and run by the kernels. Imports no torch."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llama_adapter.app.captioning.parts import GraphBackend, Parts
from llama_adapter.app.models.known import KnownModel
from llama_adapter.app.models.models_by_name import bundle_folder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import DecoderConfig, EngineConfig
from llama_adapter.llm.runners.kernels import KernelRunner
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.kernels.library import find_library
from llama_adapter.vision.backends.kernels import KernelEncoder
from llama_adapter.vision.config import VisionConfig
from llama_adapter.vision.out_of_distribution import OodDetector, read_familiarity

_FAMILIAR = "familiar.safetensors"  # `bundle_manifest.FAMILIAR`


class _Model(NamedTuple):
    """See `Parts.model`."""

    tokenizer: Tokenizer
    ood_detector: OodDetector | None


class KernelBackend(GraphBackend):
    """The CPU, without torch."""

    @property
    def profiler(self) -> Callable[[Path], Any]:
        from llama_adapter.runtime.devices.cpu import CpuBackend

        return CpuBackend().profiler


def assemble_known(spec: CaptionerSpec) -> Parts | None:
    """The parts of a model whose weights the user's cache has as the kernels read them; None for all others."""
    known = KnownModel.recall(spec)
    if known is None or known.halves is None or (library := find_library().library) is None:
        return None
    decoder, vision = DecoderConfig.from_dict(known.halves["decoder"]), VisionConfig.from_dict(known.halves["vision"])
    num_slots, dtype = known.spec.batch_size, known.info.dtype
    assert isinstance(num_slots, int), "no others are known"
    with suppress(OSError, ValueError, KeyError):  # damaged: the model itself is loaded
        arrays, folder, detector = known.map_arrays(spec), bundle_folder(spec.model), None
        engine = EngineConfig(decoder=decoder, dtype=np.dtype(np.float32), num_slots=num_slots)
        names = [file.name for file in folder.iterdir()]
        if _FAMILIAR in names:
            detector = read_familiarity(folder / _FAMILIAR, num_queries=decoder.num_queries, width=decoder.dim)
        return Parts(
            spec=known.spec,
            info=known.info,
            model=_Model(Tokenizer.load_stored(folder, names), detector),
            backend=KernelBackend(known.info.device),
            vision=KernelEncoder(vision, arrays, dtype=dtype, library=library),
            runner=KernelRunner(engine, arrays, dtype=dtype, library=library),
        )
    return None
