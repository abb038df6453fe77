"""What a model's folder holds for its tokenizer: the file, and settings in the files beside it."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llama_adapter.llm.pieces.base import TOKENIZER_FILES
from llama_adapter.llm.pieces.sentence_pieces import SentencePieces
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json

SETTINGS_FILE: Final = "tokenizer_config.json"
_TEMPLATE_FILE: Final = "chat_template.jinja"
_OLD_TEMPLATE_FILE: Final = "chat_template.json"  # of models that see pictures
# A hint for folders without `tokenizer.json`. Saved over the folder itself, it would replace other files there.
_MAKING: Final = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(OTHER)"
JSON_MAKER: Final = f"transformers makes a tokenizer.json in another folder: `{_MAKING}`"
_MAX_BYTES: Final = 64 << 20  # the largest tokenizers in use have 34 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """What the files beside a tokenizer say about its use."""

    end_ids: tuple[int, ...] = ()  # each ends an answer; the first is learned as the end
    chat_template: str | None = None  # Jinja, as Hugging Face's models carry it
    names: Mapping[str, str] = field(default_factory=dict)  # of special tokens, for the template: bos_token, ...
    begins: bool | None = None  # whether a text of a `tokenizer.model` begins with the begin token; None: it does
    num_rows: int | None = None  # of the model's embedding; None: not known
    added: Mapping[str, int] = field(default_factory=dict)  # tokens that the tokenizer's file may lack: name -> id


def stored_name(names: Collection[str]) -> str:
    """Which of the files of a bundle or an export is its tokenizer; `tokenizer.model` if none is."""
    return next((name for name in TOKENIZER_FILES if name in names), TOKENIZER_FILES[0])


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer's file in a folder; None if it has none.

    Beside a SentencePiece model, a `tokenizer.json` is used only if it has tokens that the model lacks, or that the
    model finds in any text, or if it puts other blanks: before the first text alone or before none, where the model
    puts one before each. For its blanks alone, it is used only if texts begin and end with the same tokens as with the
    model. Raises CheckpointError for a file that cannot be read.
    """
    model, other = (folder / name for name in TOKENIZER_FILES)
    if not model.is_file() or not other.is_file():
        return next((file for file in (model, other) if file.is_file()), None)
    try:
        pieces = SentencePieces(read_bytes(model), name=str(model))
    except CheckpointError:
        return other
    marks = pieces.marks
    most = _num_rows([_read(folder / "config.json")])
    try:
        content = json.loads(read_bytes(other))
        added = [(str(one["content"]), int(one["id"])) for one in content["added_tokens"]]
    except (ValueError, KeyError, TypeError):
        return model
    used = [(name, one) for name, one in added if most is None or one < most]
    if any(name not in marks or marks[name].id != one for name, one in used):
        return other
    scheme = re.search('"prepend_scheme": "(first|never)"', json.dumps(content.get("pre_tokenizer")))
    puts_blanks = pieces.name_of(pieces.encode("a")[0]).startswith("\u2581")
    has_other_blanks = scheme is not None and (scheme[1] == "first" or puts_blanks)
    return other if has_other_blanks and _begins_and_ends_alike(content, read_settings(folder), pieces) else model


def _begins_and_ends_alike(content: Mapping[str, Any], settings: TokenizerSettings, pieces: SentencePieces) -> bool:
    """Whether a `tokenizer.json` begins texts as the SentencePiece model beside it, and the settings name an end."""
    begin = json.dumps(pieces.name_of(pieces.begin_ids[0]))
    begins = begin in json.dumps(content.get("post_processor"))
    has_end = bool(settings.end_ids) or "eos_token" in settings.names
    return has_end and begins == (settings.begins is not False)


