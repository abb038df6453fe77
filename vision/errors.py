"""Errors about one picture."""

from typing import Literal, get_args

from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError

PictureErrorCode = Literal[
    "missing",  # no file with this name
    "not_a_file",  # a folder, pipe, socket or device
    "unreadable",  # the operating system cannot read the file or refuses to
    "empty",  # zero bytes
    "not_a_picture",  # the bytes are not a picture
    "truncated",  # begins like a picture, but is incomplete or damaged
    "too_large",  # more pixels or bytes than the limit
    "unsupported",  # a picture of a kind that cannot be read here
]
PICTURE_ERROR_CODES: tuple[PictureErrorCode, ...] = get_args(PictureErrorCode)


class PictureError(LlamaAdapterError):
    """One picture cannot be used. Other pictures of a batch are not affected.

    `code` is one of `PICTURE_ERROR_CODES`, which do not change between releases. `message` says what was expected, what
    was found and what to do. `digest` is the SHA-256 of the file's bytes, empty if they were not read.
    """

    exit_code = ExitCode.PICTURE_ERRORS
    http_status = 400

    def __init__(self, code: PictureErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: PictureErrorCode = code
        self.digest = ""
