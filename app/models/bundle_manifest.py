"""The manifest of a bundle: its keys and versions, and the files that it names. Imports no torch."""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.llm.pieces.folder import SETTINGS_FILE, stored_name
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.kernels.layout import LAYOUT_VERSION, PACKED, PACKED_KINDS, PackedLayout
from llama_adapter.runtime.schemes import BUNDLE_VERSIONS, FLOAT, FLOAT_TYPES, PRECISIONS, Precision, finer
from llama_adapter.runtime.tensor_files.arrays import list_keys, read_json
from llama_adapter.runtime.text import UNSAFE_ON_TERMINALS, shown_excerpt, shown_name
from llama_adapter.vision.config import VIT_L_14, ConnectorConfig, QueryConfig, VisionConfig
from llama_adapter.vision.formats import WantedOrder
from llama_adapter.vision.out_of_distribution import read_familiarity

if TYPE_CHECKING:  # torch is not needed to read a manifest
    from llama_adapter.runtime.ranks import Alone

DAMAGED = "the bundle is damaged or was changed by hand; write it again with `llama-adapter convert`"
FORMAT = "llama-adapter-bundle"
MANIFEST, VISION, LLM, KNOWN_ANSWER, FAMILIAR, INPUT_SCALES = (
    "manifest.json",
    "vision.safetensors",
    "llm.safetensors",
    "known_answer.json",
    "familiar.safetensors",
    "input_scales.safetensors",
)
# The fields of a `PictureFormat`.
_PICTURE_FORMAT: dict[str, Any] = {"token": str, "token_id": int, "tokens_each": int, "frame": str, "most_squares": int}
# Types of the manifest's values, see `_has_form`.
_FORMS: dict[str, Any] = {
    **dict.fromkeys(("name", "dtype", "prompt", "digest", "card"), str),
    **dict.fromkeys(("vision", "llm"), dict),
    "files": {str: {"bytes": int, "sha256": str}},
    "sources": [{"role": str, "path": str, "sha256": str | None}],
    "merged": [str],
}
_ORIGIN_FORMS: dict[str, Any] = {"precision": str, "origin": {"digest": str, "fingerprint": {str: str}}}
# The other versions give the precision; with these, the manifest says it. FINER_VERSION means that some weights are
# finer; such bundles may be packed or split too.
PACKED_VERSION, SPLIT_VERSION, FINER_VERSION = 4, 5, 6
_FORMS_OF_VERSION: dict[int, dict[str, Any]] = {
    PACKED_VERSION: {"packed": {"version": int, "block": int, "int8_added": int, "source": str}},
    SPLIT_VERSION: {"num_ranks": int},
    FINER_VERSION: {"finer": {str: str}},
}
_LONGEST_LABEL = 200
_LONGEST_QUESTION = 100_000  # characters; far more than a context holds
_LARGEST_BLOCK = 1024
_MOST_RANKS = 1024
_FIRST_FFN_BLOCK = 64  # for split bundles without this entry


