"""This program's model format: a folder of safetensors and a manifest, written atomically and memory-mapped at load.

manifest.json        format, version, configs, number types, sizes and digests of the files, sources
vision.safetensors   state dict of `PictureEncoder`; a model for texts has none
llm.safetensors      state dict of `LlamaAdapterDecoder`; if it is split, llm-rank-R-of-N.safetensors for each rank
tokenizer.model      LLaMA's tokenizer; or tokenizer.json, with its settings in tokenizer_config.json
known_answer.json    optional: a picture of the folder, unless for texts, a prompt and the expected answer
familiar.safetensors optional: statistics for out-of-distribution detection, see `vision.out_of_distribution`
input_scales.safetensors  optional: scales of the inputs of calibrated 8-bit layers, see `input_scales.py`
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from llama_adapter.app.models.bundle_manifest import (
    FAMILIAR,
    FINER_VERSION,
    FORMAT,
    INPUT_SCALES,
    KNOWN_ANSWER,
    LLM,
    MANIFEST,
    PACKED_VERSION,
    SPLIT_VERSION,
    VISION,
    Manifest,
    decoder_file,
    decoder_files,
    notes_on_rights,
    read_manifest,
)
from llama_adapter.app.models.bundle_tensors import Stored, TakePacked, read_decoder, read_vision
from llama_adapter.app.models.checkpoints import (
    LoadedModel,
    Origin,
    SourceFile,
    StreamedModel,
    claimed_digest,
    stream_sources,
    whole,
)
from llama_adapter.app.models.input_scales import read_scales, write_scales
from llama_adapter.app.models.number_formats import Dtype, dtype_of
from llama_adapter.app.models.replaced_folder import again_if_replaced
from llama_adapter.app.models.sketch import HalfConfig, expected_forms, sketch
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.split import dense, share_of, shares_of, take
from llama_adapter.runtime.atomic_write import replace_folder, write_text
from llama_adapter.runtime.digests import file_digest
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.partial import named_after, partial_folder, remove_leftovers
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import BUNDLE_VERSIONS, FLOAT, Precision
from llama_adapter.runtime.schemes.files import TensorWriter
from llama_adapter.runtime.schemes.scheme import TensorForm, dtype_name
from llama_adapter.runtime.schemes.state import all_of, new_finer_weights
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.text import shown_excerpt, shown_name
from llama_adapter.vision.formats import WantedOrder
from llama_adapter.vision.out_of_distribution import OodDetector

STORED_DTYPE: Final = torch.float16  # in which checkpoints become bundles, unless another one is asked for


def convert(
    spec: CaptionerSpec,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype = STORED_DTYPE,
    num_ranks: int = 1,
    overwrite: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the checkpoints of `spec` as a bundle in `dtype`, its decoder split over `num_ranks`; returns the folder.

    `tell` gets a line for each note about the model. Raises the errors of `stream_sources` and `save_bundle`.
    """
    check_target(directory, overwrite=overwrite)
    model, decoder_tensors = stream_sources(spec, dtype=dtype)
    sources_read = tuple(dataclasses.replace(file, sha256=file_digest(file.path)) for file in model.sources)
    for file in sources_read:
        if claimed_digest(file.path) not in (None, file.sha256):
            raise CheckpointError(
                f"`{file.path}` has the SHA-256 {file.sha256}, and its name promises another one",
                hint="the download is damaged or was changed: get it again, or take the digest out of its name",
            )
    for note in model.notes:
        tell(f"note: {note}")
    model = dataclasses.replace(model, sources=sources_read)
    return save_bundle(
        directory, model=model, decoder_tensors=decoder_tensors, num_ranks=num_ranks, overwrite=overwrite
    )


