"""Reads labelled pictures without a table: one folder for each class, and archives of samples."""

import os
import re
from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import replace

from llama_adapter.app.learning.labelled.example import Examples
from llama_adapter.app.learning.labelled.rows import SPLITS, WANTED, Columns, add_row, similar_split, split_name
from llama_adapter.app.pictures.inputs import InputsError, PictureInput, folders, natural_key
from llama_adapter.app.pictures.inputs.archives import MAX_TEXT_BYTES, archive_inputs, is_archive_name, text_values
from llama_adapter.app.pictures.inputs.items import LeftOut
from llama_adapter.app.pictures.inputs.xmp import MAX_BYTES as MAX_XMP_BYTES
from llama_adapter.app.pictures.inputs.xmp import description_of
from llama_adapter.runtime.text import shown_name

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.tsv", "metadata.json", "metadata.parquet")
TEXT_SUFFIXES = (".txt", ".caption", ".json", ".xmp")  # of texts beside pictures; the first counts
MAX_COMPRESSED_BYTES = 2**30
_CAPTIONS = ("txt", "caption")  # members whose lines are captions
_REPEATS = re.compile(r"[0-9]+_")  # of kohya's trainers: 10_name
SAME_NAME = "the archive has two pictures of this name, which a table could not tell apart"


def sub_folders(folder: str) -> list[str]:
    """Names of the sub-folders in natural order, without hidden folders and folders of results. Raises OSError."""
    with os.scandir(folder) as listing:
        names = [entry.name for entry in listing if folders.is_folder(entry) and not entry.name.startswith(".")]
    names = [name for name in names if not folders.is_thumbnail_folder(name)]
    return sorted((name for name in names if not _has_results(os.path.join(folder, name))), key=natural_key)


def _has_results(folder: str) -> bool:
    """Whether `train` or `eval` wrote the folder, which may be next to the folders of classes."""
    is_run = folder.endswith(".training") and os.path.isfile(os.path.join(folder, "data.json"))
    return is_run or os.path.isfile(os.path.join(folder, "outcomes.jsonl"))


def split_folders(folder: str) -> list[tuple[str, str]]:
    """The sub-folders with their splits, if all are named after a split, such as `train`; otherwise `folder` itself.

    Raises InputsError if only some are named after a split and these have folders, tables or archives inside: then the
    others are no classes. A folder with tables or archives of its own may have any sub-folders.
    """
    names = sub_folders(folder)
    others = [name for name in names if split_name(name) not in SPLITS]
    if names and not others:
        return [(os.path.join(folder, name), split_name(name)) for name in names]
    places = [os.path.join(folder, name) for name in names if name not in others]
    split = next((place for place in places if sub_folders(place) or _has_tables(place)), None)
    if split is not None and not _has_tables(folder):
        meant = next(filter(None, map(similar_split, others)), None)
        raise InputsError(
            f"Wanted only folders of splits beside `{shown_name(split)}`, got "
            f"`{shown_name(others[0])}`" + (f" and {len(others) - 1:,} more" if len(others) > 1 else ""),
            hint=("" if meant is None else f"did you mean {meant}? ")
            + "name folders of splits train, val or test, and move others elsewhere",
        )
    return [(folder, "")]


def _has_tables(folder: str) -> bool:
    """Whether a folder has tables of pictures or archives."""
    return any(name in METADATA or is_archive_name(name) for name in os.listdir(folder))


def class_examples(folder: str, *, columns: Columns) -> Examples:
    """The pictures in the sub-folders of a folder, or of its folders of splits. Names of sub-folders are the classes.

    The examples have no question. A class without pictures, and pictures outside of the classes' folders, are errors.
    """
    found, places = Examples(), split_folders(folder)
    for item in folders.folder_inputs(folder, recursive=False) if places != [(folder, "")] else ():
        if item.source != folder:
            found.left_out.add("pictures beside the folders of splits", item.label)
    for place, split in places:
        own = columns.of_split(split)
        for name in sub_folders(place):
            inside = os.path.join(place, name)
            items = list(folders.folder_inputs(inside, recursive=True))
            if items[0].source == inside:
                found.refuse(inside, "the folder of this class has no pictures")
                continue
            for item in items:
                if not add_row(found, {"label": name}, columns=own, place=item.label, item=item, told_at=inside):
                    break
        num_outside = sum(item.source != place for item in folders.folder_inputs(place, recursive=False))
        if num_outside:
            found.refuse(place, f"pictures outside of the folders of classes: {num_outside:,}")
    return found