class Manifest(dict[str, Any]):
    """The values of a bundle's manifest by key, and what follows from them. `place` is the bundle's folder."""

    def __init__(self, place: Path, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.place = place

    @property
    def precision(self) -> Precision:
        """The precision of the weights in the files."""
        if self["version"] in _FORMS_OF_VERSION:
            precision: Precision = self["precision"]
            return precision
        return next(name for name, version in BUNDLE_VERSIONS.items() if version == self["version"])

    @property
    def finer_weights(self) -> Mapping[str, Precision]:
        """Names of the linear weights that have another precision than `precision`, with the precision of each."""
        found: Mapping[str, Precision] = self["finer"] if self["version"] == FINER_VERSION else {}
        return found

    @property
    def precisions(self) -> frozenset[Precision]:
        """All precisions of linear weights in the files."""
        return frozenset((self.precision, *self.finer_weights.values()))

    def has_part(self, version: int) -> bool:
        """Whether the manifest has the keys of PACKED_VERSION or SPLIT_VERSION."""
        own = self["version"]
        return bool(own == version or (own == FINER_VERSION and not _FORMS_OF_VERSION[version].keys().isdisjoint(self)))

    @property
    def layout(self) -> PackedLayout | None:
        """The layout of the packed weights in the files; None if they are not packed."""
        if not self.has_part(PACKED_VERSION):
            return None
        return PackedLayout(**{field.name: self["packed"][field.name] for field in dataclasses.fields(PackedLayout)})

    @property
    def num_ranks(self) -> int:
        """The number of ranks over which the decoder's files are split; 1 means that the decoder is one file."""
        return int(self["num_ranks"]) if self.has_part(SPLIT_VERSION) else 1

    @property
    def model_files(self) -> tuple[str, ...]:
        """Names of the files that answers depend on."""
        vision = (VISION,) if self["vision"] else ()
        optional = (name for name in (SETTINGS_FILE, INPUT_SCALES) if name in self["files"])
        return *vision, *decoder_files(self.num_ranks), stored_name(self["files"]), *optional

    @property
    def picture_format(self) -> PictureFormat | None:
        """How pictures stand in prompts, if they are tokens of them."""
        fields = self.get("picture_format")
        return None if fields is None else PictureFormat(**fields)

    def files_for(self, ranks: "Alone") -> tuple[str, ...]:
        """Names of the files that this rank needs: all except the other ranks' parts of the decoder.

        Raises CheckpointError if the decoder is split for another number of ranks.
        """
        wanted = self.num_ranks
        if wanted not in (1, ranks.size):
            raise CheckpointError(
                f"The decoder of `{self.place}` is split for {wanted} ranks, and this run has {ranks.size}",
                hint=f"commands that answer take --tensor-parallel {wanted}; for others, and for another number, use "
                "the bundle that it was split from",
            )
        others = set(decoder_files(wanted)) - {decoder_file(ranks.rank, wanted)}
        return tuple(name for name in self["files"] if name not in others)

    def check_sizes(self, *names: str) -> None:
        """Raise CheckpointError for the first of the files, by default of all, that is missing or has another size."""
        for name in names or self["files"]:
            path, wanted = self.place / name, self["files"][name]["bytes"]
            if not path.is_file():
                raise CheckpointError(
                    f"The bundle `{self.place}` lacks `{shown_name(name)}`", hint="copy the whole folder again"
                )
            if path.stat().st_size != wanted:
                raise CheckpointError(
                    f"`{path}` has {path.stat().st_size:,} bytes, where {wanted:,} are wanted",
                    hint="the copy was cut short; copy the whole folder again",
                )

    def check_finer(self, names: Iterable[str]) -> None:
        """Raise CheckpointError if a name in `finer` is no linear weight of the decoder, whose tensors have `names`."""
        stored = {
            name.removesuffix("_scale").partition(PACKED)[0]
            for name in names
            if name.endswith("_scale") or PACKED in name
        }
        if unknown := self.finer_weights.keys() - stored:
            raise CheckpointError(
                f"`{self.place / MANIFEST}` names {list_keys(sorted(unknown))} in `finer`, and the decoder has no such "
                "linear weights",
                hint=DAMAGED,
            )

    def configs(
        self, *, context: int | None = None, channel_order: WantedOrder = "auto"
    ) -> tuple[VisionConfig, DecoderConfig]:
        """The configurations; the encoder's are nominal in a bundle for texts.

        `context` and `channel_order` replace the bundle's own. Raises CheckpointError if the configurations are invalid
        or do not fit each other.
        """
        try:
            decoder = DecoderConfig.from_dict(self["llm"])
            vision = VisionConfig.from_dict(self["vision"]) if self["vision"] else no_vision(decoder)
            if self.num_ranks > 1:
                decoder = dataclasses.replace(decoder, ffn_block=self.get("ffn_block", _FIRST_FFN_BLOCK))
            decoder.share(0, self.num_ranks)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"`{self.place / MANIFEST}` has an invalid configuration: {shown_excerpt(str(error), length=300)}"
            ) from None
        if self["vision"]:
            check_halves(vision, decoder, adapter=str(self.place))
        if context is not None:
            decoder = dataclasses.replace(decoder, context=context)
        return vision if channel_order == "auto" else dataclasses.replace(vision, channel_order=channel_order), decoder

    def described(self, vision: VisionConfig, decoder: DecoderConfig) -> dict[str, Any]:
        """The fields of a `DescribedModel` with these configurations that the bundle gives.

        Raises CheckpointError for damaged files, and for a tokenizer of another model.
        """
        digest, stored_order = str(self["digest"]), self["vision"].get("channel_order", "rgb")
        if vision.channel_order != stored_order:  # the answers differ
            digest = hashlib.sha256(f"{digest} {vision.channel_order}".encode()).hexdigest()
        tokenizer, detector = Tokenizer.load_stored(self.place, self["files"]), None
        if tokenizer.vocab_size != decoder.vocab_size:
            raise CheckpointError(
                f"The bundle `{self.place}` has a tokenizer of {tokenizer.vocab_size} pieces for a model of "
                f"{decoder.vocab_size} tokens",
                hint=DAMAGED,
            )
        if FAMILIAR in self["files"]:
            familiar = self.place / FAMILIAR
            detector = read_familiarity(familiar, num_queries=decoder.num_queries, width=decoder.dim)
        return {
            **{name: str(self[name]) for name in ("name", "prompt", "card")},
            "question": self.get("question"),
            "template": self.get("template", "instruction"),
            "picture_format": self.picture_format,
            "digest": digest,
            "vision_config": vision,
            "decoder_config": decoder,
            "tokenizer": tokenizer,
            "ood_detector": detector,
        }

    def model_digest(self) -> str:
        """SHA-256 of everything that answers depend on: the digests of the model's files, and its configurations."""
        parts = {
            "files": {file: self["files"][file]["sha256"] for file in self.model_files},
            **{name: self[name] for name in ("vision", "llm", "picture_format") if name in self},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def decoder_file(rank: int, num_ranks: int) -> str:
    """Name of the file with a rank's part of the decoder, or with all of it."""
    return LLM if num_ranks == 1 else f"llm-rank-{rank}-of-{num_ranks}.safetensors"


def decoder_files(num_ranks: int) -> tuple[str, ...]:
    """Names of the decoder's files, in the order of the ranks."""
    return tuple(decoder_file(rank, num_ranks) for rank in range(num_ranks))


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and check a bundle's manifest. Raises CheckpointError if it is missing, invalid or of another version."""
    place = Path(directory)
    if not (place / MANIFEST).is_file():
        problem = f"has no {MANIFEST}" if place.is_dir() else "is a file" if place.exists() else "does not exist"
        raise CheckpointError(
            f"`{place}` is no model bundle: it {problem}",
            hint="pass a name from `llama-adapter get --list`, hf:OWNER/NAME, a folder that `llama-adapter convert` "
            "wrote, or its name in LLAMA_ADAPTER_HOME; LLaMA's own folders go with --llama-dir",
        )
    manifest = Manifest(place, read_json(place / MANIFEST))
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"`{place / MANIFEST}` is not the manifest of a model bundle")
    version = manifest.get("version")
    versions = [*BUNDLE_VERSIONS.values(), *_FORMS_OF_VERSION]
    if type(version) is not int or version not in versions:
        raise CheckpointError(
            f"The bundle `{place}` has the version {shown_excerpt(repr(version))}, and this program reads "
            f"{min(versions)} to {max(versions)}",
            hint="install a newer release, or write the bundle again with `llama-adapter convert`",
        )
    if faults := _faults(manifest):
        raise CheckpointError(f"`{place / MANIFEST}` is incomplete or wrong in {list_keys(faults)}", hint=DAMAGED)
    return manifest


