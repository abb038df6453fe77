"""The card of an exported decoder: `decoder.json`, which describes the folder's graphs and lists their files."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args

from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.picture_format import PictureFormat
from llama_adapter.runtime.errors import GraphError
from llama_adapter.runtime.graphs.sidecar import file_mark
from llama_adapter.runtime.json_object import check_fields, check_mapping, read_object, take_version

CARD_FILE: Final = "decoder.json"
VERSION: Final = 1
_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    **dict.fromkeys(("format", "name", "digest", "dtype", "precision", "prompt", "template", "channel_order"), str),
    **dict.fromkeys(("decoder", "fingerprint", "files"), dict),
    "has_sampling": bool,
    "gears": list,
    "settings": (dict, type(None)),
    **dict.fromkeys(("picture_format", "vision"), (dict, type(None))),
}
EXPORT_AGAIN: Final = "export it again with `llama-adapter export decoder`"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCard:
    """The description of an exported decoder. All values are plain JSON."""

    format: str  # onnx, om or mindir
    name: str  # the model's name, for people
    digest: str  # the model's digest in records
    decoder: Mapping[str, Any]  # a DecoderConfig
    dtype: str  # of activations and cache: float32 or float16
    precision: str  # of the linear layers' weights: float, int8 or int4
    has_sampling: bool  # whether the graph draws tokens; otherwise it returns the best tokens, and the host draws
    prompt: str  # for captions
    channel_order: str  # of the pixels that the model was trained on
    fingerprint: Mapping[str, str]  # of the vision half, see runtime/graphs/card.py; empty for models without one
    files: Mapping[str, str]  # name in the folder -> `file_mark`
    gears: tuple[Mapping[str, int], ...] = ()  # sizes that the graph was compiled for; empty: any size
    template: Template = "instruction"  # of prompts
    settings: Mapping[str, Any] | None = None  # settings of the format
    # How pictures stand in prompts, if they are tokens of them. The graphs then take embeddings in place of ids.
    picture_format: PictureFormat | None = None
    # A VisionConfig, because some encoders have no card. None: the encoder reads pictures by the rule of OpenAI's CLIP.
    vision: Mapping[str, Any] | None = None

    @property
    def config(self) -> DecoderConfig:
        """The decoder's sizes."""
        return DecoderConfig.from_dict(self.decoder)

    def write(self, folder: Path) -> None:
        """Write the card into `folder`. It must be the last file of an export."""
        values = {"version": VERSION, **asdict(self)}
        values["mark"] = _mark(values)
        (folder / CARD_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_card(folder: Path) -> ExportCard:
    """The card of a folder. Raises GraphError if it is missing or damaged."""
    path = folder / CARD_FILE
    try:
        values = read_object(path.read_text(encoding="utf-8"))
        take_version(values, VERSION)
        if values.pop("mark", None) != _mark({"version": VERSION, **values}):
            raise ValueError("it was changed after the export")
        check_fields(values, _FIELDS, what="the card")
        if (pictures := values["picture_format"]) is not None:
            check_fields(pictures, PictureFormat.__annotations__, what="picture_format")
            values["picture_format"] = PictureFormat(**pictures)
        for name in ("files", "fingerprint"):
            check_mapping(values[name], str, what=name)
        for gear in values["gears"]:
            check_mapping(gear, int, what="a gear")
        if values["dtype"] not in ("float32", "float16"):
            raise ValueError(f"its dtype is {values['dtype']!r}, and float32 or float16 is wanted")
        if values["template"] not in get_args(Template):
            raise ValueError(f"its template is {values['template']!r}, which this program does not know")
        card = ExportCard(**values | {"gears": tuple(values["gears"])})
        _ = card.config
    except (FileNotFoundError, NotADirectoryError):
        problem = "has no decoder.json" if folder.is_dir() else "is no folder"
        raise GraphError(
            f"`{folder}` {problem}, so it is no exported decoder",
            hint="`llama-adapter export decoder --out FOLDER` writes one",
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise GraphError(f"The card `{path}` cannot be read: {error}", hint=EXPORT_AGAIN) from None
    return card


def _mark(values: Mapping[str, Any]) -> str:
    """SHA-256 of a card's values. It is needed because not all values can be checked against the graphs."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_files(card: ExportCard, folder: Path) -> None:
    """Raise GraphError for a file that is missing or differs from the exported one. See `file_mark`."""
    for name, mark in card.files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise GraphError(f"The card of `{folder}` names a file outside of it: `{name}`", hint=EXPORT_AGAIN)
        if not path.is_file():
            raise GraphError(
                f"`{folder}` lacks `{name}`, which belongs to its decoder",
                hint="copy the whole folder; or " + EXPORT_AGAIN,
            )
        if file_mark(path) != mark:
            raise GraphError(
                f"`{path}` was changed after its export: it differs from what the card says", hint=EXPORT_AGAIN
            )
