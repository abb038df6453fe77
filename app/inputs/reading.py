"""A spec of inputs -> its pictures, one at a time and in a stable order; what is wrong as a whole comes first."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from llama_adapter.app.inputs.archives import archive_inputs, is_archive_name
from llama_adapter.app.inputs.errors import InputsError
from llama_adapter.app.inputs.folders import file_input, folder_inputs, is_folder
from llama_adapter.app.inputs.items import PictureInput
from llama_adapter.app.inputs.lines import STDIN, can_read_again, check_lines
from llama_adapter.app.inputs.lists import list_inputs
from llama_adapter.app.inputs.manifests import check_manifest, manifest_inputs
from llama_adapter.app.inputs.patterns import expand_pattern, fixed_folder, is_pattern
from llama_adapter.app.inputs.spec import InputSpec
from llama_adapter.app.records.picture_names import escaped_name
from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.runtime.text import shown_name


def check_inputs(spec: InputSpec, *, need_questions: bool = False) -> None:
    """Raises `InputsError` when a list or a manifest cannot be used as a whole; opens nothing else, and no pipes.

    With `need_questions`, a table without a column for them is of no use.
    """
    if spec.lists.count(STDIN) > 1:
        raise InputsError("Wanted one list on stdin, got `-` more than once.", hint="name the list once")
    for path in spec.lists:
        check_lines(path, what="list")
    for path in spec.manifests:
        check_manifest(path, needs_questions=need_questions)


def read_inputs(spec: InputSpec) -> Iterator[PictureInput]:
    """The pictures of a spec, one by one, as they are found.

    Files and folders are taken as `expand_inputs` does, a name with wildcards that no file has as `expand_pattern`
    does, tar archives as `archive_inputs` does, lists as `list_inputs` does (their lines may name folders and
    archives, and have no wildcards), and manifests as `manifest_inputs` does. Whatever is named and gives no picture
    is an item all the same, with an `error` or with one that comes when it is opened.

    With `spec.shard` (i, n), an item counts when the first 8 bytes of the SHA-256 of its label (as `escaped_name` has
    it, without `./` and the like), as a big-endian number, leave i when divided by n. So n runs that name their inputs
    alike have each once.

    Nothing is kept between calls: each goes through everything again, but for what stdin and pipes give once. Raises
    as `check_inputs` does where that was not asked before, and OSError when a list or manifest stops to be readable.
    """
    items = _all_inputs(spec)
    if spec.shard is not None:
        index, count = spec.shard
        items = (item for item in items if _shard_of(item.label, count=count) == index)
    yield from islice(items, spec.limit)


def count_inputs(spec: InputSpec, *, size: Callable[[PictureInput], int] = lambda picture: 1) -> int | None:
    """How many pictures there are, or what `size` says of each added up.

    None where to count them would be to take them away, as from stdin, and where a compressed archive is named, which
    would have to be unpacked for that. Raises as `read_inputs`.
    """
    if may_wait(spec):
        return None
    if any(is_archive_name(name) and not name.lower().endswith(".tar") for name in spec.paths):
        return None
    return sum(map(size, read_inputs(spec)))


def may_wait(spec: InputSpec) -> bool:
    """Whether lines come from stdin or a pipe: once, and perhaps slowly."""
    return not all(map(can_read_again, (*spec.lists, *spec.manifests)))


def _all_inputs(spec: InputSpec) -> Iterator[PictureInput]:
    for name in spec.paths:
        if is_pattern(name):
            yield from _pattern_inputs(name, recursive=spec.recursive)
        else:
            yield from _named_inputs(name, recursive=spec.recursive)
    for path in spec.lists:
        yield from list_inputs(path, expand=partial(_named_inputs, recursive=spec.recursive))
    for path in spec.manifests:
        yield from manifest_inputs(path)


def _named_inputs(name: str, *, recursive: bool, root: str | None = None) -> Iterator[PictureInput]:
    """A name as it stands. `root` is for a file that a pattern found; folders and archives are roots themselves."""
    if os.path.isdir(name):
        for item in folder_inputs(name, recursive=recursive):
            yield _explained(item, recursive=recursive) if item.source == name else item
    elif is_archive_name(name) and os.path.isfile(name):
        yield from archive_inputs(name)
    else:
        yield file_input(name, root=root)


def _explained(folder: PictureInput, *, recursive: bool) -> PictureInput:
    """A folder that gave no picture, with what would; as it is where that is not to be seen."""
    shown = shown_name(folder.label)
    has_folders = has_archives = False
    try:
        with os.scandir(folder.path) as listing:
            for entry in listing:
                has_folders |= is_folder(entry) and not entry.name.startswith(".")
                has_archives |= is_archive_name(entry.name)
    except OSError:  # opening it says the same, better
        return folder
    if has_folders and not recursive:
        what = "but folders in it; --recursive looks into them"
    elif has_archives:
        what = f"but archives; name them, as in '{os.path.join(shown, '*.tar')}'"
    else:
        return folder
    message = f"Wanted pictures in the folder `{shown}`, which has none of its own, {what}."
    return replace(folder, error=AnswerError(code="not_a_file", message=message))


def _pattern_inputs(pattern: str, *, recursive: bool) -> Iterator[PictureInput]:
    found_any = False
    for path in expand_pattern(pattern):
        found_any = True
        for item in _named_inputs(path, recursive=recursive, root=fixed_folder(pattern)):
            yield replace(item, found_in=(pattern, *item.found_in))
    if not found_any:
        shown = shown_name(pattern)
        message = f"Wanted files that match the pattern `{shown}`, but there are none; quote or correct it."
        error = AnswerError(code="missing", message=message)
        yield PictureInput(source=pattern, label=pattern, error=error)


def _shard_of(label: str, *, count: int) -> int:
    # By the form that labels had once: a picture stays in the shard whose file of records has it.
    label = escaped_name(label)
    name = label if "://" in label else os.path.normpath(label)
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % count
