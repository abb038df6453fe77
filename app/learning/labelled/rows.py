"""Turns a row of named values into examples. Rows come from tables, JSON lists and samples of archives."""

import difflib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from llama_adapter.app.learning.labelled.example import Choices, Example, Examples, Task
from llama_adapter.app.pictures.inputs import PictureInput, QuestionFields, natural_key
from llama_adapter.app.pictures.inputs.addresses import ADDRESS
from llama_adapter.app.pictures.inputs.fields import (
    KNOWN_COLUMNS,
    PICTURE_COLUMNS,
    QUESTIONS,
    TURNS,
    as_columns,
    as_text,
    asked_rows,
    by_known_name,
    first_column,
    is_encodable,
    named,
    question_columns,
    question_fields,
    row_picture,
)
from llama_adapter.app.pictures.inputs.folders import has_picture_suffix
from llama_adapter.runtime.given import split_choices
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.not_read import begins_like

CLASS_COLUMNS = ("label", "cls")
CAPTION_COLUMNS = ("text", "txt", "caption", "captions")
# The answer is in the first of these columns that a row has.
ANSWER_COLUMNS = ("answer", "answers", "output", *CAPTION_COLUMNS, *CLASS_COLUMNS)
_LISTS = ("answers", "captions")  # in cells, these may be lists of texts in JSON
_PART, _SPLIT = "part", "split"
_URL = "url"  # of the image-text lists of LLaMA-Adapter
KNOWN = frozenset((*KNOWN_COLUMNS, *ANSWER_COLUMNS, _PART, _SPLIT, _URL))  # columns whose case is ignored
_READ = KNOWN - {_URL}  # columns that are read in rows without a picture
WANTED = (*ANSWER_COLUMNS, QUESTIONS, TURNS)  # columns of which a table needs at least one
_SPLITS = {
    **dict.fromkeys(("train", "training", "restval"), "train"),  # restval: of Karpathy's splits
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_LIKE_PICTURES = re.compile(r"(image|img|picture|photo)[ _-]?(id|name|path|file|url|base64|b64)?", re.IGNORECASE)
_LIKE_LISTS = re.compile(rf"{_LIKE_PICTURES.pattern}s|file[ _-]?names", re.IGNORECASE)  # columns, as above
NO_PICTURE_COLUMN = (
    f"no picture in a column {named(PICTURE_COLUMNS)}: call the column of the pictures `picture`; if the row is a "
    "text, leave that out, or write null as its picture"
)
MAX_CHOICES = 2_000
SPLITS = tuple(dict.fromkeys(_SPLITS.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which columns of rows are read and how, and what rows do not say themselves."""

    choices: tuple[str, ...] | None = None  # the choices for all rows; None: each row's own choices
    question: str | None = None  # the question for rows without one; used only to find rows that ask the same
    split: str = ""  # the split of rows without one
    picture_folder: str | None = None  # of the pictures that tables and known sets name; None: the usual places
    fields: tuple[str, ...] | None = None  # of archives: the field of the picture, and that of the text

    def of_split(self, split: str) -> "Columns":
        """The same for the rows of a file or folder that is this split; "" if it is none."""
        return replace(self, split=split)


def split_name(name: str) -> str:
    """The name of a split: train, validation or test for their usual names, otherwise the name in lower case."""
    name = name.strip().lower()
    return _SPLITS.get(name, name)


def split_in(name: str) -> tuple[str, list[str]]:
    """The only split that a word of a name is, "" if there is none, and the other words: `train-00000-of-00002`."""
    words = re.findall(r"[^\W\d_]+", name.lower())
    splits = {_SPLITS[word] for word in words if word in _SPLITS}
    return splits.pop() if len(splits) == 1 else "", [word for word in words if word not in _SPLITS]


def are_splits(names: Sequence[str]) -> bool:
    """Whether names have different splits and no other difference than numbers, as `pets_train` and `pets_test`."""
    splits, others = {split_in(name)[0] for name in names}, [split_in(name)[1] for name in names]
    return len(splits) > 1 and "" not in splits and others.count(others[0]) == len(others)


def similar_split(name: str) -> str | None:
    """The split of the usual name that is most similar; None if none is similar."""
    found = difflib.get_close_matches(name.strip().lower(), _SPLITS, n=1)
    return _SPLITS[found[0]] if found else None


def add_row(
    found: Examples,
    values: Mapping[str, object],
    *,
    columns: Columns,
    place: str,
    line: int = 0,
    item: PictureInput | None = None,
    root: str = "",
    unanswered: str | None = None,
    told_at: str | None = None,
) -> bool:
    """Add the examples of a row: one, or one for each object in its list `questions` and each pair of `conversations`.

    The case of known column names is ignored. `item` is the picture. By default it is the picture that the row names,
    relative to the folder `root`; a row without a picture needs a question. An example of the task "choice" without
    choices has a class as its answer, see `with_classes`. Rows without an answer are left out as `unanswered`, and so
    are questions of a conversation that nobody answers; if it is None, they are errors.

    If the row is malformed, this is a problem at `told_at`, by default at `place`, and the result is False.
    """
    row = by_known_name(values, KNOWN)
    if row.keys() <= {_URL, *CAPTION_COLUMNS, _PART, _SPLIT} and _URL in row:
        row["picture"] = row.pop(_URL)
    if "_task_hash" in row and row.get("answer") in ("accept", "reject", "ignore") and row.pop("answer") != "accept":
        found.left_out.add("rows that were not accepted", place)  # by Prodigy's users: the answer is a verdict
        return True
    examples = []
    try:
        item = item or _picture(row, root=root, place=place)
        rows = asked_rows(row, has_picture=item.source is not None)
        has_turns = TURNS in row and TURNS not in rows[0]
        if has_turns and unanswered and (answered := [one for one in rows if one["answer"] is not None]):
            if num_open := len(rows) - len(answered):
                found.left_out.add("questions of conversations without an answer", place, number=num_open)
            rows = answered
        like = dict.fromkeys(name for one in rows for name in _like_pictures(one)) if item.source is None else {}
        if like and row.keys().isdisjoint(PICTURE_COLUMNS):
            raise ValueError(f"it has {shown_excerpt(', '.join(like))}, and {NO_PICTURE_COLUMN}")
        if like:
            found.left_out.add("other columns of pictures in rows whose picture is null", place)
        for one in rows:
            example = _example(one, item=item, columns=columns, place=place, line=line)
            if example is not None:
                examples.append(replace(example, has_turns=has_turns))
            elif unanswered is None:
                raise ValueError(f"it has no answer in a column {named(ANSWER_COLUMNS)}")
            else:
                found.left_out.add(unanswered, place)
    except ValueError as error:
        found.refuse(told_at or place, str(error))
        return False
    found.examples += examples
    return True


def with_classes(found: Examples, *, place: str) -> Choices:
    """Set the choices of examples whose answer is a class to all classes of `found`, in natural order; returns these.

    If there is only one class, or more than MAX_CHOICES, this is an error at `place`.
    """
    answers = {answer for example in found.examples if _needs_classes(example) for answer in example.answers}
    classes = Choices(sorted(answers, key=natural_key))
    if len(classes) == 1:
        found.refuse(place, f"all its labels are {shown_excerpt(classes[0])}; wanted at least two classes")
    if len(classes) > MAX_CHOICES:
        found.refuse(place, _too_many(len(classes), what="different labels"))
    alike = defaultdict[str, list[str]](list)
    for name in classes:
        alike[_folded(unicodedata.normalize("NFKC", " ".join(name.split())))].append(name)
    for names in alike.values():
        if len(names) > 1:
            by = "their case" if len({name.casefold() for name in names}) == 1 else "case, white space or encoding"
            found.warn(place, f"its labels {' and '.join(map(shown_excerpt, names))} differ by {by} alone")
    found.examples[:] = [
        replace(example, choices=classes) if _needs_classes(example) else example
        for example in found.examples
        if 1 < len(classes) <= MAX_CHOICES or not _needs_classes(example)
    ]
    return classes


def without_copies(found: Examples, *, question: str | None) -> None:
    """Merge examples of a table with the same picture and question.

    Several captions become one example with several right answers. Examples with the same answer become one. Different
    answers are an error; in conversations, they stay. `question` is the question for examples that have none.
    """
    kept: dict[object, Example] = {}
    for example in found.examples:
        key = (example.item.source, *what_is_asked(example, question=question), example.has_turns and example.answers)
        earlier = kept.setdefault(key, example)
        if earlier is example:
            continue
        if example.task == "caption":
            kept[key] = replace(earlier, answers=tuple(dict.fromkeys(earlier.answers + example.answers)))
        elif contradict(earlier, example):
            what = "label" if example.task == "choice" else "answer"
            of = "question" if example.item.source is None else "picture and question"
            found.refuse(example.place, f"line {earlier.line} has another {what} for the same {of}")
    found.examples[:] = kept.values()


def what_is_asked(example: Example, *, question: str | None) -> tuple[object, ...]:
    """A key that is equal for examples that ask the same; `question` is the question for examples that have none."""
    asked = example.question
    instruction = question if asked.instruction is None else asked.instruction
    columns = frozenset(example.item.columns.items()) if "{" in f"{instruction} {asked.input}" else frozenset()
    return instruction, asked.input, columns, example.part, example.task


def contradict(one: Example, other: Example) -> bool:
    """Whether two examples that ask the same have no right answer in common. Captions never contradict each other."""
    return one.task != "caption" and set(one.answers).isdisjoint(other.answers)


def _too_many(number: int, *, what: str) -> str:
    return (
        f"it has {number:,} {what}, and an answer is compared with at most {MAX_CHOICES:,}; a column `answer` without "
        "choices has answers that the model generates"
    )


def _needs_classes(example: Example) -> bool:
    return example.task == "choice" and example.choices is None


def _picture(row: Mapping[str, object], *, root: str, place: str) -> PictureInput:
    item = row_picture(row, root=root, place=place)
    if item is None:
        return PictureInput(source=None, label=place, found_in=(place,))
    if isinstance(item.source, str) and ADDRESS.match(item.source):
        raise ValueError(f"its picture {shown_excerpt(item.source)} is an address; wanted a file")
    return item


def _like_pictures(row: Mapping[str, object]) -> list[str]:
    """Names of other columns than `PICTURE_COLUMNS` that seem to name a picture."""
    others = {name: one for name, one in row.items() if not (one == [] or isinstance(one, bool) or name in _READ)}
    return [name for name, one in others.items() if not _is_blank(one) and _is_like_a_picture(one, name=name)]


def _is_like_a_picture(value: object, *, name: str) -> bool:
    """Whether a value is the name of a picture, an object with the bytes and path of one, or a list that begins so.

    Of columns that are called as those of pictures, any text or object is one, and numbers are if they are an `id`.
    """
    if _LIKE_PICTURES.fullmatch(name) and (not isinstance(value, int | float) or name.lower().endswith("id")):
        return True
    is_list = _LIKE_LISTS.fullmatch(name)
    if isinstance(value, list):  # a list of names may be of tags or other files
        value = value[0] if is_list or not isinstance(value[0], str) else None
    if isinstance(value, dict) and (is_list or value.keys() >= {"bytes", "path"}):
        value = value.get("bytes") or value.get("path")
        return begins_like(value) is not None if isinstance(value, bytes) else has_picture_suffix(str(value))
    return has_picture_suffix(str(value))


def _example(
    row: Mapping[str, object], *, item: PictureInput, columns: Columns, place: str, line: int
) -> Example | None:
    """The example of a row; None if it has no answer. Raises ValueError with the reason for a malformed row."""
    row = {name: value for name, value in row.items() if not _is_blank(value)} | {
        name: "" for name in ANSWER_COLUMNS if name in row and _is_blank(row[name])
    }
    question = question_fields(row if columns.choices is None else {**row, "choices": None}) or QuestionFields()
    column = first_column(row, of=ANSWER_COLUMNS)
    answers = () if column is None else _texts(row[column], name=column)
    if column is None or not answers:
        return None
    choices = question.choices if columns.choices is None else columns.choices
    if choices is not None:
        if len(choices) > MAX_CHOICES:
            raise ValueError(_too_many(len(choices), what="choices"))
        answers = _among(choices, answers, shown=f"{column.removesuffix('s')} {shown_excerpt(repr(row[column]))}")
    spoken_for = {*question_columns(row), *ANSWER_COLUMNS, *PICTURE_COLUMNS, _PART, _SPLIT}
    own = as_columns(row, without=spoken_for)
    if item.source is None and question.instruction is None and question.input is None:
        raise ValueError("it has neither a picture nor a question")
    return Example(
        item=replace(item, columns={**item.columns, **own}),
        question=replace(question, choices=None),
        task=_task(column, choices=choices, question=question),
        answers=answers,
        choices=choices,
        part=str(row.get(_PART, "")).strip(),
        split=split_name(str(row.get(_SPLIT, columns.split))),
        place=place,
        line=line,
    )


def _task(column: str, *, choices: Sequence[str] | None, question: QuestionFields) -> Task:
    if choices is not None or column in CLASS_COLUMNS:
        return "choice"
    return "caption" if column in CAPTION_COLUMNS and question.instruction is None else "answer"


def _texts(value: object, *, name: str) -> tuple[str, ...]:
    """The texts of a cell, without blank ones; of objects, as in VQA, their `answer`. Frequent `answers` come first.

    Raises ValueError for values that are no texts, numbers or dates, and for a list in a cell that is not JSON.
    """
    texts = []
    cell = value.strip() if name in _LISTS and isinstance(value, str) else ""
    if cell.startswith(('["', "['")):
        try:
            value = split_choices(cell)
        except ValueError:
            if cell.endswith(('"]', "']")) or "]" not in cell:  # `["STOP" sign] on a pole` is a text
                raise ValueError(f"its cell `{name}` begins like a JSON list, but is not valid JSON") from None
    for one in value if isinstance(value, list) else [value]:
        one = one.get("answer", one) if isinstance(one, dict) else one
        if isinstance(one, list | dict | bytes):
            raise ValueError(f"its {name} is not text")
        text = one if isinstance(one, str) else as_text(one)
        if not is_encodable(text):
            raise ValueError(f"its {name} is not UTF-8")
        texts.append(text.strip())
    numbers = Counter(texts if name == "answers" else ())
    return tuple(sorted(filter(None, texts), key=lambda text: -numbers[text]))


def _among(choices: Sequence[str], answers: tuple[str, ...], *, shown: str) -> tuple[str, ...]:
    """The answers in the spelling of the choices. Raises ValueError if an answer is not a choice."""
    known = [_folded(choice.strip()) for choice in choices]
    if not all(_folded(answer) in known for answer in answers):
        raise ValueError(f"its {shown} is none of {shown_excerpt(', '.join(choices))}")
    return tuple(answer if answer in choices else choices[known.index(_folded(answer))] for answer in answers)


def _folded(text: str) -> str:
    """Equal for texts that differ by case alone, or by the encoding of accents: macOS writes names in another one."""
    return unicodedata.normalize("NFC", text).casefold()


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
