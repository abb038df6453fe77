"""Reads known data sets in their published layout: POPE, MME, VQA (v1, v2 and OK-VQA), captions of COCO, and ScienceQA.

Field and file names come from the documentation of the sets. Each set is turned into rows like those of tables.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llama_adapter.app.learning.labelled.example import Examples
from llama_adapter.app.learning.labelled.pictures import sub_folders
from llama_adapter.app.learning.labelled.rows import Columns, add_row
from llama_adapter.app.learning.scores.scoring import MME_COGNITION, MME_PERCEPTION
from llama_adapter.app.pictures.inputs import InputsError, natural_key
from llama_adapter.app.pictures.inputs.folders import folder_inputs
from llama_adapter.app.pictures.inputs.json_sets import coco_rows, find_picture, vqa_rows
from llama_adapter.app.pictures.inputs.lines import opened_lines, unreadable
from llama_adapter.app.pictures.inputs.tables import load_json
from llama_adapter.runtime.text import shown_name

_MME_CATEGORIES = frozenset(name.lower() for name in (*MME_PERCEPTION, *MME_COGNITION))


class _Row(NamedTuple):
    place: str
    values: dict[str, Any]
    line: int = 0


def known_examples(path: str, *, columns: Columns) -> Examples | None:
    """The examples of a known set, given as its folder or one of its files; None if `path` is no known set.

    Malformed entries are problems. Raises InputsError if a file is unusable or a folder has several sets.
    """
    if os.path.isdir(path):
        texts = list(_mme(path)) if _MME_CATEGORIES & {name.lower() for name in sub_folders(path)} else []
        if any(row.values["question"] for row in texts):  # captions beside pictures have no tab
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
        near = os.path.dirname(file)
        folders = (near, os.path.join(near, os.pardir)) if columns.picture_folder is None else (columns.picture_folder,)
        rows = known.rows(str(file), match, folders)
        examples.extend(_examples(rows, columns=columns))
    return examples


def _files(folder: str) -> list[Path]:
    """The JSON files in a folder and in its sub-folders, in natural order."""
    found = (path for pattern in ("*.json", "*.jsonl", "*/*.json", "*/*.jsonl") for path in Path(folder).glob(pattern))
    return sorted(found, key=lambda path: natural_key(str(path)))


def _examples(rows: Iterable[_Row], *, columns: Columns) -> Examples:
    found = Examples()
    for row in rows:
        add_row(found, row.values, columns=columns, place=row.place, line=row.line)
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


def _pope(file: str, match: re.Match[str], folders: Sequence[str]) -> Iterator[_Row]:
    """POPE: one object per line, with image, text (the question) and label."""
    source, kind = match.groups()
    for line, entry in enumerate(_entries(file, of="POPE"), start=1):
        values = {
            "picture": find_picture(str(entry.get("image")), "val2014", "images", "", folders=folders),
            "question": entry.get("text"),
            "answer": entry.get("label"),
            "choices": ["yes", "no"],
            "part": kind if source in (None, "coco") else f"{source} {kind}",
        }
        yield _Row(f"{file}, line {line}", values, line)


def _vqa(file: str, match: re.Match[str], folders: Sequence[str]) -> Iterator[_Row]:
    """VQA: `questions` in one file, `annotations` with ten answers each in another, linked by `question_id`."""
    version, split, year = match.groups()
    name = f"{version}mscoco_{split}{year}_annotations.json"
    near = Path(file).parent
    others = [near / name, *sorted(near.parent.glob(f"*/{name}"))]
    annotated = next(filter(Path.is_file, others), others[0])
    answers = _entries(str(annotated), of="VQA", under="annotations")
    questions = _entries(file, of="VQA", under="questions")
    rows = vqa_rows(questions, answers, kind=f"{split}{year}", folders=folders)
    return _numbered(rows, file, "question", folders=folders, split=split)


def _coco_captions(file: str, match: re.Match[str], folders: Sequence[str]) -> Iterator[_Row]:
    """COCO captions: `images` with `file_name`, and `annotations` with a `caption` for the picture `image_id`."""
    split, year = match.groups()
    images, annotations = (_entries(file, of="captions of COCO", under=name) for name in ("images", "annotations"))
    rows = coco_rows(images, annotations, folders=folders, below=(f"{split}{year}", "images", ""))
    return _numbered(rows, file, "picture", folders=folders, split=split)


def _numbered(
    rows: Iterable[dict[str, Any]], file: str, kind: str, *, folders: Sequence[str], split: str
) -> Iterator[_Row]:
    for number, values in enumerate(rows, start=1):
        if "picture" in values:
            values["picture"] = os.path.normpath(os.path.join(folders[0], values["picture"]))
        yield _Row(f"{file}, {kind} {number}", {**values, "split": split})


def _science(file: str, match: re.Match[str], folders: Sequence[str]) -> Iterator[_Row]:
    """ScienceQA: an object of problems by number. Each has question, choices, answer (an index), hint, image, split."""
    problems = _loaded(file, of="ScienceQA")
    if not isinstance(problems, dict) or not all(isinstance(entry, dict) for entry in problems.values()):
        hint = "rename the file if it is a table of your own"
        raise InputsError(f"Wanted the problems of ScienceQA by number, got `{shown_name(file)}`.", hint=hint)
    for number, entry in problems.items():
        choices, answer, image, split = (entry.get(name) for name in ("choices", "answer", "image", "split"))
        below = (f"images/{split}/{number}", f"{split}/{number}", "images", "")
        is_named = isinstance(choices, list) and isinstance(answer, int) and 0 <= answer < len(choices)
        values = {
            "picture": find_picture(str(image), *below, folders=folders) if image else None,
            "question": entry.get("question"),
            "input": entry.get("hint"),
            "choices": choices,
            "answer": choices[answer] if is_named else None,
            "part": entry.get("subject"),
            "split": split,
        }
        yield _Row(f"{file}, problem {number}", values)


def _loaded(file: str, *, of: str) -> object:
    """The value in a JSON file. Raises InputsError."""
    what = f"file of {of}"
    try:
        with opened_lines(file, what=what) as opened:
            return load_json(b"".join(iter(opened.read1, b"")), path=file, what=what)
    except OSError as error:
        raise unreadable(file, what=what, reason=f"the system says: {error.strerror}") from None


def _entries(file: str, *, of: str, under: str | None = None) -> list[dict[str, Any]]:
    """The objects of a JSON file, which are a list, or the list `under` a name. Raises InputsError."""
    found = _loaded(file, of=of)
    if under is not None:
        found, of = found.get(under) if isinstance(found, dict) else None, f"{of} with a list `{under}`"
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise InputsError(f"Wanted a file of {of}, got `{shown_name(file)}`.", hint="copy it again")
    return found


class _KnownSet(NamedTuple):
    name: str
    file: re.Pattern[str]
    rows: Callable[[str, re.Match[str], Sequence[str]], Iterator[_Row]]


_SETS = (
    _KnownSet("POPE", re.compile(r"(?:([a-z]+)_)?pope_(random|popular|adversarial)\.jsonl?"), _pope),
    _KnownSet("VQAv2", re.compile(r"(v2_)OpenEnded_mscoco_(train|val)(\d{4})_questions\.json"), _vqa),
    _KnownSet("OK-VQA or VQA v1", re.compile(r"()OpenEnded_mscoco_(train|val)(\d{4})_questions\.json"), _vqa),
    _KnownSet("captions of COCO", re.compile(r"captions_(train|val)(\d{4})\.json"), _coco_captions),
    _KnownSet("ScienceQA", re.compile(r"problems\.json"), _science),
)
