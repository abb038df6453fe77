"""Sources of pictures, such as a part of an archive file. Plain values; decodes nothing."""

import os
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_adapter.app.pictures.prefixes.file import PrefixRow
from llama_adapter.runtime.text import shown_name
from llama_adapter.vision.errors import PictureError

if TYPE_CHECKING:  # it imports Pillow
    from llama_adapter.vision.image import PictureSource
else:
    PictureSource = Any

TAR_HEADER_BYTES = 512


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A range of bytes in a file, such as a member of an uncompressed tar archive."""

    path: str
    offset: int
    num_bytes: int
    header: int | None = None  # CRC-32 of the tar header before the bytes; None: unknown

    def read(self, *, max_bytes: int) -> bytes:
        """Read the bytes. Raises `PictureError` if they are unreadable or more than `max_bytes`, or if the header
        changed.

        The header is checked because a replaced archive may have another picture at this offset.
        """
        name = f"`{shown_name(self.path)}`"
        if self.num_bytes > max_bytes:
            raise PictureError(
                "too_large",
                f"Wanted at most {max_bytes:,} bytes, but a picture in {name} has {self.num_bytes:,}; "
                "make it smaller or raise the limit.",
            )
        num_before = 0 if self.header is None else TAR_HEADER_BYTES
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                before = os.pread(descriptor, num_before, self.offset - num_before)
                data = os.pread(descriptor, self.num_bytes, self.offset)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise PictureError("missing", f"Wanted a picture in {name}, which does not exist any more.") from None
        except OSError as error:
            raise PictureError(
                "unreadable", f"Wanted to read a picture in {name}, but the system says: {error.strerror}."
            ) from error
        if self.header is not None and zlib.crc32(before) != self.header:
            raise PictureError(
                "unreadable",
                f"Wanted a picture in {name}, but it was replaced or changed since it was listed; run again.",
            )
        if len(data) < self.num_bytes:
            raise PictureError(
                "truncated", f"Wanted {self.num_bytes:,} bytes at {self.offset:,} of {name}, which ends."
            )
        return data


# What a reader takes: a path, the bytes of a file, an opened picture, a part of a file, or an encoded picture.
Source = PictureSource | FileSlice | PrefixRow