def read_settings(*folders: Path) -> TokenizerSettings:
    """The settings in the files of a model's folders, as Hugging Face writes them. The last one has the weights.

    `chat_template.jinja`, or else `chat_template.json`, precedes the template in
    `tokenizer_config.json`. Raises CheckpointError for damaged files.
    """
    configs = [_read(folder / name) for name in ("generation_config.json", "config.json") for folder in folders]
    own = stored_settings(*folders)
    return TokenizerSettings(
        # As in transformers, generation_config.json has precedence.
        end_ids=(*next(filter(None, map(_end_ids, configs)), ()), *own.end_ids),
        chat_template=_template_file(*folders) or own.chat_template,
        names=own.names,
        begins=own.begins,
        num_rows=_num_rows([_read(folder / "config.json") for folder in reversed(folders)]),
        added={**own.added, **{name: one for folder in folders for name, one in _added_file(folder)}},
    )


def find_template(folder: Path) -> str | None:
    """The chat template in a folder; None if it has none that can be read."""
    try:
        return _template_file(folder) or stored_settings(folder).chat_template
    except CheckpointError:
        return None


def _template_file(*folders: Path) -> str | None:
    templates = (folder / _TEMPLATE_FILE for folder in folders)
    beside = next((read_bytes(file).decode(errors="replace") for file in templates if file.is_file()), None)
    old = (_read(folder / _OLD_TEMPLATE_FILE).get("chat_template") for folder in folders)
    return beside or next((text for text in old if isinstance(text, str)), None)


def stored_settings(*folders: Path) -> TokenizerSettings:
    """The settings in `tokenizer_config.json` alone. Bundles and exports have the end ids there too."""
    content: dict[str, Any] = {}
    for folder in reversed(folders):
        content |= _read(folder / SETTINGS_FILE)
    template = content.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, Mapping)}
        template = named.get("default")
    texts = {name: _content(one) for name, one in content.items()}
    begins, added = content.get("add_bos_token"), content.get("added_tokens_decoder")
    return TokenizerSettings(
        end_ids=_end_ids(content),
        chat_template=template if isinstance(template, str) and template else None,
        names={name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)},
        begins=begins if isinstance(begins, bool) else None,
        added={
            name: int(number)
            for number, one in (added.items() if isinstance(added, dict) else ())
            if number.isdecimal() and isinstance(name := _content(one), str)
        },
    )


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _added_file(folder: Path) -> list[tuple[str, int]]:
    """Names and ids in `added_tokens.json`; none for a damaged file, because they serve a check alone."""
    try:
        content = _read(folder / "added_tokens.json")
    except CheckpointError:
        return []
    return [(name, one) for name, one in content.items() if type(one) is int]


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end ids of a configuration, or of the decoder inside that of a larger model."""
    own, inner = config.get("eos_token_id"), config.get("text_config")
    found = inner.get("eos_token_id") if own is None and isinstance(inner, Mapping) else own
    return tuple(one for one in (found if isinstance(found, list) else [found]) if type(one) is int)


def _num_rows(configs: Sequence[Mapping[str, Any]]) -> int | None:
    """The tokens of a model. Inside a larger one, the decoder's own entry counts, as for its weights."""
    parts = ((one.get("text_config"), one) for one in configs)
    found = (part.get("vocab_size") for both in parts for part in both if isinstance(part, Mapping))
    return next((rows for rows in found if type(rows) is int), None)


def read_bytes(place: Path) -> bytes:
    """The content of a tokenizer's file. Raises CheckpointError if it is missing, unreadable or no such file."""
    try:
        if place.exists() and not place.is_file():  # reading a pipe or a device may never end
            raise CheckpointError(f"The tokenizer `{place}` is not a regular file")
        if place.exists() and place.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"The tokenizer `{place}` has {place.stat().st_size:,} bytes: not a tokenizer")
        return place.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"No tokenizer at `{place}`",
            hint="LLaMA comes with a file `tokenizer.model`, newer models with `tokenizer.json`; put it into the "
            "model's folder or beside it",
        ) from None
    except OSError as error:
        raise CheckpointError(f"Cannot read the tokenizer `{place}`: {error.strerror}") from None
