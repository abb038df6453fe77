"""List files: one file, folder or archive a line. Opens none of them."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from llama_adapter.app.inputs.items import PictureInput
from llama_adapter.app.inputs.lines import (
    BYTE_ORDER_MARK,
    MAX_LINE_BYTES,
    STDIN,
    check_encoding,
    opened_lines,
    read_beginning,
    split_lines,
)
from llama_adapter.app.tasks.answers import AnswerError
from llama_adapter.runtime.text import shown_name


def list_inputs(path: str, *, expand: Callable[[str], Iterator[PictureInput]]) -> Iterator[PictureInput]:
    """What the lines of a file name, each by `expand`; `-` is stdin, whose lines are taken as they come.

    A line is a name as it stands, relative to the current folder, without a carriage return at its end; bytes that
    are not UTF-8 are kept. Blank lines are left out, and comments: lines that begin with `# `, or are `#`. So `#1.jpg`
    is a name, and a file called `# 1.jpg` is written `./# 1.jpg`. A file with null characters in its beginning is
    taken as `find -print0` writes it: the names end in those, anything else belongs to them, and no comments are left
    out. A line above 1 MiB is one item with an error of code "list".

    Raises `InputsError` when the list cannot be opened, or is UTF-16, and OSError when it stops to be readable.
    """
    with opened_lines(path, what="list") as file:
        begun = read_beginning(file)
        check_encoding(begun, path=path, what="list")
        begun = begun.removeprefix(BYTE_ORDER_MARK)
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
    return PictureInput(source=path, label=label, error=AnswerError(code="list", message=message))
