"""Interprets the columns of a table row: template variables, and a question with its input and choices."""

import json
import os
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from llama_adapter.app.pictures.inputs.addresses import ADDRESS
from llama_adapter.app.pictures.inputs.folders import has_picture_suffix
from llama_adapter.app.pictures.inputs.items import PictureInput, QuestionFields
from llama_adapter.runtime.given import split_choices
from llama_adapter.vision.formats import PICTURE_SUFFIXES

PICTURE_COLUMNS = ("picture", "image", "images", "file_name", "filename", "path")
PROMPT_COLUMNS = ("prompt", "question", "instruction")
INPUT_COLUMN, CHOICES_COLUMN = "input", "choices"
QUESTIONS, TURNS = "questions", "conversations"  # lists of objects; turns are of LLaVA's instructions, or of a chat
_CHAT = "messages"  # another name of turns
KNOWN_COLUMNS = frozenset((*PICTURE_COLUMNS, *PROMPT_COLUMNS, INPUT_COLUMN, CHOICES_COLUMN, QUESTIONS, TURNS))
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES["developer"] = "system"  # of newer chats
_PICTURE_PARTS = ("image", "image_url", "input_image")
JSON = json.JSONDecoder(parse_constant=lambda name: None)  # pandas writes NaN for an empty cell
_LONGEST_PATH = 4096
_PICTURE_MARK = "<image>"  # in the questions of LLaVA; it is no part of a prompt here
# What a question is about. Elsewhere in a text, the names of these elements of HTML are words.
_MARK = re.compile(r"<image>|</img>|\A\s*<(?:img|video)>|<(?:img|video)>\s*\Z")


def known_name(name: str, known: Collection[str] = KNOWN_COLUMNS) -> str:
    """The name of a column without white space around it, in lower case if it is one of `known`."""
    name = name.strip()
    return name.lower() if name.lower() in known else name


