"""What a model's folder holds for its tokenizer: the file, and settings in the files beside it."""

import json
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
_BLANK_ONCE: Final = '"prepend_scheme": "first"'
_MAX_BYTES: Final = 64 << 20  # the largest tokenizers in use have 34 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSettings:
    """What the files beside a tokenizer say about its use."""

    end_ids: tuple[int, ...] = ()  # each ends an answer; the first is learned as the end
    chat_template: str | None = None  # Jinja, as Hugging Face's models carry it
    names: Mapping[str, str] = field(default_factory=dict)  # of special tokens, for the template: bos_token, ...
    begins: bool | None = None  # whether a text begins with the begin token; None: as the tokenizer's file says
    num_rows: int | None = None  # of the model's embedding; None: not known
    added: tuple[str, ...] = ()  # names of tokens that the tokenizer's file may lack


def stored_name(names: Collection[str]) -> str:
    """Which of the files of a bundle or an export is its tokenizer; `tokenizer.model` if none is."""
    return next((name for name in TOKENIZER_FILES if name in names), TOKENIZER_FILES[0])


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer's file in a folder; None if it has none.

    Beside a SentencePiece model, a `tokenizer.json` is used only if it has tokens that the model lacks, or that the
    model finds in any text, or if it puts a blank before the first text alone, and not behind every mark as the model
    does. Raises CheckpointError for a file that cannot be read.
    """
    model, other = (folder / name for name in TOKENIZER_FILES)
    if not model.is_file() or not other.is_file():
        return next((file for file in (model, other) if file.is_file()), None)
    try:
        marks = SentencePieces(read_bytes(model), name=str(model)).marks
    except CheckpointError:
        return other
    most = _num_rows([_read(folder / "config.json")])
    try:
        content = json.loads(read_bytes(other))
        added = [(str(one["content"]), int(one["id"])) for one in content["added_tokens"]]
    except (ValueError, KeyError, TypeError):
        return model
    used = [(name, one) for name, one in added if most is None or one < most]
    is_other = _BLANK_ONCE in json.dumps(content.get("pre_tokenizer"))
    return other if is_other or any(name not in marks or marks[name].id != one for name, one in used) else model


def read_settings(*folders: Path) -> TokenizerSettings:
    """The settings in the files of a model's folders, as Hugging Face writes them.

    `chat_template.jinja`, or else `chat_template.json`, precedes the template in
    `tokenizer_config.json`. Raises CheckpointError for damaged files.
    """
    configs = [_read(folder / name) for name in ("generation_config.json", "config.json") for folder in folders]
    own = stored_settings(*folders)
    templates = (folder / _TEMPLATE_FILE for folder in folders)
    beside = next((read_bytes(file).decode(errors="replace") for file in templates if file.is_file()), None)
    old = (_read(folder / _OLD_TEMPLATE_FILE).get("chat_template") for folder in folders)
    beside = beside or next((text for text in old if isinstance(text, str)), None)
    return TokenizerSettings(
        # As in transformers, generation_config.json has precedence.
        end_ids=(*next(filter(None, map(_end_ids, configs)), ()), *own.end_ids),
        chat_template=beside or own.chat_template,
        names=own.names,
        begins=own.begins,
        num_rows=_num_rows(configs),
        added=(*own.added, *(name for folder in folders for name in _read(folder / "added_tokens.json"))),
    )


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
        added=tuple(str(name) for one in added.values() if (name := _content(one))) if isinstance(added, dict) else (),
    )


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end ids of a configuration."""
    found = _of_decoder(config, "eos_token_id")
    return tuple(one for one in (found if isinstance(found, list) else [found]) if type(one) is int)


def _num_rows(configs: Sequence[Mapping[str, Any]]) -> int | None:
    return next((rows for one in configs if type(rows := _of_decoder(one, "vocab_size")) is int), None)


def _of_decoder(config: Mapping[str, Any], entry: str) -> Any:
    """An entry of a configuration, or of that of the decoder inside a larger model."""
    own, inner = config.get(entry), config.get("text_config")
    return inner.get(entry) if own is None and isinstance(inner, Mapping) else own


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
