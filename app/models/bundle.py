"""Our own model format: a folder of safetensors and a manifest, written atomically and memory-mapped at load.

manifest.json        format, version, configs, number types, sizes and digests of the files, sources
vision.safetensors   state dict of `PictureEncoder`
llm.safetensors      state dict of `LlamaAdapterDecoder`
tokenizer.model      LLaMA's tokenizer
known_answer.json    optional: a picture of the folder, a prompt and the expected answer
familiar.safetensors optional: statistics for out-of-distribution detection, see `vision.out_of_distribution`
"""

import dataclasses
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama_adapter.app.models.checkpoints import (
    LoadedModel,
    ModelSources,
    Origin,
    SourceFile,
    StreamedModel,
    check_halves,
    claimed_digest,
    file_digest,
    stream_sources,
)
from llama_adapter.app.models.packed_weights import Stored, TakePacked
from llama_adapter.app.models.sketch import (
    DAMAGED,
    Dtype,
    HalfConfig,
    dtype_of,
    expected_forms,
    num_layers,
    sketch,
)
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.split import dense, share_of, take
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.atomic_write import atomic_write, replace_folder
from llama_adapter.runtime.devices import DTYPES
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.graphs.card import fingerprint
from llama_adapter.runtime.kernels.layout import PackedLayout
from llama_adapter.runtime.ranks import ALONE, Alone
from llama_adapter.runtime.schemes import FLOAT, PRECISIONS, Precision, packed
from llama_adapter.runtime.schemes.files import check_tensors, write_tensors
from llama_adapter.runtime.schemes.packed import kind_of
from llama_adapter.runtime.schemes.scheme import dtype_name, find_scheme
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import list_keys, read_safetensors
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_excerpt, shown_name
from llama_adapter.vision.config import ChannelOrder, VisionConfig
from llama_adapter.vision.out_of_distribution import OodDetector, read_familiarity

FORMAT = "llama-adapter-bundle"
MANIFEST, VISION, LLM, TOKENIZER, KNOWN_ANSWER, FAMILIAR = (
    "manifest.json",
    "vision.safetensors",
    "llm.safetensors",
    "tokenizer.model",
    "known_answer.json",
    "familiar.safetensors",
)
MODEL_FILES = (VISION, LLM, TOKENIZER)
# Forms of the manifest's values, see `_has_form`.
_FORMS: dict[str, Any] = {
    **dict.fromkeys(("name", "dtype", "prompt", "digest", "card"), str),
    **dict.fromkeys(("vision", "llm"), dict),
    "files": {str: {"bytes": int, "sha256": str}},
    "sources": [{"role": str, "path": str, "sha256": str | None}],
    "merged": [str],
}
_QUANTISED_FORMS: dict[str, Any] = {"precision": str, "origin": {"digest": str, "fingerprint": {str: str}}}
_PACKED_FORMS: dict[str, Any] = {"packed": {"version": int, "block": int, "int8_added": int, "source": str}}
PACKED_VERSION = 4  # of bundles with packed weights, in any precision
_LONGEST_LABEL = 200
_LARGEST_BLOCK = 1024


def convert(
    sources: ModelSources,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float16,
    overwrite: bool = False,
) -> Path:
    """Write the model of `sources` as a bundle in `dtype`; returns its folder.

    Raises the errors of `stream_sources` and `save_bundle`.
    """
    check_target(directory, overwrite=overwrite)
    model, decoder_tensors = stream_sources(sources, dtype=dtype)
    if not model.vision_state:
        raise CheckpointError(
            f"The adapter `{sources.adapter}` is for texts, and a bundle has a picture half",
            hint="name it as --adapter beside --llama-dir",
        )
    sources_read = tuple(dataclasses.replace(file, sha256=file_digest(file.path)) for file in model.sources)
    for file in sources_read:
        if claimed_digest(file.path) not in (None, file.sha256):
            raise CheckpointError(
                f"`{file.path}` has the SHA-256 {file.sha256}, and its name promises another one",
                hint="the download is damaged or was changed: get it again, or take the digest out of its name",
            )
    model = dataclasses.replace(model, sources=sources_read)
    return save_bundle(directory, model=model, decoder_tensors=decoder_tensors, overwrite=overwrite)


