"""The product's own model format: a folder of safetensors and a manifest, written in one move, memory-mapped at load.

manifest.json        format, version, configs, precision, sizes and digests of the files, sources
vision.safetensors   state dict of `PictureEncoder`
llm.safetensors      state dict of `LlamaAdapterDecoder`
tokenizer.model      LLaMA's tokenizer
known_answer.json    optional: a picture of the folder, a prompt and the answer the model must give
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.checkpoints import (
    DEFAULT_PROMPT,
    LoadedModel,
    ModelSources,
    SourceFile,
    check_halves,
    claimed_digest,
    file_digest,
    stream_sources,
)
from llm.config import DecoderConfig
from llm.errors import CheckpointError
from llm.model.llama import LlamaAdapterDecoder
from llm.runtime.backend import DTYPES
from llm.tokenizer import Tokenizer
from llm.weights.files import list_keys, read_json, read_safetensors
from vision.config import ChannelOrder, VisionConfig
from vision.encoder import PictureEncoder

FORMAT = "llama-adapter-bundle"
VERSION = 1
MANIFEST, VISION, LLM, TOKENIZER, KNOWN_ANSWER = (
    "manifest.json",
    "vision.safetensors",
    "llm.safetensors",
    "tokenizer.model",
    "known_answer.json",
)
MODEL_FILES = (VISION, LLM, TOKENIZER)
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DAMAGED = "the bundle is damaged or was changed by hand; write it again with `llama-adapter convert`"


def convert(
    sources: ModelSources,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float16,
    name: str | None = None,
    prompt: str = DEFAULT_PROMPT,
    card: str = "",
    known_answer: Mapping[str, Any] | None = None,
    known_picture: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model at `sources` as a bundle in `dtype`; returns its folder.

    Raises the errors of `assemble_sources` and `save_bundle`.
    """
    check_target(directory, overwrite=overwrite)
    model, decoder_tensors = stream_sources(sources, dtype=dtype)
    sources_read = tuple(dataclasses.replace(file, sha256=file_digest(file.path)) for file in model.sources)
    for file in sources_read:
        if claimed_digest(file.path) not in (None, file.sha256):
            raise CheckpointError(
                f"`{file.path}` has the SHA-256 {file.sha256}, and its name promises another one",
                hint="the download is damaged or was changed: get it again, or take the digest out of its name",
            )
    model = dataclasses.replace(model, name=name or model.name, prompt=prompt, card=card, sources=sources_read)
    return save_bundle(
        directory,
        model=model,
        decoder_tensors=decoder_tensors,
        known_answer=known_answer,
        known_picture=known_picture,
        overwrite=overwrite,
    )


