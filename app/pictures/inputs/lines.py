"""Text files that are read line by line, with bounded memory. UTF-16 with a byte order mark is read as UTF-8."""

import codecs
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from llama_adapter.app.pictures.inputs.items import InputsError, Row
from llama_adapter.runtime.text import shown_name

MAX_LINE_BYTES = 2**20
TOO_LONG = f"it has more than {MAX_LINE_BYTES:,} bytes"
STDIN = "-"
_UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_MARKS = (codecs.BOM_UTF8, *_UTF_16_MARKS)
_PICTURE_MARKS = (b"\xff\xd8\xff", b"\x89PNG")  # of JPEG and PNG; text never begins with these
_CHUNK_BYTES = 2**16


class ByteFile(Protocol):
    """A file open for reading."""

    def read1(self, size: int = ..., /) -> bytes: ...


class Unmarked:
    """A file without its byte order mark; UTF-16 becomes UTF-8."""

    def __init__(self, file: ByteFile) -> None:
        self._file = file
        self._is_begun = False
        self._decoder: codecs.IncrementalDecoder | None = None

    def read1(self, size: int = _CHUNK_BYTES, /) -> bytes:
        piece = self._file.read1(size)
        if not self._is_begun:
            self._is_begun = True
            while any(mark.startswith(piece) and piece != mark for mark in _MARKS) and (more := self._file.read1(size)):
                piece += more
            if piece.startswith(_UTF_16_MARKS):
                self._decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
            piece = piece.removeprefix(codecs.BOM_UTF8)
        while self._decoder is not None and piece:
            if decoded := self._decoder.decode(piece).encode():
                return decoded
            piece = self._file.read1(size)
        return piece


@contextmanager
def opened_lines(path: str, *, what: str) -> Iterator[ByteFile]:
    """Open a file of lines; `-` is stdin. Raises `InputsError`; its message uses the word `what` for the file."""
    if path == STDIN:
        if sys.stdin is None:
            raise InputsError(f"Wanted a {what} on stdin, which is closed.", hint="name a file")
        # `sys.stdin.buffer` is not used: the interpreter closes it at exit, and aborts if a thread is reading from it.
        with open(sys.stdin.buffer.fileno(), "rb", closefd=False) as file:
            yield Unmarked(file)
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
        except (OSError, ValueError) as error:
            raise unreadable(path, what=what, reason=_reason(error)) from None
        yield Unmarked(file)


def check_lines(path: str, *, what: str) -> None:
    """Raise `InputsError` if a file of lines is missing, unreadable or a picture."""
    if not can_read_again(path):
        try:
            mode = None if path == STDIN else os.stat(path).st_mode
        except (OSError, ValueError) as error:
            raise unreadable(path, what=what, reason=_reason(error)) from None
        if mode is not None and stat.S_ISDIR(mode):
            raise unreadable(path, what=what, reason="it is a folder")
        return  # a pipe: bytes read now would be missing later
    with opened_lines(path, what=what) as file:
        _check_text(file.read1(4), path=path, what=what)


def read_beginning(file: ByteFile, *, path: str, what: str) -> bytes:
    """The first bytes of a file, at least up to a line feed or null character. Raises `InputsError` for a picture."""
    begun = b""
    while len(begun) < _CHUNK_BYTES and not (b"\n" in begun or b"\0" in begun):
        piece = file.read1(_CHUNK_BYTES)
        if not piece:
            break
        begun += piece
    _check_text(begun, path=path, what=what)
    return begun


def line_end(begun: bytes) -> bytes:
    """What ends the lines of a file that begins so: a line feed, or a carriage return if there is no line feed."""
    return b"\r" if b"\r" in begun and b"\n" not in begun else b"\n"


def _check_text(first_bytes: bytes, *, path: str, what: str) -> None:
    if first_bytes.startswith(_PICTURE_MARKS):
        shown = "what comes on stdin" if path == STDIN else f"`{shown_name(path)}`"
        raise InputsError(
            f"Wanted a {what} of lines of text, but {shown} is a picture itself.",
            hint="name the picture as a file, without a flag before it",
        )


def can_read_again(path: str) -> bool:
    """Whether a file can be read twice; stdin and pipes cannot."""
    return path != STDIN and os.path.isfile(path)


def split_lines(file: ByteFile, *, separator: bytes = b"\n", begun: bytes = b"") -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number, counted from 1, as soon as it arrives; None for a line above `MAX_LINE_BYTES`.

    `begun` holds the bytes that were already read from the file.
    """
    number, rest, is_too_long = 1, begun, False
    while True:
        *lines, rest = rest.split(separator)
        for line in lines:
            yield number, None if is_too_long or len(line) > MAX_LINE_BYTES else line
            number, is_too_long = number + 1, False
        if len(rest) > MAX_LINE_BYTES:
            rest, is_too_long = b"", True
        chunk = file.read1(_CHUNK_BYTES)
        if not chunk:
            break
        rest += chunk
    if rest or is_too_long:
        yield number, None if is_too_long else rest


def prompt_lines(path: str, *, what: str) -> Iterator[Row]:
    """Each line that is not blank as a row with the column `prompt`, without white space around it.

    Raises the errors of `opened_lines` and `read_beginning`.
    """
    with opened_lines(path, what=what) as file:
        begun = read_beginning(file, path=path, what=what)
        for number, line in split_lines(file, separator=line_end(begun), begun=begun):
            if line is None:
                yield Row(line=number, problem=TOO_LONG)
                continue
            try:
                text = line.decode().strip()  # of text, more is white space than of bytes
            except UnicodeDecodeError:
                yield Row(line=number, problem="it is not UTF-8")
            else:
                if text:
                    yield Row(line=number, values={"prompt": text})


def unreadable(path: str, *, what: str, reason: str, hint: str = "check the path") -> InputsError:
    """The error for a file that cannot be read; its message uses the word `what` for the file."""
    return InputsError(f"Wanted to read the {what} `{shown_name(path)}`, but {reason}.", hint=hint)


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError | ValueError):
        return "there is no such file"
    return f"the system says: {error.strerror}"