def save_bundle(
    directory: str | os.PathLike[str],
    *,
    model: LoadedModel,
    decoder_tensors: Iterable[tuple[str, Tensor]] | None = None,
    num_ranks: int = 1,
    known_answer: Mapping[str, Any] | None = None,
    known_picture: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as a bundle, in a temporary folder that is then renamed; returns its folder.

    `decoder_tensors` replace `model.decoder_state`. They are written one by one, so that they need not fit into memory
    together. With `num_ranks` above 1, each tensor is divided, and each rank gets a file; the weights must not be
    packed. `known_answer` is {"prompt", "text", ...} about `known_picture`, which is copied, or for texts about none;
    `doctor` asks the prompt again and compares.

    Raises CheckpointError if `directory` exists and `overwrite` is not set, if it is not a bundle or has other files,
    if its disk has too little space, or if a weight cannot be divided. Raises UsageError if the decoder cannot be
    divided, and OSError.
    """
    target = Path(directory).resolve()  # a link is kept, and its target is replaced
    check_target(target, overwrite=overwrite)
    remove_leftovers(target.parent)  # they may take the space that is needed
    vision, decoder, packed = model.vision_config, model.decoder_config, model.packed
    has_encoder = bool(model.vision_state)
    halves = (vision, decoder) if has_encoder else (decoder,)
    require_space(target, [_forms(half, model) for half in halves])
    target.parent.mkdir(parents=True, exist_ok=True)
    with named_after(target), partial_folder(target) as partial:
        tensors = model.decoder_state.items() if decoder_tensors is None else decoder_tensors
        if has_encoder:
            _write_half(partial / VISION, vision, model.vision_state.items(), model)
        if num_ranks == 1:
            _write_half(partial / LLM, decoder, tensors, model)
        else:
            _write_shares(partial, tensors, model, num_ranks=num_ranks)
        files: tuple[str, ...] = (*decoder_files(num_ranks), *model.tokenizer.files)
        if has_encoder:
            files = (VISION, *files)
        if model.input_scales:
            files += (INPUT_SCALES,)
            write_scales(partial / INPUT_SCALES, model.input_scales, decoder)
        for name, content in model.tokenizer.files.items():
            (partial / name).write_bytes(content)
        values: dict[str, Any] = {
            "format": FORMAT,
            "version": BUNDLE_VERSIONS[model.precision],
            "name": shown_excerpt(model.name, length=120),
            "vision": vision.to_dict() if has_encoder else {},
            "llm": decoder.to_dict(),
            "dtype": dtype_name(model.dtype),
            "files": {file: _entry(partial / file) for file in files},
            # Only file names, because the folders of the user's machine are private.
            "sources": [{**dataclasses.asdict(file), "path": Path(file.path).name} for file in model.sources],
            "merged": list(model.merged),
            "prompt": model.prompt,
            "card": model.card,
        }
        if model.question is not None:
            values["question"] = model.question
        if model.template != "instruction":
            values["template"] = model.template
        if model.picture_format is not None:
            values["picture_format"] = dataclasses.asdict(model.picture_format)
        if packed is not None:
            values |= {"version": PACKED_VERSION, "packed": dataclasses.asdict(packed) | {"source": model.digest}}
        if num_ranks > 1:
            values |= {"version": SPLIT_VERSION, "num_ranks": num_ranks, "ffn_block": decoder.ffn_block}
        if model.finer_weights:
            values |= {"version": FINER_VERSION, "finer": dict(model.finer_weights)}
        if model.precision != FLOAT or packed is not None or num_ranks > 1:
            values |= {"precision": model.precision, "origin": dataclasses.asdict(model.source)}
        manifest = Manifest(partial, values)
        manifest["digest"] = manifest.model_digest()
        _write_json(partial / MANIFEST, manifest)
        if known_answer is not None:
            add_known_answer(partial, known_answer=known_answer, picture=known_picture)
        if model.ood_detector is not None:
            add_familiarity(partial, model.ood_detector)
        for file in files:  # synced to disk before the rename
            with (partial / file).open("rb") as written:
                os.fsync(written.fileno())
        check_target(target, overwrite=overwrite)  # another process may have created it meanwhile
        replace_folder(partial, target)
    return target


def _write_half(path: Path, config: HalfConfig, tensors: Iterable[tuple[str, Tensor]], model: LoadedModel) -> None:
    with TensorWriter(path, forms=_forms(config, model)) as file:
        for name, tensor in tensors:
            file.write(name, tensor)


def _write_shares(place: Path, tensors: Iterable[tuple[str, Tensor]], model: LoadedModel, *, num_ranks: int) -> None:
    """Write a file for each rank, in a single pass over the tensors."""
    whole = model.decoder_config
    shares = shares_of(whole, num_ranks)
    with ExitStack() as opened:
        files = []
        for share in shares:
            metadata = {"rank": str(share.rank), "num_ranks": str(num_ranks)}
            path = place / decoder_file(share.rank, num_ranks)
            files.append(opened.enter_context(TensorWriter(path, forms=_forms(share, model), metadata=metadata)))
        for name, tensor in tensors:
            for share, file in zip(shares, files, strict=True):
                file.write(name, _part(name, tensor, whole=whole, share=share, model=model.name))


def _forms(config: HalfConfig, model: LoadedModel) -> dict[str, TensorForm]:
    return expected_forms(
        config,
        dtype=model.dtype,
        precision=model.precision,
        packed=model.packed,
        finer_weights=model.finer_weights,
    )


def known_answer_of(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments for `save_bundle` that copy this bundle's known answer to a bundle made from it."""
    place = Path(directory)
    if not (place / KNOWN_ANSWER).is_file():
        return {}
    known = read_json(place / KNOWN_ANSWER)
    picture = known.get("picture")
    return {"known_answer": known, "known_picture": picture and place / os.path.basename(str(picture))}


def add_known_answer(
    directory: str | os.PathLike[str],
    *,
    known_answer: Mapping[str, Any],
    picture: str | os.PathLike[str] | None,
) -> None:
    """Store a known answer and its picture in a bundle; the model's digest does not change.

    Raises ValueError unless `known_answer` has a "prompt" and a "text", and a picture except in a bundle for texts.
    """
    place, copied = Path(directory), {}
    manifest = read_manifest(place)
    if (picture is None) == bool(manifest["vision"]) or not {"prompt", "text"} <= known_answer.keys():
        raise ValueError('a known answer needs a picture, unless for texts, a "prompt" and the "text" of the answer')
    if picture is not None:
        copied = {"picture": "known_answer" + Path(picture).suffix.lower()}
        shutil.copyfile(picture, place / copied["picture"])
    _write_json(place / KNOWN_ANSWER, {**known_answer, **copied})
    manifest["files"] |= {file: _entry(place / file) for file in (KNOWN_ANSWER, *copied.values())}
    _write_json(place / MANIFEST, manifest)


def add_familiarity(directory: str | os.PathLike[str], ood_detector: OodDetector) -> None:
    """Store the statistics for out-of-distribution detection in a bundle, replacing earlier ones.

    Answers do not depend on them, so the model's digest does not change. Raises CheckpointError if there is no bundle.
    """
    place = Path(directory)
    manifest = read_manifest(place)
    ood_detector.save(place / FAMILIAR)
    manifest["files"] |= {FAMILIAR: _entry(place / FAMILIAR)}
    _write_json(place / MANIFEST, manifest)


@again_if_replaced
def stream_bundle(
    directory: str | os.PathLike[str],
    *,
    dtype: Dtype | None = None,
    context: int | None = None,
    channel_order: WantedOrder = "auto",
    cast_vision: bool = True,
    precision: Precision | None = None,
    take_packed: TakePacked | None = None,
    ranks: Alone = ALONE,
) -> StreamedModel:
    """Open a bundle as memory-mapped tensors; the decoder is converted tensor by tensor, block after block.

    Packed weights are unpacked unless `take_packed` says that the device uses them as they are. With `ranks`, the
    decoder's tensors are this process's share.

    `dtype`, `precision`, `context` and `channel_order` replace the bundle's own; tensors are converted if dtype or
    precision differ. Without `cast_vision`, the encoder's tensors are left as stored, for use with an exported encoder.
    File sizes and the names, shapes and types of tensors are checked; digests are not (`doctor` checks them). Raises
    CheckpointError if the bundle is missing or damaged. A bundle that is replaced during the call is read again.
    """
    manifest = read_manifest(directory)
    place, files = manifest.place, manifest.files_for(ranks)
    manifest.check_sizes(*files)
    vision, decoder = manifest.configs(context=context, channel_order=channel_order)
    taken = Stored(manifest, take_packed=take_packed)
    vision_state = read_vision(manifest, vision)
    decoder_state = read_decoder(manifest, decoder, rank=ranks.rank)
    own = manifest["origin"] if taken.layout is not None or taken.precision != FLOAT else None
    origin = own and Origin(
        digest=own["digest"],
        fingerprint=own["fingerprint"],
        calibration_pictures=own.get("calibration_pictures", 0),
    )
    precision = precision or taken.precision
    if precision != FLOAT and origin is None:
        origin = Origin(digest=manifest["digest"], fingerprint=fingerprint(vision_state))
    is_stored = precision == taken.precision
    finer_weights = manifest.finer_weights if is_stored else new_finer_weights(sketch(decoder), precision)
    chosen = dtype_of(
        dtype or taken.dtype,
        decoder=decoder,
        encoder=sketch(vision).state_dict().values() if vision_state else (),
        precision=precision,
        finer_weights=finer_weights,
        packed_in=taken.dtype if precision == FLOAT and taken.is_taken(FLOAT, taken.dtype) else None,
    )
    if vision_state and (cast_vision or taken.layout is not None):
        vision_state = dict(taken.tensors(vision_state, vision, dtype=chosen, wanted=precision))
    share = share_of(decoder, ranks)
    if share is decoder:
        tensors = taken.tensors(decoder_state, decoder, dtype=chosen, wanted=precision)
    else:
        if taken.layout is not None:
            raise CheckpointError(
                f"The weights of `{place}` are packed for one rank, and {share.num_ranks} share the decoder",
                hint="use the bundle that it was packed from",
            )
        is_split = manifest.num_ranks > 1
        part = all_of if is_split else functools.partial(_part, whole=decoder, share=share, model=str(place))
        tensors = dense(taken.tensors(decoder_state, share, dtype=chosen, wanted=precision, take=part))
    notes = notes_on_rights(place, [MANIFEST, *files])
    if taken.layout is not None and take_packed is not None and not taken.is_taken(precision, chosen):
        notes += (
            f"the weights of `{place}` are packed in {taken.layout}, which this model cannot use directly on this "
            "processor: they are laid out again at every start",
        )
    input_scales: Mapping[str, Tensor] = {}
    if INPUT_SCALES in files and is_stored:
        input_scales = read_scales(place / INPUT_SCALES, decoder)
    model = LoadedModel(
        **manifest.described(vision, decoder),
        vision_state=vision_state,
        decoder_state={},
        dtype=chosen,
        sources=tuple(
            SourceFile(role=source["role"], path=source["path"], sha256=source.get("sha256"))
            for source in manifest["sources"]
        ),
        merged=tuple(manifest["merged"]),
        precision=precision,
        finer_weights=finer_weights,
        origin=origin,
        input_scales=input_scales,
        packed=taken.layout if taken.is_taken(precision, chosen) else None,
        notes=notes,
    )
    return model, tensors


load_bundle = whole(stream_bundle)


def _part(name: str, tensor: Tensor, *, whole: DecoderConfig, share: DecoderConfig, model: str) -> Tensor:
    """A rank's part of a tensor. Raises CheckpointError if the tensor cannot be divided."""
    try:
        return take(name, tensor, whole=whole, share=share)
    except ValueError as error:
        raise CheckpointError(
            f"The decoder of `{model}` cannot be split over {share.num_ranks} ranks: {error}",
            hint="use fewer ranks, or weights of 8 bits or floats",
        ) from None


def check_other_target(target: Path, source: Path, *, to: str, overwrite: bool) -> None:
    """Raise CheckpointError unless a bundle made of `source` may be written to `target`. `to` says what is done."""
    if target.resolve() == source.resolve():
        raise CheckpointError(f"`{target}` is the bundle to {to} itself", hint="write to another place")
    check_target(target, overwrite=overwrite)


def check_target(directory: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raise CheckpointError unless a bundle may be written to `directory`."""
    target = Path(directory).resolve()
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        manifest = read_manifest(target)
    except CheckpointError:
        raise CheckpointError(
            f"`{target}` exists and is no model bundle, so it is not replaced", hint="choose another place"
        ) from None
    if not overwrite:
        raise CheckpointError(f"The bundle `{target}` exists already", hint="choose another place, or pass --force")
    owned = {MANIFEST, *manifest["files"]}
    strays = sorted(entry.name for entry in target.iterdir() if entry.name not in owned or not entry.is_file())
    if strays:
        raise CheckpointError(
            f"`{target}` holds {list_keys(strays)} beside its bundle, so it is not replaced",
            hint="move what is yours elsewhere, or choose another place",
        )


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def require_space(target: Path, forms: Iterable[Mapping[str, TensorForm]]) -> None:
    """Raise CheckpointError unless the disk of `target`, a new folder, has enough space for tensors of these forms."""
    needed = sum(form.num_bytes for half in forms for form in half.values())
    place = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(
            f"The bundle `{shown_name(str(target))}` takes {needed / 1e6:,.1f} MB, and the disk of `{place}` has "
            f"{free / 1e6:,.1f} MB free",
            hint="make room, or choose another place",
        )