def by_known_name(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The values of a row by `known_name`; a list `messages` is one of turns."""
    return {
        TURNS if name.strip().lower() == _CHAT and isinstance(value, list) else known_name(name, known): value
        for name, value in values.items()
    }


def named(columns: Sequence[str]) -> str:
    """Names for a message: a, b or c."""
    return columns[0] if len(columns) == 1 else f"{', '.join(columns[:-1])} or {columns[-1]}"


def asked_rows(values: Mapping[str, object], *, has_picture: bool) -> list[dict[str, object]]:
    """A row for each question: for each object of its list `questions`, and each pair of turns of `conversations`.

    Any other row is alone. In a row without a question, a `text` beside a `question_id`, or one that ends in a question
    mark beside a `label`, is the question, as in POPE's files. Turns are plain text, so braces in them are escaped if
    the row `has_picture`: only questions about pictures are templates. Raises ValueError with the reason.
    """
    row = dict(values)
    if isinstance(row.get(TURNS), list) or (TURNS in row and not isinstance(row.get("answer"), str)):
        as_question = as_template if has_picture else str
        pairs = _pairs(row.pop(TURNS), has_picture=has_picture)
        return [{**row, "question": as_question(asked), "answer": said} for asked, said in pairs]
    several = row.pop(QUESTIONS, None)
    if several is None:
        rows = [_with_question(row)]
    elif isinstance(several, list) and several and all(isinstance(one, dict) for one in several):
        rows = [{**row, **{known_name(name): value for name, value in one.items()}} for one in several]
    else:
        raise ValueError(f"its `{QUESTIONS}` are no list of objects")
    for one in rows if has_picture else ():
        one |= {name: _without_marks(text) for name in PROMPT_COLUMNS if isinstance(text := one.get(name), str)}
    return rows


def _without_marks(text: str) -> str:
    """A question without marks of the picture at its ends and in lines of their own. Marks between words stay."""
    if _PICTURE_MARK not in text:
        return text
    lines = [line for line in text.splitlines(keepends=True) if line.strip() != _PICTURE_MARK]
    parts = "".join(lines).split(_PICTURE_MARK)
    filled = [number for number, part in enumerate(parts) if part.strip()]
    return _PICTURE_MARK.join(parts[filled[0] : filled[-1] + 1]).strip() if filled else ""


def _with_question(row: dict[str, object]) -> dict[str, object]:
    text = row.get("text")
    is_question = isinstance(text, str) and ("question_id" in row or ("label" in row and text.rstrip().endswith("?")))
    if not is_question or first_column(row, of=PROMPT_COLUMNS) is not None:
        return row
    return {name: value for name, value in row.items() if name != "text"} | {"question": text}


def _pairs(turns: object, *, has_picture: bool) -> list[tuple[str, str | None]]:
    """Each question of a conversation with its answer. Raises ValueError."""
    pairs: list[tuple[str, str | None]] = []
    for turn in turns if isinstance(turns, list) else [None]:
        role, text = _said(turn)
        if role == "user":
            if not has_picture and (mark := _MARK.search(text)):
                raise ValueError(
                    f"its `{TURNS}` have {mark[0].strip()}, and it has no picture in a column {named(PICTURE_COLUMNS)}"
                )
            pairs.append((text.replace(_PICTURE_MARK, "").strip(), None))
        elif role == "assistant" and pairs and pairs[-1][1] is None:
            pairs[-1] = pairs[-1][0], text
        elif role != "system" or pairs:
            pairs.clear()
            break
    if not pairs:
        raise ValueError(
            f'its `{TURNS}` are no list of turns of "human" and "gpt", each with a text `value`, or of "user" and '
            '"assistant", each with `content`'
        )
    return pairs


def _said(turn: object) -> tuple[str, str]:
    """The role and the text of a turn in LLaVA's form or that of chats; "" for other values.

    A picture in a turn of the user is a mark in its text.
    """
    match turn:
        case {"from": str(role), "value": str(text)} | {"role": str(role), "content": str(text)}:
            return _ROLES.get(role, ""), text
        case {"role": str(role), "content": list(parts)} if all(isinstance(part, Mapping) for part in parts):
            are_pictures = [part.get("type") in _PICTURE_PARTS and _ROLES.get(role) == "user" for part in parts]
            texts = [
                _PICTURE_MARK if is_one else part.get("text") for part, is_one in zip(parts, are_pictures, strict=True)
            ]
            if all(isinstance(text, str) for text in texts):
                return _ROLES.get(role, ""), "\n".join(map(str, texts))
    return "", ""


def first_column(values: Mapping[str, object], *, of: tuple[str, ...]) -> str | None:
    """The first of the names `of` that is a column; None if there is none."""
    return next((name for name in of if name in values), None)


def as_template(text: str) -> str:
    """Escape braces, so that a template of a question gives exactly this text."""
    return text.replace("{", "{{").replace("}", "}}")


def as_columns(values: Mapping[str, object], *, without: Collection[str] = ()) -> dict[str, str]:
    """The scalar values as text, but those of the columns `without`; null becomes the empty string."""
    kept = ((name, value) for name, value in values.items() if name not in without)
    return {name: as_text(value) for name, value in kept if not isinstance(value, list | dict | bytes)}


def question_columns(values: Mapping[str, object]) -> set[str]:
    """Names of the columns that `question_fields` reads."""
    prompt = first_column(values, of=PROMPT_COLUMNS)
    return {INPUT_COLUMN, CHOICES_COLUMN, *([] if prompt is None else [prompt])}


def question_fields(values: Mapping[str, object], *, of: tuple[str, ...] = PROMPT_COLUMNS) -> QuestionFields | None:
    """The question of a row, None if it has none. Blank texts count as missing.

    The prompt is in the first existing column of `of`. Choices are a list, a JSON list as text, or a comma-separated
    text. Raises ValueError, which gives the reason, for a value of the wrong type.
    """
    prompt = first_column(values, of=of)
    fields = QuestionFields(
        instruction=None if prompt is None else _text_or_none(values[prompt], name=prompt),
        input=_text_or_none(values.get(INPUT_COLUMN), name=INPUT_COLUMN),
        choices=_choices(values.get(CHOICES_COLUMN)),
    )
    return None if fields == QuestionFields() else fields


def as_text(value: object) -> str:
    """A value of a cell as text; that of null and NaN is empty."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()  # JSON may contain lone surrogates
    if value is None or value != value:
        return ""
    return json.dumps(value) if isinstance(value, int | float) else str(value)  # Parquet has dates and decimal numbers


def _text_or_none(value: object, *, name: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"`{name}` is not text")
    if not is_encodable(value):
        raise ValueError(f"`{name}` has a lone surrogate")
    return value if value.strip() else None


def _choices(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        try:
            value = split_choices(value) if value.strip() else None
        except ValueError:
            raise ValueError("`choices` begins like a JSON list, but is not valid JSON") from None
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(choice, str) and is_encodable(choice) for choice in value):
        raise ValueError("`choices` is neither a list of texts nor a text with commas")
    choices = tuple(choice.strip() for choice in value)
    if len(choices) < 2 or not all(choices) or len(set(choices)) < len(choices):
        raise ValueError("`choices` must be at least two, each different and none empty")
    return choices


def is_encodable(text: str) -> bool:
    """Whether a text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def row_picture(values: Mapping[str, object], *, root: str, place: str) -> PictureInput | None:
    """The picture of a row, relative to the folder `root`; None if it has none. `place` is the row's, for messages.

    It is in the first of `PICTURE_COLUMNS` whose value is not null: a path or an address, or its bytes, or an object
    with `bytes` or `path`, as the `datasets` library stores pictures, or a list of one of them. Raises ValueError with
    the reason for another value.
    """
    column = next((name for name in PICTURE_COLUMNS if values.get(name) not in (None, [])), None)
    if column is None:
        return None
    value = values[column]
    if isinstance(value, list):
        if len(value) > 1:
            raise ValueError(f"`{column}` has {len(value):,} pictures, and a question is about one")
        value = value[0]
    if isinstance(value, bytes):
        if len(value) <= _LONGEST_PATH and has_picture_suffix(os.fsdecode(value)):
            raise ValueError(f"its cell `{column}` holds the name of a file as bytes; write it as text")
        value = {"bytes": value}
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        label = f"{place}/{value['path']}" if isinstance(value.get("path"), str) else place
        return PictureInput(source=value["bytes"], label=label, root=root or ".", found_in=(place,))
    name = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(name, str):
        raise ValueError(f"`{column}` is not the name of a file")
    if not name.strip():
        raise ValueError(f"its cell `{column}` is empty")
    if not ADDRESS.match(name) and (len(name) > _LONGEST_PATH or name.startswith("data:")):
        raise ValueError(f"its cell `{column}` holds a picture as text, and not the name of a file")
    path = spelt_path(name, root=root)
    return PictureInput(source=path, label=path, root=root or ".", found_in=(place,))


def spelt_path(name: str, *, root: str) -> str:
    """The path of a picture below `root`, or an address.

    If there is no such file, the name may be spelt as on Windows, in an address or on macOS, or lack the suffix of the
    only picture of this name.
    """
    is_address = ADDRESS.match(name) is not None
    path = name if is_address else os.path.join(root, name)
    if (is_address and not name.startswith("file://")) or (
        has_picture_suffix(name) and name.isascii() and not re.search(r"\\|%|file:", name)
    ):
        return path
    decoded = unquote(name.removeprefix("file://")).replace("\\", "/")
    forms = dict.fromkeys((name, decoded, *(unicodedata.normalize(form, decoded) for form in ("NFC", "NFD"))))
    if file := _first_file(root, *forms):
        return file
    if os.path.splitext(decoded)[1][1:].isalpha():  # `Photo 10.15` lacks a suffix, too
        return path
    stems = [form for form in forms if os.path.isdir(os.path.join(root, os.path.dirname(form)) or os.curdir)]
    ends = [(suffix, suffix.upper()) for suffix in PICTURE_SUFFIXES]
    files = [file for both in ends if (file := _first_file(root, *(stem + end for stem in stems for end in both)))]
    return files[0] if len(files) == 1 else path


def _first_file(root: str, *names: str) -> str | None:
    return next(filter(os.path.lexists, (os.path.join(root, name) for name in names)), None)
