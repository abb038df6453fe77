"""From a spec to a loaded model on its device. Values that the spec leaves open are resolved here, once."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

import torch

from llama_adapter.app.captioning.assemble_foreign import assemble_foreign
from llama_adapter.app.captioning.parts import Parts, loaded_parts
from llama_adapter.app.models.checkpoints import StreamedModel
from llama_adapter.app.models.early import check_encoder_exists
from llama_adapter.app.models.encoders import GivenEncoder
from llama_adapter.app.models.llama_folder import find_llama
from llama_adapter.app.models.memory_fit import place_model
from llama_adapter.app.models.number_formats import (
    Dtype,
    DtypeChoice,
    check_asked_precision,
    check_rounding,
    widening_note,
)
from llama_adapter.app.models.parallel.group import RankGroup
from llama_adapter.app.models.random_model import RandomLoader
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.models.stream_model import check_split, stream_model
from llama_adapter.runtime.devices import open_backend, open_best, settle_mode
from llama_adapter.runtime.errors import CheckpointError, UsageError
from llama_adapter.runtime.operators import without_autocast
from llama_adapter.runtime.ranks import ALONE
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.vision.backends.base import NoEncoder, VisionBackend

ModelLoader = Callable[[Dtype], StreamedModel]  # takes the dtype of the weights, or a `DtypeChoice`


def assemble_with_torch(spec: CaptionerSpec) -> Parts:
    """Load the model of a spec onto its device. Raises the errors of `assemble_parts` and `assemble_foreign`."""
    with torch.device("cpu"):  # a notebook may have made another device torch's default
        if spec.llama_dir is not None and spec.adapter is None:
            place = find_llama(spec.llama_dir, llama_type=spec.llama_type)
            if place.is_foreign:
                return assemble_foreign(spec, place)
        return assemble_parts(spec)


def assemble_parts(
    spec: CaptionerSpec, *, load: ModelLoader | None = None, vision: VisionBackend | None = None
) -> Parts:
    """Load the model of a spec onto its device.

    Parameters:
        spec: the model, and what computes it.
        load: makes the model, instead of reading the files that the spec names.
        vision: an open picture encoder, used instead of the one that the spec names. CLIP may then be missing.

    Raises DeviceError, CheckpointError and GraphError.
    """
    if spec.decoder is not None:
        raise UsageError(
            "An exported decoder cannot be measured operator by operator",
            hint="`caption --profile` and demo_bsz.py report its speed, with --decoder",
        )
    if vision is None:
        check_encoder_exists(spec)
    backend, why = open_best() if spec.device == AUTO else (open_backend(spec.device), "")
    mode, mode_note = settle_mode(spec.mode, backend=backend, num_ranks=spec.tensor_parallel, strict=spec.strict)
    check_asked_precision(spec, backend=backend)
    choice = DtypeChoice(spec, backend=backend, mode=mode)
    given: GivenEncoder | None = None
    group: RankGroup | None = None
    # A program may have set another device or autocast. LoRA is merged on the CPU.
    with torch.device("cpu"), without_autocast("cpu"), ExitStack() as stack:
        if spec.tensor_parallel > 1:
            if load is not None and not isinstance(load, RandomLoader):
                raise UsageError("A model made in this process is not split: tensor_parallel must be 1")
            check = partial(check_split, spec, random=load)
            group = stack.enter_context(closing(RankGroup(spec, backend=backend, check=check)))
        ranks = ALONE if group is None else group.ranks
        if vision is None and spec.encoder is not None:  # after ranks have taken their cores, which limits its threads
            given = stack.enter_context(closing(GivenEncoder(spec, backend=backend, mode=mode)))
            spec = given.spec
        has_encoder = vision is not None or given is not None
        if load is None:
            model, tensors = stream_model(
                spec,
                dtype=choice,
                encoder=None if given is None else given.card,
                is_encoded_elsewhere=has_encoder,
                take_packed=partial(backend.packed_layout, wanted=spec.operators),
                ranks=ranks,
            )
        elif isinstance(load, RandomLoader):
            model, tensors = load(choice, ranks)
        else:
            model, tensors = load(choice)
        if group is not None:
            group.load(spec, model, random=load)
        check_rounding(spec, model.precision)
        widened_note = widening_note(model.precision, model.dtype, operators=spec.operators, backend=backend)
        if not model.vision_state and spec.encoder is not None:
            raise CheckpointError(f"`{model.name}` is a model for texts alone, so `{spec.encoder}` cannot be used")
        if given is not None:
            given.check(model)
        elif not model.vision_state and vision is None:
            vision, has_encoder = NoEncoder(), True
        is_for_texts = not model.vision_state
        placed = place_model(
            model,
            tensors,
            spec=spec,
            backend=backend,
            mode=mode,
            has_encoder=has_encoder,
            ranks=ranks,
            ranks_here=spec.tensor_parallel if group is not None and group.share_memory else 1,
            lead=None if group is None else group.lead,
        )
        runner, vision = placed.runner, placed.vision or vision
        identity, foreign_note = None, ""
        if given is not None:
            vision, identity, foreign_note = given.open(model)
        assert vision is not None, "each case above has one"
        dtype, reasons = dtype_name(model.dtype), "; ".join(filter(None, (why, choice.reason)))
        chosen_note = reasons and f"computing on {backend.name} in {dtype}: {reasons}"
        stack.pop_all()
    return loaded_parts(
        spec,
        dataclasses.replace(model, vision_state={}),
        backend=backend,
        vision=vision,
        runner=runner,
        dtype=dtype,
        mode=mode,
        is_for_texts=is_for_texts,
        encoder=identity,
        notes=(chosen_note, mode_note, *model.notes, foreign_note, widened_note, placed.note),
        end=lambda: None if group is None else group.close(),
    )