def save_bundle(
    directory: str | os.PathLike[str],
    *,
    model: LoadedModel,
    decoder_tensors: Iterable[tuple[str, Tensor]] | None = None,
    known_answer: Mapping[str, Any] | None = None,
    known_picture: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as a bundle, in a temporary folder that is then renamed; returns its folder.

    `decoder_tensors` replace `model.decoder_state` and are written one by one, so they need not fit into memory
    together. `known_answer` is {"prompt", "text", ...} about `known_picture`, which is copied; `doctor` replays it.
    Raises CheckpointError if `directory` exists and `overwrite` is not set, if it is no bundle, or if it has other
    files.
    """
    target = Path(directory).resolve()  # a link stays; its target is replaced
    check_target(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        vision, decoder = model.vision_config, model.decoder_config
        packed = model.packed
        for file, config, tensors in (
            (VISION, vision, model.vision_state.items()),
            (LLM, decoder, model.decoder_state.items() if decoder_tensors is None else decoder_tensors),
        ):
            forms = expected_forms(config, dtype=model.dtype, precision=model.precision, packed=packed)
            write_tensors(partial / file, tensors=tensors, forms=forms)
        (partial / TOKENIZER).write_bytes(model.tokenizer.data)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": find_scheme(model.precision).bundle_version if packed is None else PACKED_VERSION,
            "name": shown_excerpt(model.name, length=120),
            "vision": vision.to_dict(),
            "llm": decoder.to_dict(),
            "dtype": dtype_name(model.dtype),
            "files": {file: _entry(partial / file) for file in MODEL_FILES},
            # Names only: the folders of the user's machine are private.
            "sources": [{**dataclasses.asdict(file), "path": Path(file.path).name} for file in model.sources],
            "merged": list(model.merged),
            "prompt": model.prompt,
            "card": model.card,
        }
        if packed is not None:
            manifest["packed"] = dataclasses.asdict(packed) | {"source": model.digest}
        if model.origin is not None and (model.precision != FLOAT or packed is not None):
            manifest |= {"precision": model.precision, "origin": dataclasses.asdict(model.origin)}
        manifest["digest"] = model_digest(manifest)
        _write_json(partial / MANIFEST, manifest)
        if known_answer is not None:
            add_known_answer(partial, known_answer=known_answer, picture=known_picture)
        if model.ood_detector is not None:
            add_familiarity(partial, model.ood_detector)
        for file in MODEL_FILES:  # on the disk before the rename
            with (partial / file).open("rb") as written:
                os.fsync(written.fileno())
        partial.chmod(0o755)  # mkdtemp makes private folders
        replace_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def add_known_answer(
    directory: str | os.PathLike[str],
    *,
    known_answer: Mapping[str, Any],
    picture: str | os.PathLike[str] | None,
) -> None:
    """Store a known answer and its picture in a bundle; the model's digest stays.

    Raises ValueError unless `known_answer` has a "prompt" and a "text" and there is a picture.
    """
    if picture is None or not {"prompt", "text"} <= known_answer.keys():
        raise ValueError('a known answer needs a picture, a "prompt" and the "text" of the answer')
    place = Path(directory)
    copied = "known_answer" + Path(picture).suffix.lower()
    shutil.copyfile(picture, place / copied)
    _write_json(place / KNOWN_ANSWER, {**known_answer, "picture": copied})
    manifest = read_manifest(place)
    manifest["files"] |= {file: _entry(place / file) for file in (KNOWN_ANSWER, copied)}
    _write_json(place / MANIFEST, manifest)


def add_familiarity(directory: str | os.PathLike[str], ood_detector: OodDetector) -> None:
    """Store the statistics for out-of-distribution detection in a bundle, replacing earlier ones.

    Answers do not depend on them, so the model's digest stays. Raises CheckpointError if there is no bundle.
    """
    place = Path(directory)
    manifest = read_manifest(place)
    ood_detector.save(place / FAMILIAR)
    manifest["files"] |= {FAMILIAR: _entry(place / FAMILIAR)}
    _write_json(place / MANIFEST, manifest)


def load_bundle(
    directory: str | os.PathLike[str],
    *,
    dtype: Dtype | None = None,
    context: int | None = None,
    channel_order: ChannelOrder | None = None,
    cast_vision: bool = True,
    precision: Precision | None = None,
) -> LoadedModel:
    """Load a bundle as memory-mapped tensors; arguments and errors are those of `stream_bundle`."""
    model, tensors = stream_bundle(
        directory,
        dtype=dtype,
        context=context,
        channel_order=channel_order,
        cast_vision=cast_vision,
        precision=precision,
    )
    return dataclasses.replace(model, decoder_state=dict(tensors))


def stream_bundle(
    directory: str | os.PathLike[str],
    *,
    dtype: Dtype | None = None,
    context: int | None = None,
    channel_order: ChannelOrder | None = None,
    cast_vision: bool = True,
    precision: Precision | None = None,
    take_packed: TakePacked | None = None,
    ranks: Alone = ALONE,
) -> StreamedModel:
    """A bundle as memory-mapped tensors, its decoder converted tensor by tensor, block after block.

    Packed weights are unpacked unless `take_packed` says that the device uses them as they are. With ranks, the
    decoder's tensors are the share of the one that this process is.

    `dtype`, `precision`, `context` and `channel_order` replace the bundle's own; tensors are converted if dtype or
    precision differ. Without `cast_vision` the picture half stays as stored, for use beside an exported encoder. File
    sizes and the names, shapes and types of tensors are checked, digests are not (`doctor` checks them). Raises
    CheckpointError if the bundle is missing or damaged.
    """
    place = Path(directory)
    manifest = read_manifest(place)
    check_sizes(place, manifest)
    vision, decoder = read_configs(place, manifest)
    stored = DTYPES[manifest["dtype"]]
    configs: dict[str, HalfConfig] = {VISION: vision, LLM: decoder}
    states = {file: read_half(place / file, configs[file], manifest) for file in configs}
    has_packed, stored_in = packed_layout(manifest), stored_precision(manifest)
    own = manifest["origin"] if has_packed is not None or stored_in != FLOAT else None
    origin = own and Origin(
        digest=own["digest"],
        fingerprint=own["fingerprint"],
        calibration_pictures=own.get("calibration_pictures", 0),
    )
    precision = precision or stored_in
    if precision != FLOAT and origin is None:
        origin = Origin(digest=manifest["digest"], fingerprint=fingerprint(states[VISION]))
    if context is not None:
        decoder = dataclasses.replace(decoder, context=context)
    taken = stored_tensors(manifest, take_packed=take_packed)
    chosen = dtype_of(
        dtype or stored,
        decoder=decoder,
        encoder=sketch(vision).state_dict().values(),
        precision=precision,
        packed_in=stored if precision == FLOAT and taken.is_taken(FLOAT, stored) else None,
    )
    vision_state = states[VISION]
    if cast_vision or has_packed is not None:
        vision_state = dict(taken.tensors(states[VISION], vision, dtype=chosen, wanted=precision))
    share = share_of(decoder, ranks)
    if share is decoder:
        tensors = taken.tensors(states[LLM], decoder, dtype=chosen, wanted=precision)
    else:
        parts = _parts(states[LLM], whole=decoder, share=share, place=place, is_packed=has_packed is not None)
        tensors = dense(taken.tensors(parts, share, dtype=chosen, wanted=precision))
    notes = _notes(place, [MANIFEST, *manifest["files"]])
    if has_packed is not None and take_packed is not None and not taken.is_taken(precision, chosen):
        notes += (
            f"the weights of `{place}` are packed in {has_packed}, and this model on this processor does not use them "
            "so: they are laid out again at every start",
        )
    tokenizer = Tokenizer.load(place / TOKENIZER)
    if tokenizer.vocab_size != decoder.vocab_size:
        raise CheckpointError(
            f"The bundle `{place}` has a tokenizer of {tokenizer.vocab_size} pieces for a model of "
            f"{decoder.vocab_size} tokens",
            hint=DAMAGED,
        )
    ood_detector = None
    if FAMILIAR in manifest["files"]:
        ood_detector = read_familiarity(place / FAMILIAR, num_queries=decoder.num_queries, width=decoder.dim)
    digest = str(manifest["digest"])
    if channel_order not in (None, vision.channel_order):
        vision = dataclasses.replace(vision, channel_order=channel_order)
        digest = hashlib.sha256(f"{digest} {channel_order}".encode()).hexdigest()  # the answers differ
    model = LoadedModel(
        name=str(manifest["name"]),
        digest=digest,
        vision_config=vision,
        vision_state=vision_state,
        decoder_config=decoder,
        decoder_state={},
        tokenizer=tokenizer,
        dtype=chosen,
        sources=tuple(
            SourceFile(role=source["role"], path=source["path"], sha256=source.get("sha256"))
            for source in manifest["sources"]
        ),
        merged=tuple(manifest["merged"]),
        prompt=str(manifest["prompt"]),
        card=str(manifest["card"]),
        precision=precision,
        origin=origin,
        ood_detector=ood_detector,
        packed=has_packed if taken.is_taken(precision, chosen) else None,
        notes=notes,
    )
    return model, tensors


def _parts(
    state: Mapping[str, Tensor], *, whole: DecoderConfig, share: DecoderConfig, place: Path, is_packed: bool
) -> dict[str, Tensor]:
    """A rank's parts of a bundle's tensors, as views. Raises CheckpointError where they cannot be divided."""
    if is_packed:
        raise CheckpointError(
            f"The weights of `{place}` are packed for one rank, and {share.num_ranks} share the decoder",
            hint="use the bundle that it was packed from",
        )
    try:
        return {name: take(name, tensor, whole=whole, share=share) for name, tensor in state.items()}
    except ValueError as error:
        raise CheckpointError(
            f"The decoder of `{place}` cannot be split over {share.num_ranks} ranks: {error}",
            hint="use fewer ranks, or weights of 8 bits or floats",
        ) from None


def _notes(place: Path, files: Iterable[str]) -> tuple[str, ...]:
    """A note if other users may change parts of the bundle, since they could then replace the model."""
    # In a folder with the sticky bit, others may add files but not replace these.
    open_to = {"the folder itself": "" if place.stat().st_mode & stat.S_ISVTX else _writers(place)}
    open_to |= {f"`{shown_name(file)}`": _writers(place / file) for file in files}
    found = [what for what, who in open_to.items() if who]
    if not found:
        return ()
    who = "every user of this machine" if "every user" in open_to.values() else "a group that this user is not in"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"{who} may change the model `{place}` ({found[0]}{more}); if that is not meant: `chmod -R go-w {place}`",)


def _writers(path: Path) -> str:
    """Who may write there, beside the owner and this user's own groups, which are shared on purpose."""
    status = path.stat()
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in {os.getegid(), *os.getgroups()}:
        return "a group"
    return ""


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a bundle's manifest; raises CheckpointError if it is missing, foreign or of another version."""
    place = Path(directory)
    if not (place / MANIFEST).is_file():
        problem = f"has no {MANIFEST}" if place.is_dir() else "is a file" if place.exists() else "does not exist"
        raise CheckpointError(
            f"`{place}` is no model bundle: it {problem}",
            hint="pass a folder written by `llama-adapter convert`, or its name in LLAMA_ADAPTER_HOME; LLaMA's own "
            "folders go with --llama-dir",
        )
    manifest = read_json(place / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"`{place / MANIFEST}` is not the manifest of a model bundle")
    version = manifest.get("version")
    versions = [*_versions(), PACKED_VERSION]
    if type(version) is not int or version not in versions:
        raise CheckpointError(
            f"The bundle `{place}` has the version {shown_excerpt(repr(version))}, and this program reads "
            f"{' or '.join(map(str, versions))}",
            hint="install a newer release, or write the bundle again with `llama-adapter convert`",
        )
    if faults := _faults(manifest):
        raise CheckpointError(f"`{place / MANIFEST}` is incomplete or wrong in {list_keys(faults)}", hint=DAMAGED)
    return manifest


def _faults(manifest: Mapping[str, Any]) -> list[str]:
    """Keys, or names of files, with values that are missing or wrong."""
    is_packed = manifest["version"] == PACKED_VERSION
    if is_packed and manifest.get("precision") not in PRECISIONS:
        return ["precision"]
    precision = stored_precision(manifest)
    forms = {**_FORMS, **(_PACKED_FORMS if is_packed else {})}
    if is_packed or precision != FLOAT:
        forms |= _QUANTISED_FORMS
    faults = [key for key, form in forms.items() if not _has_form(manifest.get(key), form)]
    if faults:
        return faults
    faults += [file for file in MODEL_FILES if file not in manifest["files"]]
    faults += [file for file in manifest["files"] if not is_bare(file)]
    faults += [key for key in ("name", "digest") if not _is_label(manifest[key])]
    if manifest["dtype"] not in DTYPES:
        return [*faults, "dtype"]
    faults += [] if manifest.get("precision", FLOAT) == precision else ["precision"]
    if is_packed:
        block, added = manifest["packed"]["block"], manifest["packed"]["int8_added"]
        is_known = manifest["packed"]["version"] == packed.VERSION and 0 < block <= _LARGEST_BLOCK
        is_known = is_known and 0 <= added < 256 and kind_of(precision, DTYPES[manifest["dtype"]]) is not None
        faults += [] if is_known and _is_label(manifest["packed"]["source"]) else ["packed"]
    if is_packed or precision != FLOAT:
        origin = manifest["origin"]
        is_counted = type(origin.get("calibration_pictures", 0)) is int
        faults += [] if _is_label(origin["digest"]) and is_counted else ["origin"]
    return faults


def _has_form(value: object, form: Any) -> bool:
    """Whether a JSON value has a form: a type, a list of one form, a dict of forms, or {str: form} for any keys."""
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(one, form[0]) for one in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        forms = dict.fromkeys(value, form[str]) if str in form else form
        return all(_has_form(value.get(key), inner) for key, inner in forms.items())
    return isinstance(value, form)


def read_configs(place: Path, manifest: Mapping[str, Any]) -> tuple[VisionConfig, DecoderConfig]:
    """The configurations in a manifest; raises CheckpointError if they are unreadable or do not fit each other."""
    try:
        vision, decoder = VisionConfig.from_dict(manifest["vision"]), DecoderConfig.from_dict(manifest["llm"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"`{place / MANIFEST}` has an invalid configuration: {shown_excerpt(str(error), length=300)}"
        ) from None
    check_halves(vision, decoder, adapter=str(place))
    return vision, decoder


def check_sizes(place: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError at the first file of the manifest that is missing or has another size."""
    for file, entry in manifest["files"].items():
        path = place / file
        if not path.is_file():
            raise CheckpointError(
                f"The bundle `{place}` lacks `{shown_name(file)}`", hint="copy the whole folder again"
            )
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"`{path}` has {path.stat().st_size:,} bytes, where {entry['bytes']:,} are wanted",
                hint="the copy was cut short; copy the whole folder again",
            )


def stored_precision(manifest: Mapping[str, Any]) -> Precision:
    """The precision of the weights in a bundle's files."""
    if manifest["version"] == PACKED_VERSION:
        precision: Precision = manifest["precision"]
        return precision
    return _versions()[manifest["version"]]


def stored_tensors(manifest: Mapping[str, Any], *, take_packed: TakePacked | None = None) -> Stored:
    """How the tensors in a bundle's files are stored; `take_packed` is that of `stream_bundle`."""
    return Stored(
        layout=packed_layout(manifest),
        precision=stored_precision(manifest),
        dtype=DTYPES[manifest["dtype"]],
        take_packed=take_packed,
    )


def packed_layout(manifest: Mapping[str, Any]) -> PackedLayout | None:
    """The layout of the packed weights in a bundle's files; None if they are plain."""
    if manifest["version"] != PACKED_VERSION:
        return None
    fields = {field.name: manifest["packed"][field.name] for field in dataclasses.fields(PackedLayout)}
    return PackedLayout(**fields)


def _versions() -> dict[int, Precision]:
    return {find_scheme(precision).bundle_version: precision for precision in PRECISIONS}


def read_half(path: Path, config: HalfConfig, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of one half of the model, mapped from its file.

    Raises CheckpointError unless names, shapes and types are those of its configuration. A configuration of more layers
    than the file has tensors is refused before its module is built.
    """
    state = read_safetensors(path)
    if num_layers(config) > len(state):
        raise CheckpointError(
            f"`{path}` has {len(state)} tensors, and its configuration speaks of {num_layers(config):,} layers",
            hint=DAMAGED,
        )
    forms = expected_forms(
        config,
        dtype=DTYPES[manifest["dtype"]],
        precision=stored_precision(manifest),
        packed=packed_layout(manifest),
    )
    check_tensors(state, forms=forms, path=path, hint=DAMAGED)
    return state


def model_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of all that answers depend on: the digests of the model's files, and its configurations."""
    parts = {
        "files": {file: manifest["files"][file]["sha256"] for file in MODEL_FILES},
        "vision": manifest["vision"],
        "llm": manifest["llm"],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check_target(directory: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raise CheckpointError if a bundle may not be written at `directory`."""
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


def is_bare(name: str) -> bool:
    """Whether a name is a plain, printable file name without folders."""
    return Path(name).name == name != ".." and _is_label(name)


def _is_label(text: str) -> bool:
    """Whether a text is printable on one line."""
    return UNSAFE_ON_TERMINALS.search(text) is None and len(text) <= _LONGEST_LABEL


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