def _faults(manifest: Manifest) -> list[str]:
    """Keys, or names of files, whose values are missing or wrong."""
    version = manifest["version"]
    has_own_version = version in _FORMS_OF_VERSION
    stated = manifest.get("precision")
    if has_own_version and not (isinstance(stated, str) and stated in PRECISIONS):
        return ["precision"]
    precision = manifest.precision
    parts = [part for part in (PACKED_VERSION, SPLIT_VERSION) if manifest.has_part(part)]
    forms = {**_FORMS, **_FORMS_OF_VERSION.get(version, {})}
    for part in parts:
        forms |= _FORMS_OF_VERSION[part]
    has_origin = has_own_version or precision != FLOAT
    if has_origin:
        forms |= _ORIGIN_FORMS
    faults = [key for key, form in forms.items() if not _has_form(manifest.get(key), form)]
    if faults:
        return faults
    if SPLIT_VERSION in parts and not 1 < manifest["num_ranks"] <= _MOST_RANKS:
        return ["num_ranks"]
    faults += [file for file in manifest.model_files if file not in manifest["files"]]
    faults += [file for file in manifest["files"] if not is_bare(file)]
    faults += [key for key in ("name", "digest") if not _is_label(manifest[key])]
    faults += [] if len(manifest["prompt"]) <= _LONGEST_QUESTION else ["prompt"]
    faults += [] if is_question(manifest.get("question", "?")) else ["question"]  # only some bundles have it
    faults += [] if manifest.get("template", "instruction") in get_args(Template) else ["template"]  # likewise
    if (shown := manifest.get("picture_format")) is not None:
        is_known = _has_form(shown, _PICTURE_FORMAT) and shown.keys() == _PICTURE_FORMAT.keys()
        faults += [] if is_known else ["picture_format"]
    if manifest["dtype"] not in FLOAT_TYPES:
        return [*faults, "dtype"]
    faults += [] if manifest.get("precision", FLOAT) == precision else ["precision"]
    if version == FINER_VERSION:
        is_finer = precision != finer(precision) and set(manifest["finer"].values()) == {finer(precision)}
        faults += [] if is_finer else ["finer"]
    if PACKED_VERSION in parts:
        block, added = manifest["packed"]["block"], manifest["packed"]["int8_added"]
        is_known = manifest["packed"]["version"] == LAYOUT_VERSION and 0 < block <= _LARGEST_BLOCK
        kind = manifest["dtype"] if precision == FLOAT else precision
        is_known = is_known and 0 <= added < 256 and kind in PACKED_KINDS and SPLIT_VERSION not in parts
        faults += [] if is_known and _is_label(manifest["packed"]["source"]) else ["packed"]
    if has_origin:
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


