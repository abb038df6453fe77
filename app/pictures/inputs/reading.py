"""Turns an `InputSpec` into its pictures, one at a time and in a stable order."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs.addresses import (
    address_label,
    check_remote,
    is_remote,
    remote_inputs,
    shown_address,
)
from llama_adapter.app.pictures.inputs.archives import archive_inputs, is_archive_name
from llama_adapter.app.pictures.inputs.fields import spelt_path
from llama_adapter.app.pictures.inputs.folders import file_input, folder_inputs, is_folder
from llama_adapter.app.pictures.inputs.items import InputsError, InputSpec, LeftOut, PictureInput
from llama_adapter.app.pictures.inputs.lines import (
    STDIN,
    TOO_LONG,
    can_read_again,
    check_lines,
    line_end,
    opened_lines,
    read_beginning,
    split_lines,
)
from llama_adapter.app.pictures.inputs.manifests import check_manifest, manifest_inputs
from llama_adapter.app.pictures.inputs.patterns import expand_pattern, fixed_folder, is_pattern
from llama_adapter.app.pictures.inputs.prompts import check_prompts, prompt_inputs
from llama_adapter.app.pictures.prefixes import is_prefixes
from llama_adapter.runtime.text import shown_name


def check_inputs(spec: InputSpec, *, need_questions: bool = False, addresses: bool = False) -> None:
    """Raise `InputsError` for lists and manifests that are unusable as a whole. Opens neither pictures nor pipes.

    With `need_questions`, manifests and files of prompts without a column for questions are an error. With `addresses`,
    paths may be addresses such as s3://bucket/folder, and addresses that no installed package can read are an error.
    """
    remote = list(filter(is_remote, spec.paths)) if addresses else []
    if remote and spec.shard is not None:
        raise InputsError("--shard does not go with addresses", hint="with --engine ray, all machines share one job")
    for address in remote:
        check_remote(address)
    if spec.lists.count(STDIN) > 1:
        raise InputsError("Wanted one list on stdin, got `-` more than once.", hint="name the list once")
    for path in spec.lists:
        check_lines(path, what="list")
    for path in spec.manifests:
        check_manifest(path, needs_questions=need_questions)
    for path in spec.prompt_files:
        check_prompts(path, needs_questions=need_questions)


def read_inputs(spec: InputSpec, *, addresses: bool = False, left_out: LeftOut | None = None) -> Iterator[PictureInput]:
    """The pictures of a spec, one by one, as they are found. `left_out` counts what is left out until then.

    A name without pictures gives one item with an `error`, or one whose reading gives an error. Lines of lists may name
    folders and archives; wildcards are not expanded there. With `spec.shard` (i, n), the first 8 bytes of the SHA-256
    of an item's label (path normalised unless it is an address; UTF-8 with the handler `surrogatepass`), read as a
    big-endian number, are taken modulo n; the item belongs to the shard if the result is i. If a name in `spec.paths`
    has no pictures, as a missing folder, every shard gets its item, so that each machine tells it.

    Every call reads all inputs again; stdin and pipes can be read only once. Raises the errors of `check_inputs`, and
    OSError if reading a list or manifest fails later.
    """
    items = _all_inputs(spec, addresses=addresses, left_out=LeftOut() if left_out is None else left_out)
    if spec.shard is not None:
        items = _of_shard(items, *spec.shard)
    yield from islice(items, spec.limit)


def count_inputs(
    spec: InputSpec, *, size: Callable[[PictureInput], int] = lambda picture: 1, addresses: bool = False
) -> int | None:
    """The number of pictures, or the sum of their `size`. Raises the errors of `read_inputs`.

    None if counting would consume the inputs, as with stdin, or is costly, as for addresses and compressed archives.
    """
    if may_wait(spec) or (addresses and any(map(is_remote, spec.paths))):
        return None
    if any(is_archive_name(name) and not name.lower().endswith(".tar") for name in spec.paths):
        return None
    return sum(map(size, read_inputs(spec)))


def may_wait(spec: InputSpec) -> bool:
    """Whether lines come from stdin or a pipe, which can be read only once and may be slow."""
    return not all(map(can_read_again, (*spec.lists, *spec.manifests, *spec.prompt_files)))


def may_bring_columns(spec: InputSpec) -> bool:
    """Whether pictures may have columns from a manifest or an archive."""
    return bool(spec.lists or spec.manifests) or any(is_pattern(name) or is_archive_name(name) for name in spec.paths)


def _all_inputs(spec: InputSpec, *, addresses: bool, left_out: LeftOut) -> Iterator[PictureInput]:
    named = partial(_named_inputs, spec=spec, addresses=addresses, left_out=left_out)
    for name in spec.paths:
        if addresses and is_remote(name):
            yield from remote_inputs(name, recursive=spec.recursive)
        elif is_pattern(name) and not is_remote(name):
            yield from _pattern_inputs(name, expand=named)
        else:
            yield from named(name)
    for path in spec.lists:
        yield from list_inputs(path, expand=named)
    for path in spec.manifests:
        yield from manifest_inputs(path)
    for path in spec.prompt_files:
        yield from prompt_inputs(path, are_raw=spec.are_raw)
    if spec.is_text and not spec.prompt_files:
        yield PictureInput(source=None, label="prompt")


def list_inputs(path: str, *, expand: Callable[[str], Iterator[PictureInput]]) -> Iterator[PictureInput]:
    """The items of each line, made by `expand`. `-` is stdin, whose lines are used as they arrive.

    A line is a name relative to the current folder. Bytes that are not UTF-8 are kept, and a carriage return at the end
    is dropped. Blank lines and comments are skipped. A comment begins with `# ` or is `#` alone: `#1.jpg` is a name,
    and a file called `# 1.jpg` is written `./# 1.jpg`. If the beginning of the file contains null characters, these end
    the names, as in the output of `find -print0`, and there are no comments. A line above 1 MiB gives one item with an
    error of code "list".

    A list without names gives one item with an error. Raises `InputsError` if the list cannot be opened, and OSError if
    reading fails later.
    """
    has_any = False
    list_name = "stdin" if path == STDIN else path
    with opened_lines(path, what="list") as file:
        begun = read_beginning(file, path=path, what="list")
        separator = b"\0" if b"\0" in begun else line_end(begun)
        for number, line in split_lines(file, separator=separator, begun=begun):
            label = f"{list_name}:{number}"
            if line is None:
                message = f"Wanted the name of a picture in the line `{shown_name(label)}`, but {TOO_LONG}."
                yield PictureInput.failed(label, "list", message, source=path)
                continue
            name = line if separator == b"\0" else _listed(line)
            if name:
                has_any = True
                for item in expand(spelt_path(os.fsdecode(name), root="")):
                    yield replace(item, found_in=(label, *item.found_in))
    if not has_any:
        message = f"Wanted names of pictures in the list `{shown_name(list_name)}`, which has none."
        yield PictureInput.failed(list_name, "list", message, source=path)


def _listed(line: bytes) -> bytes:
    line = line.removesuffix(b"\r")
    return b"" if not line.strip() or line == b"#" or line.startswith(b"# ") else line


def _named_inputs(
    name: str, *, spec: InputSpec, addresses: bool, left_out: LeftOut, root: str | None = None
) -> Iterator[PictureInput]:
    """The items of a name without wildcards.

    `root` is for files that a pattern found; folders and archives are roots themselves.
    """
    if is_prefixes(name):
        from llama_adapter.app.pictures.inputs.encoded import prefix_inputs  # imports numpy

        yield from prefix_inputs(name)
    elif os.path.isdir(name):
        for item in folder_inputs(name, recursive=spec.recursive, left_out=left_out):
            yield _explained(item, recursive=spec.recursive) if item.source == name else item
    elif is_archive_name(name) and os.path.isfile(name):
        yield from archive_inputs(name, fields=spec.sample_fields, left_out=left_out)
    elif is_remote(name) and not addresses:
        advice = "download it, or use --engine ray of the command line"
        message = f"Wanted a picture file, got the address `{shown_address(name)}`; {advice}."
        yield PictureInput.failed(address_label(name), "missing", message, source=name)
    else:
        yield file_input(name, root=root)


def _explained(folder: PictureInput, *, recursive: bool) -> PictureInput:
    """The item of a folder without pictures. If a pattern would find pictures, its error names that pattern."""
    shown = shown_name(folder.label)
    has_folders = has_archives = False
    try:
        with os.scandir(folder.label) as listing:
            for entry in listing:
                has_folders |= is_folder(entry) and not entry.name.startswith(".")
                has_archives |= is_archive_name(entry.name)
    except OSError:  # reading it gives a better error
        return folder
    if has_folders and not recursive:
        what = f"but folders in it; '{os.path.join(shown, '**')}' looks into them"
    elif has_archives:
        what = f"but archives; name them, as in '{os.path.join(shown, '*.tar')}'"
    else:
        return folder
    message = f"Wanted pictures in the folder `{shown}`, which has none of its own, {what}."
    return replace(folder, error=AnswerError(code="not_a_file", message=message))


def _pattern_inputs(pattern: str, *, expand: Callable[..., Iterator[PictureInput]]) -> Iterator[PictureInput]:
    found_any = False
    for path in expand_pattern(pattern):
        found_any = True
        for item in expand(path, root=fixed_folder(pattern)):
            yield replace(item, found_in=(pattern, *item.found_in))
    if not found_any:
        shown = shown_name(pattern)
        message = f"Wanted files that match the pattern `{shown}`, but there are none; quote or correct it."
        yield PictureInput.failed(pattern, "missing", message)


def _of_shard(items: Iterable[PictureInput], index: int, count: int) -> Iterator[PictureInput]:
    for item in items:
        if _shard_of(item.label, count=count) == index:
            yield item
        elif _is_name_without_pictures(item):
            yield replace(item, is_elsewhere=True)


def _is_name_without_pictures(item: PictureInput) -> bool:
    """Whether an item stands for a name of the command line, which may have no pictures on this machine only."""
    if item.found_in or item.source != item.label or item.root not in (None, item.label) or "://" in item.label:
        return False
    return item.root is not None or item.error is not None or not os.path.exists(item.label)


def _shard_of(label: str, *, count: int) -> int:
    name = label if "://" in label else os.path.normpath(label)
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8], "big") % count
