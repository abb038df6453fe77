"""Opens a bundle as numpy arrays for the C kernels, as `stream_bundle` opens it for torch. Imports no torch."""

import dataclasses
import os
from pathlib import Path

from llama_adapter.app.models.bundle_arrays import BundleArrays, num_weights
from llama_adapter.app.models.bundle_manifest import (
    FAMILIAR,
    LLM,
    MANIFEST,
    SPLIT_VERSION,
    VISION,
    check_sizes,
    in_channel_order,
    notes_on_rights,
    packed_layout,
    read_configs,
    read_manifest,
    stored_precision,
)
from llama_adapter.app.models.dtype_rule import best_type
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.llm.runners.kernels import can_run
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.host_memory import free_host_bytes
from llama_adapter.runtime.kernels.instruction_sets import large_dtype
from llama_adapter.runtime.kernels.library import Library
from llama_adapter.runtime.schemes import FLOAT, Precision
from llama_adapter.runtime.tensor_files.arrays import map_arrays
from llama_adapter.vision.config import ConnectorConfig, VisionConfig
from llama_adapter.vision.out_of_distribution import OodDetector, read_familiarity


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrayModel:
    """A model as arrays. Fields with the names of those of `LoadedModel` are the same."""

    name: str
    digest: str
    arrays: BundleArrays
    has_encoder: bool
    vision_config: VisionConfig
    decoder_config: DecoderConfig
    tokenizer: Tokenizer
    dtype: str
    precision: Precision
    prompt: str
    template: Template
    card: str
    ood_detector: OodDetector | None
    notes: tuple[str, ...]
    picture_format: PictureFormat | None


@again_if_replaced
def open_arrays(folder: str | os.PathLike[str], *, spec: CaptionerSpec, library: Library) -> ArrayModel | None:
    """The model of a bundle in the number formats of `spec`; None if torch has to load it.

    Raises CheckpointError, OSError, KeyError, TypeError and ValueError for a damaged bundle.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    check_sizes(place, manifest)
    vision, decoder = read_configs(place, manifest)
    decoder = dataclasses.replace(decoder, context=spec.context or decoder.context)
    vision, digest = in_channel_order(None if spec.channel_order == AUTO else spec.channel_order, vision, manifest)
    stored, layout = stored_precision(manifest), packed_layout(manifest)
    precision, why = spec.precision or stored, [] if spec.device == "cpu" else ["no accelerator is installed"]
    is_taken = layout is None or (precision == stored and layout.fits(library.layout, precision))
    if manifest["version"] == SPLIT_VERSION or not is_taken or not can_run(decoder):
        return None
    tensors = map_arrays(place / LLM) | (map_arrays(place / VISION) if manifest["vision"] else {})
    dtype, count = spec.dtype, num_weights(tensors)
    is_fixed = layout is not None and precision == FLOAT  # packed in one type
    if dtype == AUTO:
        dtype, reason = best_type(count, large=large_dtype(), has_few_bits=precision != FLOAT)
        dtype, reason = (manifest["dtype"], "its weights are packed in it") if is_fixed else (dtype, reason)
        why.append(reason)
    num_bytes = 4 * count if layout is None else sum(array.nbytes for array in tensors.values())
    if (is_fixed and dtype != manifest["dtype"]) or 2 * num_bytes > (free_host_bytes() or 0):
        return None
    tokenizer, detector = Tokenizer.load_stored(place, manifest["files"]), None
    if tokenizer.vocab_size != decoder.vocab_size:
        return None
    if FAMILIAR in manifest["files"]:
        detector = read_familiarity(place / FAMILIAR, num_queries=decoder.num_queries, width=decoder.dim)
    chosen = (f"computing on cpu in {dtype}: {'; '.join(why)}",) if why else ()
    arrays = BundleArrays(
        tensors,
        stored_dtype=manifest["dtype"],
        stored_precision=stored,
        dtype=dtype,
        wanted=precision,
        without_bias=_without_bias(vision, decoder),
        library=library,
    )
    return ArrayModel(
        name=str(manifest["name"]),
        digest=digest,
        arrays=arrays,
        has_encoder=bool(manifest["vision"]),
        vision_config=vision,
        decoder_config=decoder,
        tokenizer=tokenizer,
        dtype=dtype,
        precision=precision,
        prompt=str(manifest["prompt"]),
        template=manifest.get("template", "instruction"),
        card=str(manifest["card"]),
        ood_detector=detector,
        notes=(*chosen, *notes_on_rights(place, [MANIFEST, *manifest["files"]])),
        picture_format=PictureFormat(**manifest["picture_format"]) if "picture_format" in manifest else None,
    )


def _without_bias(vision: VisionConfig, decoder: DecoderConfig) -> set[str]:
    names = {"head", "clip.projection", *(f"adapter.kv.{index}" for index in range(decoder.num_adapter_layers))}
    has_none = isinstance(vision.query, ConnectorConfig) and not vision.query.has_bias
    return names | {"query.up", "query.down"} if has_none else names