def _has_answer(values: dict[str, object] | ValueError, *, broken: bool) -> bool:
    """Whether the values of a text beside a picture have an answer; `broken` for one that cannot be read."""
    if isinstance(values, ValueError):
        return broken
    return any(values.values()) and not {name.lower() for name in values}.isdisjoint(WANTED)


def beside_examples(folder: str, *, columns: Columns) -> Examples | None:
    """The pictures in a folder and below, each with the text of the same name beside it; None if none has one.

    Each line of a `.txt` or `.caption` is a caption; a `.json` is an object with the columns of a row; an `.xmp` has a
    description. The text of `a.png` is called `a.txt` or `a.png.txt`. Pictures without text and texts without picture
    are left out. A `.json` counts if it has a column of answers, and an `.xmp` if it has a description; other programs
    keep other values there. Raises OSError.
    """
    found, split_of, has_texts, unpaired = Examples(), dict(split_folders(folder)), False, list[str]()
    if names := [name for name in sub_folders(folder) if split_name(name) not in SPLITS]:
        found.warn(folder, f"texts beside the pictures are the answers; names of folders, such as {names[0]}, are not")
    for place, groups in _groups(folder, seen=set(), left_out=found.left_out):
        if _REPEATS.match(os.path.basename(place)):
            found.left_out.add("repeats in names of folders", place)
        split = next((split for path, split in split_of.items() if place == path or place.startswith(f"{path}/")), "")
        own = columns.of_split(split)
        for picture, texts in groups:
            paths = [os.path.join(place, name) for name in texts]
            if not picture:
                unpaired += paths
                continue
            values_of = {path: _beside(path) for path in paths}
            answered = [path for path in paths if _has_answer(values_of[path], broken=True)]
            has_texts |= any(_has_answer(values_of[path], broken=_priority(path) < len(_CAPTIONS)) for path in paths)
            for kind, some in (
                ("pictures without text", () if answered else (os.path.join(place, picture),)),
                ("texts without an answer", (path for path in paths if path not in answered)),
                ("second texts of a name", answered[1:]),
            ):
                for path in some:
                    found.left_out.add(kind, path)
            if not answered:
                continue
            item, path = folders.file_input(os.path.join(place, picture), root=folder), answered[0]
            values = values_of[path]
            if isinstance(values, ValueError):
                found.refuse(path, str(values))
                continue
            add_row(found, values, columns=own, place=path, item=item, unanswered="texts without an answer")
    if not has_texts:
        return None
    for path in unpaired:  # only now: a folder of classes may have any texts, also unreadable ones
        if _has_answer(_beside(path), broken=True):
            found.left_out.add("texts without picture", path)
    return found


def _groups(folder: str, *, seen: set[str], left_out: LeftOut) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """Each folder that was not `seen`, with its pictures and the texts of each; "" for texts without picture."""
    seen.add(os.path.realpath(folder))
    pictures, texts = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    with os.scandir(folder) as listing:
        for name in sorted((entry.name for entry in listing if entry.is_file()), key=natural_key):
            stem, suffix = os.path.splitext(name)
            if name.startswith(".") or name in METADATA:
                continue
            if folders.has_picture_suffix(name):
                pictures[stem].append(name)
            elif suffix.lower() in TEXT_SUFFIXES:
                texts[stem].append(name)
    groups = []
    for stem, names in pictures.items():
        own = {name: texts.pop(name, []) if name not in pictures else [] for name in names}  # a.png.txt
        for text in texts.pop(stem, []):  # for the first picture that has no other text of this kind
            kinds = {name: {_priority(other) for other in own[name]} for name in names}
            own[next((name for name in names if _priority(text) not in kinds[name]), names[0])].append(text)
        groups += [(name, sorted(files, key=_priority)) for name, files in own.items()]
    groups += [("", names) for names in texts.values()]
    yield folder, sorted(groups, key=lambda group: natural_key(group[0] or group[1][0]))
    for path in (os.path.join(folder, name) for name in sub_folders(folder)):
        if os.path.realpath(path) in seen:
            left_out.add("folders that are linked twice", path)
        else:
            yield from _groups(path, seen=seen, left_out=left_out)