def save_bundle(
    directory: str | os.PathLike[str],
    *,
    model: LoadedModel,
    decoder_tensors: Iterable[tuple[str, Tensor]] | None = None,
    known_answer: Mapping[str, Any] | None = None,
    known_picture: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as a bundle: into a temporary folder beside `directory`, then renamed; returns its folder.

    `decoder_tensors`, where given, are written as they come instead of `model.decoder_state`, so that they need not fit
    into memory together. `known_answer` is {"prompt", "text", ...} as `app.doctor` replays it, for `known_picture`,
    which is copied. Raises CheckpointError if `directory` exists and is not to be overwritten, is no bundle, or holds
    files that are not the bundle's.
    """
    target = Path(directory).resolve()  # a link stays, and what it leads to is replaced
    check_target(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        vision, decoder = model.vision_config, model.decoder_config
        for file, config, tensors in (
            (VISION, vision, model.vision_state.items()),
            (LLM, decoder, model.decoder_state.items() if decoder_tensors is None else decoder_tensors),
        ):
            write_safetensors(partial / file, tensors=tensors, shapes=expected_shapes(config), dtype=model.dtype)
        (partial / TOKENIZER).write_bytes(model.tokenizer.data)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": model.name,
            "vision": vision.to_dict(),
            "llm": decoder.to_dict(),
            "dtype": dtype_name(model.dtype),
            "files": {file: _entry(partial / file) for file in MODEL_FILES},
            # Names only: where the files lay on somebody's machine is nobody's business.
            "sources": [{**dataclasses.asdict(file), "path": Path(file.path).name} for file in model.sources],
            "merged": list(model.merged),
            "prompt": model.prompt,
            "card": model.card,
        }
        manifest["digest"] = model_digest(manifest)
        _write_json(partial / MANIFEST, manifest)
        if known_answer is not None:
            add_known_answer(partial, known_answer=known_answer, picture=known_picture)
        for file in MODEL_FILES:  # on the disk before the name points there
            with (partial / file).open("rb") as written:
                os.fsync(written.fileno())
        partial.chmod(0o755)  # mkdtemp makes private folders
        _put_in_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def add_known_answer(
    directory: str | os.PathLike[str],
    *,
    known_answer: Mapping[str, Any],
    picture: str | os.PathLike[str] | None,
) -> None:
    """Put a known answer and its picture into a bundle; the model's digest stays as it is.

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


def load_bundle(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    context: int | None = None,
    channel_order: ChannelOrder | None = None,
    cast_vision: bool = True,
) -> LoadedModel:
    """Load a bundle as memory-mapped tensors; without `dtype` in its own precision, else cast where they differ.

    Without `cast_vision` the picture half stays as it is stored: for use beside an exported encoder. `context` and
    `channel_order` replace the bundle's own. Sizes of files, names, shapes and types of tensors are checked, digests
    are not (see `app.doctor`). Raises CheckpointError if the bundle is missing or damaged.
    """
    place = Path(directory)
    manifest = read_manifest(place)
    check_sizes(place, manifest)
    vision, decoder = read_configs(place, manifest)
    stored = DTYPES[manifest["dtype"]]
    states = {}
    for file, wanted in ((VISION, expected_shapes(vision)), (LLM, expected_shapes(decoder))):
        states[file] = read_state(place / file, wanted=wanted, stored=stored)
        if dtype not in (None, stored) and (cast_vision or file != VISION):
            states[file] = {key: tensor.to(dtype) for key, tensor in states[file].items()}
    tokenizer = Tokenizer.load(place / TOKENIZER)
    if tokenizer.vocab_size != decoder.vocab_size:
        raise CheckpointError(
            f"The bundle `{place}` has a tokenizer of {tokenizer.vocab_size} pieces for a model of "
            f"{decoder.vocab_size} tokens",
            hint=_DAMAGED,
        )
    if context is not None:
        decoder = dataclasses.replace(decoder, context=context)
    digest = str(manifest["digest"])
    if channel_order not in (None, vision.channel_order):
        vision = dataclasses.replace(vision, channel_order=channel_order)
        digest = hashlib.sha256(f"{digest} {channel_order}".encode()).hexdigest()  # it answers differently
    return LoadedModel(
        name=str(manifest["name"]),
        digest=digest,
        vision_config=vision,
        vision_state=states[VISION],
        decoder_config=decoder,
        decoder_state=states[LLM],
        tokenizer=tokenizer,
        dtype=dtype or stored,
        sources=tuple(
            SourceFile(role=source["role"], path=source["path"], sha256=source.get("sha256"))
            for source in manifest["sources"]
        ),
        merged=tuple(manifest["merged"]),
        prompt=str(manifest["prompt"]),
        card=str(manifest["card"]),
    )


def read_manifest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a bundle's manifest; raises CheckpointError if it is missing, foreign or of another version."""
    place = Path(directory)
    if not (place / MANIFEST).is_file():
        problem = f"has no {MANIFEST}" if place.is_dir() else "is a file" if place.exists() else "does not exist"
        raise CheckpointError(
            f"`{place}` is no model bundle: it {problem}",
            hint="pass a folder written by `llama-adapter convert`; LLaMA's own folders go with --llama-dir",
        )
    manifest = read_json(place / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"`{place / MANIFEST}` is the manifest of something else than a model bundle")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"The bundle `{place}` has the version {manifest.get('version')!r}, and this program reads {VERSION}",
            hint="install a newer release, or write the bundle again with `llama-adapter convert`",
        )
    wanted = {"name": str, "vision": dict, "llm": dict, "dtype": str, "files": dict, "sources": list, "merged": list}
    wanted |= {"prompt": str, "digest": str, "card": str}
    faults = [key for key, kind in wanted.items() if not isinstance(manifest.get(key), kind)]
    if not faults:
        faults += [file for file in MODEL_FILES if file not in manifest["files"]]
        faults += [file for file, entry in manifest["files"].items() if not (is_bare(file) and _is_entry(entry))]
        faults += [] if all(_is_source(source) for source in manifest["sources"]) else ["sources"]
        faults += [] if all(isinstance(name, str) for name in manifest["merged"]) else ["merged"]
    if faults or manifest["dtype"] not in DTYPES:
        raise CheckpointError(
            f"`{place / MANIFEST}` is incomplete or wrong in {list_keys(faults or ['dtype'])}", hint=_DAMAGED
        )
    return manifest


