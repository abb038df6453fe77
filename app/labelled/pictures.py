"""Reads labelled pictures without a table: one folder for each class, and archives of samples."""

import os
from dataclasses import replace

from llama_adapter.app.inputs import InputsError, natural_key
from llama_adapter.app.inputs.archives import archive_inputs, is_archive_name
from llama_adapter.app.inputs.folders import folder_inputs, is_folder
from llama_adapter.app.labelled.example import Examples
from llama_adapter.app.labelled.rows import Columns, is_split_name, row_examples, similar_split, split_name
from llama_adapter.runtime.text import shown_name

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.tsv")
MAX_COMPRESSED_BYTES = 2**30
SAME_NAME = "the archive has two pictures of this name, which a table could not tell apart"


def sub_folders(folder: str) -> list[str]:
    """Names of the sub-folders in natural order, without hidden folders and folders of results. Raises OSError."""
    with os.scandir(folder) as listing:
        names = [entry.name for entry in listing if is_folder(entry) and not entry.name.startswith(".")]
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
    others = [name for name in names if not is_split_name(name)]
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
    found = Examples()
    for place, split in split_folders(folder):
        for name in sub_folders(place):
            inside = os.path.join(place, name)
            items = list(folder_inputs(inside, recursive=True))
            if items[0].source == inside:
                found.refuse(inside, "the folder of this class has no pictures")
                continue
            for item in items:
                try:
                    found.examples += row_examples(
                        {"label": name}, columns=columns, place=item.label, item=item, split=split
                    )
                except ValueError as error:
                    found.refuse(inside, str(error))
                    break
        num_outside = sum(item.source != place for item in folder_inputs(place, recursive=False))
        if num_outside:
            found.refuse(place, f"pictures outside of the folders of classes: {num_outside:,}")
    return found


def archive_examples(path: str, *, columns: Columns, split: str = "") -> Examples:
    """The samples of a tar archive in the style of webdataset.

    The answer is a field of the sample's `.json`, or the text of `.txt`, `.caption` or `.cls`. Lists in `.json` are
    ignored. A sample without an answer, two pictures with the same name, and a damaged archive are errors. Pictures of
    a compressed archive are held in memory.

    Raises InputsError if a compressed archive has more than 1 GiB of pictures.
    """
    found, num_bytes = Examples(), 0
    repeated = set[str]()
    for item in archive_inputs(path):
        num_bytes += len(item.source) if isinstance(item.source, bytes) else 0
        require_compressed(num_bytes, archive=path)
        if item.repeats:
            repeated.add(item.repeats)
        try:
            if item.error is not None:
                raise ValueError(item.error.message)
            picture = replace(item, columns={})
            found.examples += row_examples(item.columns, columns=columns, place=item.label, item=picture, split=split)
        except ValueError as error:
            found.refuse(item.label, str(error))
    for label in sorted(repeated, key=natural_key):
        found.refuse(label, SAME_NAME)
    items = ((example, example.item) for example in found.examples)
    found.examples[:] = [example for example, item in items if not item.repeats and item.label not in repeated]
    return found


def require_compressed(num_bytes: int, *, archive: str) -> None:
    """Raise InputsError if the pictures of a compressed archive, which are held in memory, are more than 1 GiB."""
    if num_bytes > MAX_COMPRESSED_BYTES:
        raise InputsError(
            f"Wanted at most {MAX_COMPRESSED_BYTES:,} bytes of pictures in the compressed archive "
            f"`{shown_name(archive)}`, which has more.",
            hint="decompress it: pictures of a plain .tar are not held in memory",
        )
