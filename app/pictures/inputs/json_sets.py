"""JSON in the layouts of known sets, recognised by their keys: captions of COCO, Karpathy's splits, VQA, and captions
by the name of the picture.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llama_adapter.app.pictures.inputs.fields import KNOWN_COLUMNS, PICTURE_COLUMNS, by_known_name, spelt_path
from llama_adapter.app.pictures.inputs.folders import has_picture_suffix

Values = dict[str, Any]
_FOLDERS = ("train2014", "val2014", "train2017", "val2017", "images", "")  # of COCO's pictures


def set_rows(data: Any, *, folder: str) -> Sequence[object] | None:
    """The rows of a JSON file in this folder; None if it is neither an object nor a list of objects. Texts are prompts.

    Captions of COCO have `images` and `annotations` with a `caption`. Karpathy's files have `images` with `sentences`.
    VQA has `questions` with an `image_id`. Rows may be the values of an object, or the only list of rows in it. An
    object whose keys are names of pictures has a caption, a list of captions or an object of fields for each; with the
    fields `caption` or `tags` (kohya's metadata), names may lack a suffix. Any other object is one row.
    """
    match data:
        case list():
            rows = [{"prompt": one} if isinstance(one, str) else one for one in data]
            return rows if not rows or any(isinstance(one, dict) for one in rows) else None
        case {"images": list() as images} if _have(images, "sentences"):
            return [_karpathy_row(one, folder=folder) if isinstance(one, dict) else one for one in images]
        case {"images": list() as images, "annotations": list() as captions} if _have(captions, "caption"):
            return list(coco_rows(_objects(images), _objects(captions), folders=(folder,)))
        case {"questions": list() as questions} if _have(questions, "question", "image_id"):
            answers = data.get("annotations")
            annotations = _objects(answers) if isinstance(answers, list) else []
            kind = str(data.get("data_subtype", ""))
            return list(vqa_rows(_objects(questions), annotations, kind=kind, folders=(folder,)))
        case dict() if not _are_names(data, folder=folder) and (inside := _rows_inside(data)):
            return inside
        case dict() if data and (all(map(has_picture_suffix, data)) or all(map(_is_captioned, data.values()))):
            return [_named_row(name, value, folder=folder) for name, value in data.items()]
        case dict():
            return [data]
    return None


def _rows_inside(data: Values) -> Sequence[object]:
    """The values of an object, or the only list in it, if they are objects with a picture and more; else nothing."""
    if all(map(_has_picture, data.values())):
        return list(data.values())
    lists = {name for name, value in data.items() if isinstance(value, list) and any(map(_has_picture, value))}
    is_row = not KNOWN_COLUMNS.isdisjoint(by_known_name(data, KNOWN_COLUMNS).keys() - lists)
    return () if is_row or len(lists) != 1 else list(data[lists.pop()])


def _has_picture(value: object) -> bool:
    return isinstance(value, dict) and len(value) > 1 and any(name.lower() in PICTURE_COLUMNS for name in value)


def _have(values: Sequence[object], *names: str) -> bool:
    """Whether one of the objects has all these fields."""
    return any(isinstance(one, dict) and one.keys() >= {*names} for one in values)


def find_picture(name: str, *below: str, folders: Iterable[str]) -> str:
    """The path of the file `name` in a sub-folder `below` of one of the folders; the first possible path if none is."""
    places = (os.path.normpath(spelt_path(os.path.join(sub, name), root=folder)) for folder in folders for sub in below)
    first = next(places)
    return first if os.path.isfile(first) else next(filter(os.path.isfile, places), first)


def coco_rows(
    images: Iterable[Values], annotations: Iterable[Values], *, folders: Sequence[str], below: Sequence[str] = _FOLDERS
) -> Iterator[Values]:
    """A row with all captions for each picture. Paths are relative to the first of `folders`."""
    captions = defaultdict[str, list[object]](list)
    for one in annotations:
        captions[str(one.get("image_id"))].append(one.get("caption"))
    for image in images:
        picture = _relative(str(image.get("file_name")), *below, folders=folders)
        yield {"picture": picture, "captions": captions.pop(str(image.get("id")), [])}
    yield from ({"id": name, "captions": texts} for name, texts in captions.items())  # of no picture of the file


def vqa_rows(
    questions: Iterable[Values], annotations: Iterable[Values], *, kind: str, folders: Sequence[str]
) -> Iterator[Values]:
    """A row for each question, with its answers; the most frequent comes first. `kind` is the set, such as val2014."""
    annotated = {str(one.get("question_id")): one for one in annotations}
    for entry in questions:
        annotation = annotated.get(str(entry.get("question_id")), {})
        found = annotation.get("answers")
        given = [one.get("answer") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        # Training learns the first: of equally frequent ones, that of the set. VQA's score counts repeated answers.
        given.sort(key=lambda answer: answer != annotation.get("multiple_choice_answer"))
        picture = entry.get("image_id")
        picture = f"COCO_{kind}_{picture:012d}.jpg" if isinstance(picture, int) else str(picture)
        values = {"picture": _relative(picture, kind, "images", "", folders=folders), "question": entry.get("question")}
        yield {**values, "answers": given, "part": annotation.get("answer_type")} if given else values


def _karpathy_row(image: Values, *, folder: str) -> Values:
    name, place = str(image.get("filename")), str(image.get("filepath", ""))
    sentences = image.get("sentences")
    texts = [one.get("raw") for one in sentences if isinstance(one, dict)] if isinstance(sentences, list) else []
    picture = _relative(name, place, *_FOLDERS, folders=(folder, os.path.join(folder, os.pardir)))
    return {"picture": picture, "captions": texts, "split": image.get("split")}


def _named_row(name: str, value: object, *, folder: str) -> Values:
    picture = _relative(name, "", "images", folders=(folder,))
    if isinstance(value, Mapping):
        return {"picture": picture, **({"caption": value["tags"]} if "tags" in value else {}), **value}
    return {"picture": picture, "captions" if isinstance(value, list) else "caption": value}


def _are_names(data: Values, *, folder: str) -> bool:
    """Whether keys name pictures: with a suffix, or, of objects with a caption, the first without that of its file."""
    has_captions = bool(data) and all(map(_is_captioned, data.values()))
    return any(map(has_picture_suffix, data)) or (
        has_captions and os.path.isfile(spelt_path(next(iter(data)), root=folder))
    )


def _is_captioned(value: object) -> bool:
    return isinstance(value, Mapping) and ("caption" in value or "tags" in value)


def _relative(name: str, *below: str, folders: Sequence[str]) -> str:
    if os.path.isabs(name):
        return name
    return os.path.relpath(find_picture(name, *below, folders=folders), folders[0] or os.curdir)


def _objects(values: Iterable[object]) -> list[Values]:
    return [one for one in values if isinstance(one, dict)]
