"""Reads the DATA arguments of commands: tables, folders by class, archives and known sets, as checked examples."""

import glob
import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations, product, starmap

from llama_adapter.app.learning.labelled.checks import check_examples, with_digests, without_missing
from llama_adapter.app.learning.labelled.example import Example, Examples
from llama_adapter.app.learning.labelled.known_sets import known_examples
from llama_adapter.app.learning.labelled.pictures import (
    METADATA,
    archive_examples,
    beside_examples,
    class_examples,
    pictures_in,
    split_folders,
    sub_folders,
)
from llama_adapter.app.learning.labelled.rows import (
    KNOWN,
    NO_PICTURE_COLUMN,
    SPLITS,
    WANTED,
    Columns,
    add_row,
    are_splits,
    split_in,
    split_name,
    with_classes,
    without_copies,
)
from llama_adapter.app.pictures.inputs import InputsError, PictureInput, natural_key
from llama_adapter.app.pictures.inputs.archives import is_archive_name
from llama_adapter.app.pictures.inputs.folders import folder_inputs, has_picture_suffix
from llama_adapter.app.pictures.inputs.items import LeftOut
from llama_adapter.app.pictures.inputs.patterns import expand_pattern, is_pattern
from llama_adapter.app.pictures.inputs.tables import TABLE_SUFFIXES, read_rows
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.settings.yaml_file import read_yaml
from llama_adapter.runtime.text import shown_name

_EVERYTHING = Columns()
_META = "META"  # the only key of a data config of LLaMA-Adapter
_FORMS = (
    "a table, a folder of folders by class, with metadata.jsonl or with texts beside pictures, a tar archive, or a "
    "known set"
)
_WHAT = "table of labelled pictures"


def read_examples(*paths: str, columns: Columns = _EVERYTHING, digests: bool = True, looks: bool = True) -> Examples:
    """The examples of all paths, and the problems of the data. Decodes no picture.

    A path is a table, a YAML with a list of tables under `META`, a folder with a `metadata.jsonl`, a folder of pictures
    with texts beside them, a folder with a sub-folder for each class, a tar archive or a folder of tar archives, a
    known set, or a pattern that matches these. Several tables or archives that are named `train` and `test`, or as
    other splits, are these splits; a row may name another. The choices for labels without choices are all labels of the
    same path. Without `digests`, pictures are not read, so copies are not found. Without `looks`, missing pictures are
    not found.

    Raises InputsError if a path is none of these or is unusable as a whole, and OSError.
    """
    found, classes = Examples(), dict[str, frozenset[str]]()
    matches = [(path, list(expand_pattern(path)) if is_pattern(path) else [path]) for path in paths]
    has_splits = _are_split_files([name for _, names in matches for name in names])
    for path, names in matches:
        one = Examples()
        if not names:
            raise InputsError(f"Wanted files that match the pattern `{shown_name(path)}`, but there are none.")
        for name in names:
            split = _split_of(name) if has_splits else ""
            one.extend(_named(name, columns=columns, split=split))
        if not has_splits:
            classes[path] = frozenset(with_classes(one, place=path))
        found.extend(one)
    if has_splits:  # they have the same classes
        with_classes(found, place=" ".join(paths))
    for (one_path, these), (path, those) in combinations(classes.items(), 2):
        if these != those and these & those:
            reason = (
                f"its classes are not those of {one_path}, so each is asked about its own alone; all are asked about"
            )
            found.warn(path, f"{reason} if one pattern, as 'photos/*', names both")
    if looks:
        without_missing(found)
    if digests:
        with_digests(found)
        check_examples(found, question=columns.question)
    if found.left_out and not found.examples and not found.problems:
        raise InputsError(
            f"Wanted labelled data, but everything is left out: {found.left_out.note()}.",
            hint="docs/labelled-data.md shows the forms of data",
        )
    if found.left_out:
        found.warn("left out of the data", found.left_out.note())
    return found


def _are_split_files(paths: Sequence[str]) -> bool:
    """Whether the paths are tables or archives named as splits: `train.csv` and others, such as `test.csv`."""
    are_files = all(_is_table(path) or is_archive_name(path) for path in paths)
    return are_files and are_splits(list(map(_stem, paths))) and "train" in map(_split_of, paths)


def _is_table(path: str) -> bool:
    """Whether the name of a file is that of a table. In a folder, a `.txt` is about one picture."""
    return path.lower().endswith((*TABLE_SUFFIXES, ".txt"))


