"""Reads known data sets in their published layout: POPE, MME, VQAv2, captions of COCO, and ScienceQA.

Field and file names come from the documentation of the sets. Each set is turned into rows like those of tables.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llama_adapter.app.inputs import InputsError, natural_key
from llama_adapter.app.inputs.folders import folder_inputs
from llama_adapter.app.labelled.example import Examples
from llama_adapter.app.labelled.pictures import sub_folders
from llama_adapter.app.labelled.rows import Columns, row_examples
from llama_adapter.app.labelled.tables import json_objects, load_json
from llama_adapter.runtime.text import shown_name

_MME_CATEGORIES = frozenset(
    (
        *("existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "ocr"),
        *("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning"),
    )
)


class _Row(NamedTuple):
    place: str
    values: dict[str, Any]
    line: int = 0


class _Pictures:
    """Finds the pictures of a set in the folders where they are usually stored."""

    def __init__(self, file: Path, *, given: str | None) -> None:
        near = str(file.parent)
        self._folders = [near, os.path.join(near, os.pardir)] if given is None else [given]

    def path(self, name: str, *below: str) -> str:
        """The path of the file `name` in a sub-folder of `below`, in `images`, or directly in the folder.

        If the file does not exist, the first of these paths.
        """
        places = [os.path.join(folder, sub, name) for folder in self._folders for sub in (*below, "images", "")]
        return next(filter(os.path.isfile, map(os.path.normpath, places)), os.path.normpath(places[0]))


def known_examples(path: str, *, columns: Columns, pictures: str | None) -> Examples | None:
    """The examples of a known set, given as its folder or one of its files; None if `path` is no known set.

    Malformed entries are problems. Raises InputsError if a file is unusable or a folder has several sets.
    """
    if os.path.isdir(path):
        if _MME_CATEGORIES & {name.lower() for name in sub_folders(path)} and (texts := list(_mme(path))):
            return _examples(texts, columns=columns)
        files = _files(path)
    else:
        files = [Path(path)]
    matches = [(known, file, found) for file in files for known in _SETS if (found := known.file.fullmatch(file.name))]
    sets = sorted({known.name for known, _, _ in matches})
    if not sets:
        return None
    if len(sets) > 1:
        raise InputsError(
            f"Wanted one set of labelled pictures, but `{shown_name(path)}` holds {' and '.join(sets)}.",
            hint=f"name one of their files, such as {shown_name(matches[0][1])}",
        )
    examples = Examples()
    for known, file, match in matches:
        rows = known.rows(str(file), match, _Pictures(file, given=pictures))
        examples.extend(_examples(rows, columns=columns))
    return examples


def _files(folder: str) -> list[Path]:
    """The JSON files in a folder and in its sub-folders, in natural order."""
    found = (path for pattern in ("*.json", "*.jsonl", "*/*.json", "*/*.jsonl") for path in Path(folder).glob(pattern))
    return sorted(found, key=lambda path: natural_key(str(path)))


def _examples(rows: Iterable[_Row], *, columns: Columns) -> Examples:
    found = Examples()
    own = Columns(choices=columns.choices, question=columns.question)
    for row in rows:
        try:
            found.examples += row_examples(row.values, columns=own, place=row.place, line=row.line)
        except ValueError as error:
            found.refuse(row.place, str(error))
    return found


def _mme(folder: str) -> Iterator[_Row]:
    """MME: a text file for each picture, next to it or in `questions_answers_YN`. Each line has question and answer."""
    for category in sub_folders(folder):
        place = os.path.join(folder, category)
        texts = os.path.join(place, "questions_answers_YN")
        texts = texts if os.path.isdir(texts) else place
        pictures = os.path.join(place, "images")
        for item in folder_inputs(pictures if os.path.isdir(pictures) else place, recursive=False):
            file = Path(texts, Path(item.label).stem + ".txt")
            if not file.is_file():
                continue
            for line, text in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                question, _, answer = text.rpartition("\t")
                values = {"picture": item.label, "question": question, "answer": answer, "part": category}
                if text.strip():
                    yield _Row(f"{file}, line {line}", {**values, "choices": ["Yes", "No"]}, line)


def _pope(file: str, match: re.Match[str], pictures: "_Pictures") -> Iterator[_Row]:
    """POPE: one object per line, with image, text (the question) and label."""
    source, kind = match.groups()
    for line, entry in json_objects(file, what="file of POPE"):
        values = {
            "picture": pictures.path(str(entry.get("image")), "val2014"),
            "question": entry.get("text"),
            "answer": entry.get("label"),
            "choices": ["yes", "no"],
            "part": kind if source in (None, "coco") else f"{source} {kind}",
        }
        yield _Row(f"{file}, line {line}", values, line)


def _vqa(file: str, match: re.Match[str], pictures: "_Pictures") -> Iterator[_Row]:
    """VQAv2: `questions` in one file, `annotations` with ten answers each in another, linked by `question_id`."""
    split, year = match.groups()
    name = f"v2_mscoco_{split}{year}_annotations.json"
    near = Path(file).parent
    others = [near / name, *sorted(near.parent.glob(f"*/{name}"))]
    annotated = next(filter(Path.is_file, others), others[0])
    answers = {str(entry.get("question_id")): entry for entry in _entries(str(annotated), "annotations", of="VQAv2")}
    for number, entry in enumerate(_entries(file, "questions", of="VQAv2"), start=1):
        annotation = answers.get(str(entry.get("question_id")), {})
        found = annotation.get("answers")
        given = [one.get("answer") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        # The most frequent answer comes first, because training learns it. VQA's score counts repeated answers.
        given.sort(key=lambda answer: answer != annotation.get("multiple_choice_answer"))
        picture = entry.get("image_id")
        picture = f"COCO_{split}{year}_{picture:012d}.jpg" if isinstance(picture, int) else str(picture)
        values = {
            "picture": pictures.path(picture, f"{split}{year}"),
            "question": entry.get("question"),
            "answers": given,
            "part": annotation.get("answer_type"),
            "split": split,
        }
        yield _Row(f"{file}, question {number}", values)


def _coco_captions(file: str, match: re.Match[str], pictures: "_Pictures") -> Iterator[_Row]:
    """COCO captions: `images` with `file_name`, and `annotations` with a `caption` for the picture `image_id`."""
    split, year = match.groups()
    captions: dict[str, list[object]] = {}
    for entry in _entries(file, "annotations", of="captions of COCO"):
        captions.setdefault(str(entry.get("image_id")), []).append(entry.get("caption"))
    for number, entry in enumerate(_entries(file, "images", of="captions of COCO"), start=1):
        values = {
            "picture": pictures.path(str(entry.get("file_name")), f"{split}{year}"),
            "captions": captions.get(str(entry.get("id")), []),
            "split": split,
        }
        yield _Row(f"{file}, picture {number}", values)


def _science(file: str, match: re.Match[str], pictures: "_Pictures") -> Iterator[_Row]:
    """ScienceQA: an object of problems by number. Each has question, choices, answer (an index), hint, image, split."""
    problems = load_json(file, what="file of ScienceQA")
    if not isinstance(problems, dict) or not all(isinstance(entry, dict) for entry in problems.values()):
        hint = "rename the file if it is a table of your own"
        raise InputsError(f"Wanted the problems of ScienceQA by number, got `{shown_name(file)}`.", hint=hint)
    for number, entry in problems.items():
        choices, answer, image, split = (entry.get(name) for name in ("choices", "answer", "image", "split"))
        values = {
            "picture": pictures.path(str(image), f"images/{split}/{number}", f"{split}/{number}") if image else None,
            "question": entry.get("question"),
            "input": entry.get("hint"),
            "choices": choices,
            "answer": _item(choices, answer),
            "part": entry.get("subject"),
            "split": split,
        }
        yield _Row(f"{file}, problem {number}", values)


def _item(values: object, index: object) -> object:
    """The item at `index` of a list; None if `values` is no list or has no such item."""
    if isinstance(values, list) and isinstance(index, int) and 0 <= index < len(values):
        return values[index]
    return None


def _entries(file: str, name: str, *, of: str) -> list[dict[str, Any]]:
    """The list `name` of a JSON file. Raises InputsError."""
    data = load_json(file, what=f"file of {of}")
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise InputsError(
            f"Wanted a file of {of} with a list `{name}`, got `{shown_name(file)}`.", hint="copy it again"
        )
    return found


class _KnownSet(NamedTuple):
    name: str
    file: re.Pattern[str]
    rows: Callable[[str, re.Match[str], _Pictures], Iterator[_Row]]


_SETS = (
    _KnownSet("POPE", re.compile(r"(?:([a-z]+)_)?pope_(random|popular|adversarial)\.jsonl?"), _pope),
    _KnownSet("VQAv2", re.compile(r"v2_OpenEnded_mscoco_(train|val)(\d{4})_questions\.json"), _vqa),
    _KnownSet("captions of COCO", re.compile(r"captions_(train|val)(\d{4})\.json"), _coco_captions),
    _KnownSet("ScienceQA", re.compile(r"problems\.json"), _science),
)