def is_question(value: object) -> bool:
    """Whether a value can be the question that a model stores: text that is neither blank nor very long."""
    return isinstance(value, str) and bool(value.strip()) and len(value) <= _LONGEST_QUESTION


def is_bare(name: str) -> bool:
    """Whether a name is a plain, printable file name without folders."""
    return Path(name).name == name != ".." and _is_label(name)


def _is_label(text: str) -> bool:
    """Whether a text is printable on one line."""
    return UNSAFE_ON_TERMINALS.search(text) is None and len(text) <= _LONGEST_LABEL


def no_vision(config: DecoderConfig) -> VisionConfig:
    """Nominal encoder sizes for a model without encoder."""
    sizes = {"num_queries": max(1, config.num_queries), "output_dim": config.dim}
    return VisionConfig(clip=VIT_L_14, query=QueryConfig(width=1, depth=0, num_heads=1, mlp_dim=1, **sizes))


def check_halves(vision: VisionConfig, decoder: DecoderConfig, *, adapter: str) -> None:
    """Raise CheckpointError unless both halves agree on the visual queries; a connector may make any number."""
    made, read = (vision.query.num_queries, vision.query.output_dim), (decoder.num_queries, decoder.dim)
    if isinstance(vision.query, ConnectorConfig):
        read = made[0], decoder.dim
    if made != read:
        raise CheckpointError(
            f"The adapter `{adapter}` makes {made[0]} visual queries of width {made[1]}, and its LLaMA part reads "
            f"{read[0]} of width {read[1]}",
            hint="the file was put together from two adapters; take the original",
        )


def notes_on_rights(place: Path, files: Iterable[str]) -> tuple[str, ...]:
    """A note if other users may change files of the bundle, because they could then replace the model."""
    # In a folder with the sticky bit, other users may add files but not replace existing ones.
    open_to = {"the folder itself": "" if place.stat().st_mode & stat.S_ISVTX else _writers(place)}
    open_to |= {f"`{shown_name(file)}`": _writers(place / file) for file in files}
    found = [what for what, who in open_to.items() if who]
    if not found:
        return ()
    who = "every user of this machine" if "every user" in open_to.values() else "a group that this user is not in"
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (f"{who} may change the model `{place}` ({found[0]}{more}); if that is not meant: `chmod -R go-w {place}`",)


def _writers(path: Path) -> str:
    """Who may write to a path, except its owner and this user's groups, which are shared on purpose; "" if nobody."""
    status = path.stat()
    if status.st_mode & stat.S_IWOTH:
        return "every user"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in {os.getegid(), *os.getgroups()}:
        return "a group"
    return ""
