"""Writes bundles from bundles, whose decoder is stored in another way: packed, or split over ranks.

`pack` lays weights out as this processor's kernels do, which map and use them directly. `convert --tensor-parallel`
writes one file for each rank.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from llama_adapter.app.models.bundle import check_other_target, known_answer_of, save_bundle
from llama_adapter.app.models.checkpoints import LoadedModel, StreamedModel
from llama_adapter.app.models.models_by_name import bundle_folder, llama_settings
from llama_adapter.app.models.number_formats import DtypeChoice
from llama_adapter.app.models.sketch import HalfConfig, sketch
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.models.stream_model import stream_merged_bundle, stream_model
from llama_adapter.runtime.devices import EAGER, open_backend
from llama_adapter.runtime.devices.cpu_linear import pack_weight
from llama_adapter.runtime.errors import DeviceError
from llama_adapter.runtime.given import require_named, require_one_of
from llama_adapter.runtime.kernels.library import Library, find_library
from llama_adapter.runtime.schemes import PRECISIONS, Precision
from llama_adapter.runtime.schemes.layers import store_parts
from llama_adapter.runtime.schemes.packed import PACKED, beside, kind_of, packed_form, scheme_of_kind
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.runtime.schemes.state import linear_precisions, linear_shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class PackJob:
    """One run of `pack`, as plain values."""

    model: str | None = None  # a bundle, or a LLaMA without adapter; None: the embedded model
    out: str
    dtype: str = AUTO  # of all tensors except quantised weights; auto: the best dtype for the CPU
    precision: Precision | None = None  # of the linear layers' weights; None: as stored
    force: bool = False

    def __post_init__(self) -> None:
        require_one_of("precision", self.precision, (None, *PRECISIONS))
        require_named(self, "model", "out", hint="name a folder")


def pack_bundle(job: PackJob) -> Path:
    """Write the packed bundle of `job`, tensor by tensor; returns its folder. The known answer of the original is kept.

    Raises DeviceError if there are no kernels on this machine, or none for the dtype. Raises CheckpointError for a
    damaged bundle, and if `out` may not be written.
    """
    source, target = bundle_folder(job.model), Path(job.out)
    check_other_target(target, source, to="pack", overwrite=job.force)
    found = find_library()
    if found.library is None:
        raise DeviceError(f"Weights are packed for the kernels, and there are none here: {found.reason}")
    place: dict[str, Any] = llama_settings(source) or {"model": str(source)}
    spec = CaptionerSpec(**place, device="cpu", dtype=job.dtype, precision=job.precision)
    model, tensors = stream_model(spec, dtype=DtypeChoice(spec, backend=open_backend("cpu"), mode=EAGER))
    model, tensors = pack_model(model, tensors, library=found.library)
    return save_bundle(target, model=model, decoder_tensors=tensors, **known_answer_of(source), overwrite=job.force)


def pack_model(model: LoadedModel, tensors: Iterable[tuple[str, Tensor]], *, library: Library) -> StreamedModel:
    """A model with plain weights, laid out for the kernels of `library`; the decoder's are packed one by one.

    Raises DeviceError for a dtype in which no kernel computes.
    """
    if kind_of(model.precision, model.dtype) is None:
        raise DeviceError(
            f"The kernels do not compute in {dtype_name(model.dtype)}", hint="pass --dtype float32 or bfloat16"
        )
    packer = _Packer(library=library, model=model)
    vision = dict(packer.packed(model.vision_state.items(), model.vision_config))
    packed = dataclasses.replace(model, vision_state=vision, origin=model.source, packed=library.layout)
    return packed, packer.packed(tensors, model.decoder_config)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packer:
    library: Library
    model: LoadedModel

    def packed(self, tensors: Iterable[tuple[str, Tensor]], config: HalfConfig) -> Iterator[tuple[str, Tensor]]:
        """Pack the linear weights of a plain state dict; the stored tensors of one weight must be consecutive."""
        model, module = self.model, sketch(config)
        precisions = linear_precisions(module, model.precision, finer_weights=model.finer_weights)
        owners = {
            name + suffix: (name, kind, shape)
            for name, shape in linear_shapes(module).items()
            if (kind := kind_of(precisions[name], model.dtype)) is not None
            if packed_form(shape, kind, self.library.layout) is not None
            for suffix in scheme_of_kind(kind).suffixes
        }
        parts: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if name not in owners:
                yield name, tensor
                continue
            weight, kind, shape = owners[name]
            parts[name.removeprefix(weight)] = tensor
            if len(parts) == len(scheme_of_kind(kind).suffixes):
                yield f"{weight}{PACKED}{kind}", self._pack(parts, shape)
                yield from ((weight + suffix, parts[suffix]) for suffix in beside(kind))
                parts.clear()

    def _pack(self, parts: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
        num_out, num_in = shape
        layer = nn.Linear(num_in, num_out, bias=False, device="meta")
        store_parts(layer, parts)
        return pack_weight(layer, library=self.library)


def split_bundle(
    bundle: str | os.PathLike[str] | None,
    directory: str | os.PathLike[str],
    *,
    num_ranks: int,
    lora: Sequence[str] = (),
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write a bundle in its own precision with the decoder split over `num_ranks`; returns the new folder.

    `bundle` None means the embedded model. Packed weights are unpacked. `lora` are PEFT folders to merge, each FOLDER
    or FOLDER=WEIGHT. Without them, the bundle keeps the known answer of the original. `tell` gets a line for each
    note about the model. Raises CheckpointError for a bundle that is damaged, and the errors of `save_bundle`.
    """
    source, target = bundle_folder(bundle), Path(directory)
    check_other_target(target, source, to="read", overwrite=overwrite)
    model, tensors = stream_merged_bundle(source, lora)
    for note in model.notes:
        tell(f"note: {note}")
    return save_bundle(
        target,
        model=dataclasses.replace(model, origin=model.source),
        decoder_tensors=tensors,
        num_ranks=num_ranks,
        **({} if lora else known_answer_of(source)),
        overwrite=overwrite,
    )