def _split_of(path: str) -> str:
    return split_in(_stem(path))[0]


def _stem(path: str) -> str:
    return os.path.basename(path).split(".")[0]


def _named(path: str, *, columns: Columns, split: str = "") -> Examples:
    known = known_examples(path, columns=columns)
    if known is not None:
        return known
    if os.path.isdir(path):
        return _folder(path, columns=columns)
    if not os.path.exists(path):
        raise InputsError(f"Wanted labelled data, but `{shown_name(path)}` does not exist.", hint="check the path")
    if is_archive_name(path):
        return archive_examples(path, columns=columns.of_split(split))
    if _is_table(path):
        return table_examples(path, columns=columns.of_split(split))
    if path.lower().endswith((".yaml", ".yml")):
        return _listed(path, columns=columns)
    raise InputsError(f"Wanted {_FORMS}, got the file `{shown_name(path)}`.", hint="docs/labelled-data.md shows them")


def _listed(path: str, *, columns: Columns) -> Examples:
    """The examples of the tables that a data config of LLaMA-Adapter lists, relative to it or to the present folder."""
    try:
        tables = read_yaml(path).get(_META)
    except UsageError as error:  # a settings file would be a wrong command line
        raise InputsError(error.message, hint=error.hint) from None
    if not isinstance(tables, list) or not tables or not all(isinstance(name, str) for name in tables):
        raise InputsError(
            f"Wanted a list of tables under `{_META}` in `{shown_name(path)}`, got something else.",
            hint="write `META:` and a line `  - table.json` for each table",
        )
    found = Examples()
    for name in tables:
        beside = os.path.join(os.path.dirname(path), name)
        table = beside if os.path.exists(beside) else name
        if os.path.exists(table) and not _is_table(table):
            raise InputsError(f"Wanted tables under `{_META}`, got `{shown_name(table)}`.", hint=".json or .csv")
        found.extend(_named(table, columns=columns))
    return found


def _folder(folder: str, *, columns: Columns) -> Examples:
    found, has_any, tables = Examples(), False, list[str]()
    for place, split in dict.fromkeys([(folder, ""), *split_folders(folder)]):
        names = sorted(os.listdir(place), key=natural_key)
        has_splits = not split and _are_split_files(list(filter(is_archive_name, names)))
        stems = {stem for name in names if has_picture_suffix(name) for stem in (name, os.path.splitext(name)[0])}
        for name in names:
            path = os.path.join(place, name)
            if name in METADATA:
                found.extend(table_examples(path, columns=columns.of_split(split)))
            elif is_archive_name(name):
                own = _split_of(name) if has_splits else split
                found.extend(archive_examples(path, columns=columns.of_split(own)))
            else:
                stem, suffix = os.path.splitext(name)  # a `.json` may be about a picture
                tables += [path] * (suffix.lower() in TABLE_SUFFIXES and not (suffix == ".json" and stem in stems))
                continue
            has_any = True
    beside = None if has_any else beside_examples(folder, columns=columns)
    if beside is not None:
        found = beside
    elif not has_any:
        folders = [os.path.join(place, name) for place, _ in split_folders(folder) for name in sub_folders(place)]
        classes = set(map(os.path.basename, folders))
        found, others = class_examples(folder, columns=columns), LeftOut()
        is_empty = not found.examples and next(folder_inputs(folder, recursive=True, left_out=others)).source == folder
        hint = _hint_about_tables_below(folder) if is_empty and not others else ""
        if hint or (len(classes) < 2 and (not classes or tables)):
            raise _is_none_of_the_forms(folder, tables, hint=hint)
        for table in chain(tables, filter(os.path.isfile, starmap(os.path.join, product(folders, METADATA)))):
            found.left_out.add("tables beside and in the folders of classes", table)
        splits = sorted(name for name in classes if split_in(name)[0] and split_name(name) not in SPLITS)
        if are_splits(splits):
            found.refuse(folder, f"{', '.join(splits)} seem to be splits, not classes; call them train, val or test")
    _count_left_out(folder, found, has_rows=has_any)
    return found


def _hint_about_tables_below(folder: str) -> str:
    """What to do with the first Parquet tables in sub-folders, or the first Arrow files; "" if there are none."""
    for place, names, files in os.walk(folder):
        names[:] = sub_folders(place)
        if any(name.endswith(".arrow") for name in files):  # written by save_to_disk of the `datasets` library
            return "write its rows as Parquet: datasets.load_from_disk reads them, and to_parquet writes each split"
        if place != folder and any(name.endswith(".parquet") for name in files):
            return f"name the tables: {shlex.quote(shown_name(os.path.join(glob.escape(place), '*.parquet')))}"
    return ""