def read_configs(place: Path, manifest: Mapping[str, Any]) -> tuple[VisionConfig, DecoderConfig]:
    """The configurations in a manifest; raises CheckpointError if they are unreadable or do not fit each other."""
    try:
        vision, decoder = VisionConfig.from_dict(manifest["vision"]), DecoderConfig.from_dict(manifest["llm"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"`{place / MANIFEST}` has a configuration that is of no use here: {error}") from None
    check_halves(vision, decoder, adapter=str(place))
    return vision, decoder


def check_sizes(place: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError at the first file of the manifest that is missing or has another size."""
    for file, entry in manifest["files"].items():
        path = place / file
        if not path.is_file():
            raise CheckpointError(f"The bundle `{place}` lacks `{file}`", hint="copy the whole folder again")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"`{path}` has {path.stat().st_size:,} bytes, where {entry['bytes']:,} are wanted",
                hint="the copy was cut short; copy the whole folder again",
            )


def write_safetensors(
    path: Path, *, tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Write tensors of the given names and shapes as safetensors in `dtype`, each as it comes.

    safetensors' own writer wants all of them in memory, twice. Raises ValueError for a tensor that is missing, comes
    twice, or has another name or shape.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)  # mapped tensors then start at a cache line
    missing = dict(shapes)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors:
            if missing.pop(name, None) != tuple(tensor.shape):
                raise ValueError(f"tensor `{name}` of shape {list(tensor.shape)} is not wanted here, or came twice")
            file.seek(8 + len(encoded) + header[name]["data_offsets"][0])
            file.write(tensor.detach().to("cpu", dtype).contiguous().flatten().view(torch.uint8).numpy().data)
    if missing:
        raise ValueError(f"tensors are missing: {list_keys(list(missing))}")


def expected_shapes(config: VisionConfig | DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the state dict that a configuration asks for.

    Raises CheckpointError for sizes beyond what torch can count.
    """
    module: nn.Module
    try:
        with torch.device("meta"):
            if isinstance(config, VisionConfig):
                module = PictureEncoder(config)
            else:  # the rotary table is made for real, is as long as the context, and is not in the state dict
                module = LlamaAdapterDecoder(dataclasses.replace(config, context=1))
    except (RuntimeError, TypeError):  # the second for a side beyond 64 bits
        raise CheckpointError("The configuration asks for tensors larger than any memory", hint=_DAMAGED) from None
    return {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}


def model_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the digests of the model's files and its configurations: what an answer depends on."""
    parts = {
        "files": {file: manifest["files"][file]["sha256"] for file in MODEL_FILES},
        "vision": manifest["vision"],
        "llm": manifest["llm"],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a precision as manifests and flags write it."""
    return str(dtype).removeprefix("torch.")


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


def read_state(path: Path, *, wanted: Mapping[str, tuple[int, ...]], stored: torch.dtype) -> dict[str, Tensor]:
    state = read_safetensors(path)
    missing = [key for key in wanted if key not in state]
    unknown = [key for key in state if key not in wanted]
    if missing or unknown:
        parts = [f"lacks {list_keys(missing)}"] if missing else []
        parts += [f"holds {list_keys(unknown)}, unknown to its configuration"] if unknown else []
        raise CheckpointError(f"`{path}` {' and '.join(parts)}", hint=_DAMAGED)
    for key, shape in wanted.items():
        if tuple(state[key].shape) != shape or state[key].dtype != stored:
            raise CheckpointError(
                f"`{path}` holds `{key}` as {dtype_name(state[key].dtype)} {list(state[key].shape)}, where "
                f"{dtype_name(stored)} {list(shape)} is wanted",
                hint=_DAMAGED,
            )
    return state


def is_bare(name: str) -> bool:
    """Whether a name is that of a file inside the bundle, not a way out of it."""
    return Path(name).name == name


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def _is_source(source: object) -> bool:
    if not isinstance(source, dict) or not isinstance(source.get("sha256"), str | None):
        return False
    return isinstance(source.get("role"), str) and isinstance(source.get("path"), str)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Complete or not at all, also when the machine stops in between."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists():
        os.replace(partial, target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    try:
        os.replace(target, old)  # onto an empty folder
    except BaseException:
        old.rmdir()
        raise
    try:
        os.replace(partial, target)
    except BaseException:
        os.replace(old, target)
        raise
    shutil.rmtree(old)
