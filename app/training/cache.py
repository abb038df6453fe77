"""Encoded pictures on disk, one file each, shared by runs and ranks.

The encoder does not change while a model is trained, so each picture is encoded once. A file is named after the
SHA-256 of the picture's bytes, in a folder named after the encoder. It is written under a temporary name and renamed.
So a file is always complete, even if a process is killed, and several processes may write the same file.
"""

import hashlib
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from llama_adapter.app.inputs import PictureInput
from llama_adapter.app.labelled.example import Example
from llama_adapter.app.reading.prefetch import Prefetcher
from llama_adapter.app.reading.reader import PictureReading, Reader
from llama_adapter.app.reading.sources import FileSlice
from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import ExitCode, LlamaAdapterError
from llama_adapter.runtime.text import shown_name

# T tokens, C channels: one picture's encoding is (T, C)
_BLOCK: Final = 4096  # a file takes up whole blocks of the disk
_SPARE: Final = 1.05
_IN_MEMORY: Final = 1 << 30  # bytes of encoded pictures that a process keeps in memory
_NAME: Final = "encoded"
_MOST_NAMED: Final = 20


class CacheError(LlamaAdapterError):
    """The disk has too little room for encoded pictures, or too many pictures cannot be read."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreadable:
    """A picture that cannot be read and is left out."""

    label: str
    reason: str
    digest: str


class EncodedCache:
    """Encoded pictures on disk, by the digest of the picture."""

    def __init__(
        self, folder: Path, *, encoder: str, shape: tuple[int, ...], dtype: torch.dtype, in_memory: int = _IN_MEMORY
    ) -> None:
        """`encoder` identifies the encoder. All encodings have the same `shape` and `dtype`. Raises OSError."""
        self.shape, self.dtype = shape, dtype
        self._folder = folder / hashlib.sha256(f"{encoder} {dtype}".encode()).hexdigest()[:32]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file_bytes = len(save({_NAME: torch.zeros(shape, dtype=dtype)}))
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._most_kept = max(in_memory // self.num_bytes, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of one picture's encoding, without the header of its file."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __contains__(self, digest: str) -> bool:
        if digest in self._kept:
            return True
        try:
            return self._path(digest).stat().st_size == self._file_bytes
        except FileNotFoundError:
            return False

    def get(self, digest: str) -> Tensor:
        """The encoding of a picture. Raises KeyError if it is missing or damaged."""
        if (kept := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return kept
        path = self._path(digest)
        try:
            tensor = load_file(path)[_NAME]
        except (OSError, SafetensorError, KeyError):  # removed or damaged
            raise KeyError(digest) from None
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise KeyError(digest)
        self._keep(digest, tensor)
        return tensor

    def put(self, digest: str, encoded: Tensor) -> None:
        """Store an encoding. Raises OSError."""
        tensor = encoded.detach().to("cpu", self.dtype).contiguous()
        with atomic_write(self._path(digest)) as file:
            file.write(save({_NAME: tensor}))
        self._keep(digest, tensor)

    def missing(self, digests: Iterable[str]) -> list[str]:
        """The digests that have no encoding, each once, in order."""
        return [digest for digest in dict.fromkeys(digests) if digest not in self]

    def require_room(self, count: int) -> None:
        """Raise CacheError unless the disk has room for `count` more encodings."""
        needed = int(count * -(-self._file_bytes // _BLOCK) * _BLOCK * _SPARE)
        free = shutil.disk_usage(self._folder).free
        if needed > free:
            raise CacheError(
                f"The encodings of {count:,} pictures take {needed / 1e9:.1f} GB, and `{self._folder}` has "
                f"{free / 1e9:.1f} GB free",
                hint="name a folder on another disk with --cache, or make room",
            )

    def _keep(self, digest: str, tensor: Tensor) -> None:
        self._kept[digest] = tensor
        if len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / f"{digest}.safetensors"


def pictures_of(examples: Iterable[Example]) -> dict[str, PictureInput]:
    """Digest -> picture, for all pictures of the examples."""
    found: dict[str, PictureInput] = {}
    for example in examples:
        if example.item.source is not None:
            found.setdefault(example.digest, example.item)
    return found


def encode_pictures(
    cache: EncodedCache,
    pictures: dict[str, PictureInput],
    *,
    reader: Reader,
    encode: Callable[[Tensor], Tensor],
    batch_size: int,
    show: Callable[[int, int], None] = lambda done, failed: None,
) -> list[Unreadable]:
    """Encode and store the pictures; returns those that cannot be read.

    `encode` takes uint8 pixels (B, H, W, 3). `show` is called with the number of pictures done, and how many of them
    cannot be read. Raises what `encode` raises, and OSError.
    """
    unreadable: list[Unreadable] = []

    def read(digest: str) -> tuple[str, PictureReading]:
        source = pictures[digest].source
        assert isinstance(source, str | bytes | FileSlice), "labelled data have no prefix files"
        return digest, reader.read(source, name=shown_name(pictures[digest].label))

    num_done = 0
    with Prefetcher(iter(pictures), read, ahead=2 * batch_size) as readings:
        while taken := readings.take(batch_size):
            whole = [(digest, one.pixels) for digest, one in taken if one.pixels is not None]
            for digest, one in taken:
                if one.pixels is None:
                    reason = one.error.message if one.error is not None else "it has no pixels"
                    unreadable.append(Unreadable(label=pictures[digest].label, reason=reason, digest=digest))
            if whole:
                encoded = encode(torch.from_numpy(np.stack([pixels for _, pixels in whole])))
                for (digest, _), one in zip(whole, encoded, strict=True):
                    cache.put(digest, one)
            num_done += len(taken)
            show(num_done, len(unreadable))
    return unreadable


def check_unreadable(unreadable: Sequence[Unreadable], *, num_pictures: int, most: float) -> Iterator[str]:
    """Lines that name the pictures that are left out.

    Raises CacheError if these are more than the share `most` of all `num_pictures`.
    """
    for one in unreadable[:_MOST_NAMED]:
        yield f"left out: {shown_name(one.label)}: {one.reason}"
    if len(unreadable) > _MOST_NAMED:
        yield f"left out: {len(unreadable) - _MOST_NAMED:,} more"
    if len(unreadable) > most * num_pictures:
        raise CacheError(
            f"{len(unreadable):,} of {num_pictures:,} pictures cannot be read, and at most {most:.0%} are left out",
            hint="repair or remove them, or allow more with --most-unreadable; finished encodings are kept",
        )