def _is_none_of_the_forms(folder: str, tables: list[str], *, hint: str) -> InputsError:
    tables.sort(key=lambda table: _split_of(table) != "train")
    named = tables if _are_split_files(tables) else tables[:1]
    if tables and not hint:
        hint = f"name the {'tables themselves' if named[1:] else 'table itself'}: {' '.join(map(shown_name, named))}"
    message = f"Wanted {_FORMS}, got the folder `{shown_name(folder)}`, which is none of these."
    return InputsError(message, hint=hint or "put the pictures of each class into a folder with its name")


def _count_left_out(folder: str, found: Examples, *, has_rows: bool) -> None:
    """Count the folders of thumbnails in a folder and, if it has tables, the pictures that no row names."""
    rows = found.examples if has_rows else []
    named = {os.path.abspath(one.item.source) for one in rows if isinstance(one.item.source, str)}
    for item in folder_inputs(folder, recursive=True, left_out=found.left_out):
        if has_rows and item.source != folder and os.path.abspath(item.label) not in named:
            found.left_out.add("pictures without a row", item.label)


def table_examples(path: str, *, columns: Columns) -> Examples:
    """The examples of a table, without duplicates.

    Paths of pictures are relative to `columns.picture_folder`, by default to the folder of the table; missing pictures
    are not reported. A picture may be in an archive: `shard.tar/000.jpg`. Malformed rows, and different answers to the
    same question about the same picture, are problems with their line.

    Raises InputsError if the file is unusable as a whole, and OSError.
    """
    found = Examples()
    root = os.path.dirname(path) if columns.picture_folder is None else columns.picture_folder
    for row in read_rows(path, what=_WHAT, wanted=WANTED, known=KNOWN, root=root):
        place = f"{path}, line {row.line}"
        if row.problem:
            found.refuse(place, row.problem)
            continue
        kind = "rows without an answer"
        add_row(found, row.values, columns=columns, place=place, line=row.line, root=root, unanswered=kind)
    unnamed = next((one for one in found.problems if one.reason.endswith(NO_PICTURE_COLUMN)), None)
    if unnamed is not None and all(one.item.source is None for one in found.examples):
        raise InputsError(
            f"Wanted pictures in the {_WHAT} `{shown_name(path)}`, but its examples have none:", details=[str(unnamed)]
        )
    captions = [one for one in found.examples if one.task == "caption"]
    if sum(one.answers[0].endswith("?") for one in captions) * 2 > len(captions) > 1:
        raise InputsError(
            f"Wanted answers in the {_WHAT} `{shown_name(path)}`, but most of its descriptions are questions.",
            hint="call the column of questions `question`, and that of the answers `answer`",
        )
    without_copies(found, question=columns.question)
    with_members(found)
    return found


def with_members(found: Examples) -> None:
    """Replace paths into archives by the pictures in the archives. Each archive is read once, by `pictures_in`.

    If an archive lacks a name, the path stays, and the picture is reported as missing later. A picture that cannot be
    extracted is an error.
    """
    wanted = defaultdict[str, set[str]](set)
    for example in found.examples:
        source = example.item.source
        if isinstance(source, str) and (archive := archive_in(source)) is not None:
            wanted[archive].add(source)
    members: dict[str, PictureInput | None] = {}
    for archive, labels in wanted.items():
        members |= pictures_in(archive, found, wanted=labels)
    kept: list[Example] = []
    for example in found.examples:
        if example.item.label not in members:
            kept.append(example)
        elif (member := members[example.item.label]) is None:
            continue  # two pictures have its name
        elif member.error is not None:
            found.refuse(example.place, member.error.message, unreadable=example)
        else:
            item = replace(example.item, source=member.source, root=member.root)
            kept.append(replace(example, item=item))
    found.examples[:] = kept


def archive_in(path: str) -> str | None:
    """The archive in a path, such as `a/shard.tar` in `a/shard.tar/b/c.jpg`; None if the path has no archive."""
    parts = path.split("/")
    places = (end for end in range(1, len(parts)) if is_archive_name(parts[end - 1]))
    return next(filter(os.path.isfile, ("/".join(parts[:end]) for end in places)), None)
