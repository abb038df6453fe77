"""List files: one file, folder or archive in each line."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from llama_adapter.app.inputs.items import PictureInput
from llama_adapter.app.inputs.lines import MAX_LINE_BYTES, STDIN, opened_lines, read_beginning, split_lines
from llama_adapter.runtime.text import shown_name


def list_inputs(path: str, *, expand: Callable[[str], Iterator[PictureInput]]) -> Iterator[PictureInput]:
    """The items of each line, by `expand`; `-` is stdin, whose lines are used as they arrive.

    A line is a name relative to the current folder; bytes that are not UTF-8 are kept, a carriage return at the end is
    dropped. Blank lines are skipped, and comments, which begin with `# ` or are `#`: `#1.jpg` is a name, and a file
    called `# 1.jpg` is written `./# 1.jpg`. If the file has null characters in its beginning, names end with those, as
    `find -print0` writes them, and there are no comments. A line above 1 MiB is one item with an error of code "list".

    Raises `InputsError` if the list cannot be opened or is UTF-16, and OSError if reading fails later.
    """
    with opened_lines(path, what="list") as file:
        begun = read_beginning(file, path=path, what="list")
        separator = b"\0" if b"\0" in begun else b"\n"
        for number, line in split_lines(file, separator=separator, begun=begun):
            label = f"{'stdin' if path == STDIN else path}:{number}"
            if line is None:
                yield _too_long(path, label=label)
                continue
            name = _name(line) if separator == b"\n" else line
            if name:
                for item in expand(os.fsdecode(name)):
                    yield replace(item, found_in=(label, *item.found_in))


def _name(line: bytes) -> bytes:
    line = line.removesuffix(b"\r")
    return b"" if not line.strip() or line == b"#" or line.startswith(b"# ") else line


def _too_long(path: str, *, label: str) -> PictureInput:
    reason = f"it has more than {MAX_LINE_BYTES:,} bytes"
    message = f"Wanted the name of a picture in the line `{shown_name(label)}`, but {reason}."
    return PictureInput.failed(label, "list", message, source=path)
