"""From a spec to a loaded model on its device. Values that the spec leaves open are resolved here, once."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

from llama_adapter.app.captioning.parts import Parts, loaded_parts
from llama_adapter.app.models.checkpoints import StreamedModel
from llama_adapter.app.models.encoders import (
    check_card,
    check_encoding,
    check_sizes,
    encoder_spec,
    examine,
    om_card,
)
from llama_adapter.app.models.exported_encoder import check_encoder_exists, encoder_identity
from llama_adapter.app.models.memory_fit import place_model
from llama_adapter.app.models.number_formats import DtypeChoice, check_asked_precision, check_rounding, widening_note
from llama_adapter.app.models.parallel.group import RankGroup
from llama_adapter.app.models.random_model import RandomLoader
from llama_adapter.app.models.sketch import Dtype
from llama_adapter.app.models.spec import AUTO, CaptionerSpec
from llama_adapter.app.models.stream_model import check_split, stream_model
from llama_adapter.app.pictures.prefixes.file import Encoding, check_keys_values, read_first_file
from llama_adapter.runtime.devices import open_backend, open_best, settle_mode
from llama_adapter.runtime.errors import CheckpointError, UsageError
from llama_adapter.runtime.ranks import ALONE
from llama_adapter.runtime.schemes.scheme import dtype_name
from llama_adapter.vision.backends.base import EncodedBefore, NoEncoder, VisionBackend
from llama_adapter.vision.backends.exported import ExportedEncoder, open_encoder
from llama_adapter.vision.card import EncoderCard

ModelLoader = Callable[[Dtype], StreamedModel]  # takes the dtype of the weights, or a `DtypeChoice`


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
    encoding: Encoding | None = None
    if vision is None and spec.vision_kind == "prefixes":
        check_encoder_exists(spec)
        encoding = read_first_file(str(spec.encoder)).encoding
        vision = EncodedBefore(encoding.vision)
        spec = dataclasses.replace(spec, **encoding.reading_of_pictures)
    is_encoded_elsewhere = vision is not None or spec.vision_kind != "torch"
    check_encoder_exists(spec)
    backend, why = open_best() if spec.device == AUTO else (open_backend(spec.device), "")
    mode, mode_note = settle_mode(spec.mode, backend=backend, num_ranks=spec.tensor_parallel, strict=spec.strict)
    check_asked_precision(spec, backend=backend)
    choice = DtypeChoice(spec, backend=backend, mode=mode)
    identity: str | None = None
    with ExitStack() as stack:
        group: RankGroup | None = None
        if spec.tensor_parallel > 1:
            if load is not None and not isinstance(load, RandomLoader):
                raise UsageError("A model made in this process is not split: tensor_parallel must be 1")
            check = partial(check_split, spec, random=load)
            group = stack.enter_context(closing(RankGroup(spec, backend=backend, check=check)))
        ranks = ALONE if group is None else group.ranks
        exported: ExportedEncoder | None = None
        card: EncoderCard | None = None if encoding is None else encoding.card
        if vision is None and spec.vision_kind == "onnx":
            exported = stack.enter_context(closing(open_encoder(encoder_spec(spec, backend=backend, mode=mode))))
            card = exported.card
        elif vision is None and spec.vision_kind == "om":
            card = om_card(spec)
        if load is None:
            model, tensors = stream_model(
                spec,
                dtype=choice,
                encoder=card,
                is_encoded_elsewhere=is_encoded_elsewhere,
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
        if not model.vision_state and spec.encoder is not None:
            raise CheckpointError(f"`{model.name}` is a model for texts alone, so `{spec.encoder}` cannot be used")
        if encoding is not None:
            identity = check_encoding(encoding, model, spec=spec)
            check_keys_values(str(spec.encoder), model.decoder_config)
        elif card is not None:
            check_card(card, model, spec=spec)
        if not model.vision_state and vision is None:
            vision, is_encoded_elsewhere = NoEncoder(), True
        is_for_texts = not model.vision_state
        placed = place_model(
            model,
            tensors,
            spec=spec,
            backend=backend,
            mode=mode,
            has_encoder=is_encoded_elsewhere,
            ranks=ranks,
            ranks_here=spec.tensor_parallel if group is not None and group.share_memory else 1,
            lead=None if group is None else group.lead,
        )
        runner = placed.runner
        foreign_note = ""
        if placed.vision is not None:
            vision = placed.vision
        elif vision is None:
            if exported is None:
                # An OM is opened last: the decoder's device must be initialised before the OM creates its own context.
                exported = stack.enter_context(closing(open_encoder(encoder_spec(spec, backend=backend, mode=mode))))
            vision = exported
            check_sizes(exported, model, spec=spec)
            if card is None:
                foreign_note = examine(exported, model, spec=spec).sentence
            identity = encoder_identity(spec, channel_order=exported.channel_order)
        dtype, reasons = dtype_name(model.dtype), "; ".join(filter(None, (why, choice.reason)))
        chosen_note = reasons and f"computing on {backend.name} in {dtype}: {reasons}"
        widened_note = widening_note(model.precision, model.dtype, operators=spec.operators, backend=backend)
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
        remember_rows=placed.remember_rows,
        end_ranks=lambda: None if group is None else group.close(),
    )
