"""Errors of `vision`: what a picture can cause, and what an exported encoder can. Checkpoints have their own."""

from typing import Literal, get_args

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


class PictureError(Exception):
    """One picture cannot be used; the others of a batch are not touched by it.

    `code` is one of `PICTURE_ERROR_CODES` and stays stable; `message` says what was wanted, what came and
    what to do, in words for a person. `digest` is that of the file's bytes, empty where they were not read.
    """

    def __init__(self, code: PictureErrorCode, message: str) -> None:
        super().__init__(code, message)  # both in args, so that the error survives pickling between processes
        self.digest = ""
        self.code: PictureErrorCode = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class EncoderError(Exception):
    """An exported encoder, or what runs or makes it, that is of no use here; `hint` says what to do, or is empty."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> "tuple[object, tuple[str, str]]":
        return _encoder_error, (self.message, self.hint)  # a keyword would get lost between processes


def _encoder_error(message: str, hint: str) -> EncoderError:
    return EncoderError(message, hint=hint)
