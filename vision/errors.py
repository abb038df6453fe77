"""Errors of one picture."""

from typing import Literal, get_args

from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError

PictureErrorCode = Literal[
    "missing",  # no file of that name
    "not_a_file",  # a folder, pipe, socket or device
    "unreadable",  # the operating system refuses to give the bytes
    "empty",  # zero bytes
    "not_a_picture",  # bytes of something else
    "truncated",  # begins as a picture, then stops or is damaged
    "too_large",  # more pixels or bytes than the limit
    "unsupported",  # a picture of a kind that is not read here
]
PICTURE_ERROR_CODES: tuple[PictureErrorCode, ...] = get_args(PictureErrorCode)


class PictureError(LlamaAdapterError):
    """One picture cannot be used; the others of a batch are not affected.

    `code` is one of `PICTURE_ERROR_CODES` and stays stable; `message` says what was expected, what came and what to do.
    `digest` is the SHA-256 of the file's bytes, empty where they were not read.
    """

    exit_code = ExitCode.PICTURE_ERRORS
    http_status = 400

    def __init__(self, code: PictureErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: PictureErrorCode = code
        self.digest = ""
