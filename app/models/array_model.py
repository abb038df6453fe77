"""Opens a bundle as numpy arrays for the C kernels, as `stream_bundle` opens it for torch. Imports no torch."""

import dataclasses
import os

from llama_adapter.app.models.bundle_arrays import BundleArrays, layers_without_bias, num_weights
from llama_adapter.app.models.bundle_manifest import (
    LLM,
    MANIFEST,
    VISION,
    notes_on_rights,
    read_manifest,
)
from llama_adapter.app.models.described import DescribedModel
from llama_adapter.app.models.dtype_rule import best_type
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.llm.runners.kernels import can_run
from llama_adapter.runtime.host_memory import free_host_bytes
from llama_adapter.runtime.kernels.instruction_sets import large_dtype
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.schemes import FLOAT
from llama_adapter.runtime.tensor_files.arrays import map_arrays


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayModel(DescribedModel):
    """A model as arrays."""

    arrays: BundleArrays
    has_encoder: bool
    dtype: str


@again_if_replaced
def open_arrays(folder: str | os.PathLike[str], *, spec: CaptionerSpec, library: Library) -> ArrayModel | None:
    """The model of a bundle in the number formats of `spec`; None if torch has to load it.

    Raises CheckpointError, OSError, KeyError, TypeError and ValueError for a damaged bundle.
    """
    manifest = read_manifest(folder)
    manifest.check_sizes()
    place = manifest.place
    vision, decoder = manifest.configs(context=spec.context, channel_order=spec.channel_order)
    stored, layout = manifest.precision, manifest.layout
    precision, why = spec.precision or stored, [] if spec.device == "cpu" else ["no accelerator is installed"]
    is_taken = layout is None or (precision == stored and layout.fits(library.layout, manifest.precisions))
    if manifest.num_ranks > 1 or not is_taken or not can_run(decoder):
        return None
    tensors = map_arrays(place / LLM)
    manifest.check_finer(tensors)
    tensors |= map_arrays(place / VISION) if manifest["vision"] else {}
    dtype, count = spec.dtype, num_weights(tensors)
    is_fixed = layout is not None and precision == FLOAT  # packed in one type
    if dtype == AUTO:
        dtype, reason = best_type(count, large=large_dtype(), has_few_bits=precision != FLOAT)
        dtype, reason = (manifest["dtype"], "its weights are packed in it") if is_fixed else (dtype, reason)
        why.append(reason)
    num_bytes = 4 * count if layout is None else sum(array.nbytes for array in tensors.values())
    row_bytes = 2 * decoder.num_layers * decoder.kv_dim * decoder.context * (4 if dtype == "float32" else 2)
    if (is_fixed and dtype != manifest["dtype"]) or max(2 * num_bytes, row_bytes) > (free_host_bytes() or 0):
        return None
    chosen = (f"computing on cpu in {dtype}: {'; '.join(why)}",) if why else ()
    return ArrayModel(
        **manifest.described(vision, decoder),
        arrays=BundleArrays(
            tensors,
            stored_dtype=manifest["dtype"],
            stored_precision=stored,
            finer_weights=manifest.finer_weights,
            dtype=dtype,
            wanted=precision,
            without_bias=layers_without_bias(vision, decoder),
            library=library,
        ),
        has_encoder=bool(manifest["vision"]),
        dtype=dtype,
        precision=precision,
        notes=(*chosen, *notes_on_rights(place, [MANIFEST, *manifest["files"]])),
    )