def _priority(name: str) -> int:
    return TEXT_SUFFIXES.index(os.path.splitext(name)[1].lower())


def _beside(path: str) -> dict[str, object] | ValueError:
    """The columns of a text beside a picture; a ValueError says why there are none."""
    suffix = os.path.splitext(path)[1].lower()
    most = MAX_XMP_BYTES if suffix == ".xmp" else MAX_TEXT_BYTES
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        return ValueError(f"it has more than {most:,} bytes")
    try:
        if suffix == ".xmp":
            return {"caption": description_of(data)}
        values = text_values(data, suffix=suffix[1:])
    except ValueError as error:
        return error
    return values if suffix == ".json" else {"captions": str(values[suffix[1:]]).splitlines()}


def archive_examples(path: str, *, columns: Columns) -> Examples:
    """The samples of a tar archive in the style of webdataset, see `archive_inputs`.

    The answer is a field of the sample's `.json`, or the text of `.cls`; each line of `.txt` and `.caption` is a
    caption. Lists in `.json` are ignored. A sample without an answer is left out. Raises the errors of `pictures_in`,
    and InputsError for samples whose texts have other names than their pictures.
    """
    found, seen = Examples(), set[str]()
    pictures = pictures_in(path, found, fields=columns.fields, seen=seen).values()
    for item in filter(None, pictures):
        if item.error is not None:
            found.refuse(item.label, item.error.message)
            continue
        values = {name: value.splitlines() if name in _CAPTIONS else value for name, value in item.columns.items()}
        item = replace(item, columns={})
        add_row(found, values, columns=columns, place=item.label, item=item, unanswered="pictures without text")
    if not found.examples and None not in pictures and any("." in name for name in seen):
        raise InputsError(
            f"Wanted samples of a picture and a text of the same name in `{shown_name(path)}`, got samples with the "
            f"fields {', '.join(map(shown_name, sorted(seen)))}.",
            hint="choose the fields of picture and text with --sample-fields PICTURE,TEXT, such as input,outputs",
        )
    return found


def pictures_in(
    archive: str,
    found: Examples,
    *,
    wanted: Container[str] | None = None,
    fields: tuple[str, ...] | None = None,
    seen: set[str] | None = None,
) -> dict[str, PictureInput | None]:
    """The pictures of an archive by label, or only those `wanted`. A label that two of them have is None.

    Such labels, and a damaged archive, are errors in `found`. If all pictures are wanted, `found` also counts what is
    left out. `seen`, an empty set, gets the names of fields. Pictures of a compressed archive are held in memory:
    raises InputsError if they have more than 1 GiB.
    """
    pictures, num_bytes = dict[str, PictureInput | None](), 0

    def takes(label: str) -> bool:
        return bool(label) if wanted is None else label in wanted

    left_out = found.left_out if wanted is None else None
    for item in archive_inputs(archive, fields=fields, left_out=left_out, seen=seen):
        if item.label == archive and item.error is not None:
            found.refuse(archive, item.error.message)
        elif takes(item.repeats):
            pictures[item.repeats] = None
        elif takes(item.label):
            pictures[item.label] = item
            num_bytes += len(item.source) if isinstance(item.source, bytes) else 0
            if num_bytes > MAX_COMPRESSED_BYTES:
                raise InputsError(
                    f"Wanted at most {MAX_COMPRESSED_BYTES:,} bytes of pictures in the compressed archive "
                    f"`{shown_name(archive)}`, which has more.",
                    hint="decompress it: pictures of a plain .tar are not held in memory",
                )
    for label in sorted((label for label, item in pictures.items() if item is None), key=natural_key):
        found.refuse(label, SAME_NAME)
    return pictures
