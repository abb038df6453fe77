"""Encoded pictures on disk, one file each, shared by runs and ranks.

The encoder does not change while a model is trained, so each picture is encoded once. A file is named after the
SHA-256 of the picture's bytes, in a folder named after the encoder. It is written under a temporary name and renamed,
so several processes may write the same file. It holds a digest of its numbers. A damaged file is encoded again.
"""

import hashlib
import shutil
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from llama_adapter.runtime.atomic_write import atomic_write
from llama_adapter.runtime.errors import LlamaAdapterError
from llama_adapter.runtime.text import shown_name

# T tokens, C channels: one picture's encoding is (T, C)
_BLOCK: Final = 4096  # a file takes up whole blocks of the disk
_SPARE: Final = 1.05
_IN_MEMORY: Final = 1 << 30  # bytes of encoded pictures that a process keeps in memory
_NAME: Final = "encoded"
_DIGEST_BYTES: Final = 32


class CacheError(LlamaAdapterError):
    """Too little room for encoded pictures, too many unreadable pictures, or an encoding that is lost during a run."""


class EncodedCache:
    """Encoded pictures on disk, by the digest of the picture."""

    def __init__(
        self, folder: Path, *, encoder: str, shape: tuple[int, ...], dtype: torch.dtype, in_memory: int = _IN_MEMORY
    ) -> None:
        """`encoder` identifies the encoder. All encodings have the same `shape` and `dtype`. Raises OSError."""
        self.shape, self.dtype = shape, dtype
        self._folder = folder / hashlib.sha256(f"{encoder} {dtype}".encode()).hexdigest()[:32]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._header = save(_content(torch.zeros(shape, dtype=dtype), name=""))[: -self.num_bytes - _DIGEST_BYTES]
        self._file_bytes = len(self._header) + self.num_bytes + _DIGEST_BYTES
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._most_kept = max(in_memory // self.num_bytes, 1)
        self._sound = set[str]()  # digests whose files were written or checked by this process

    @property
    def num_bytes(self) -> int:
        """Bytes of one picture's encoding, without the header and the digest of its file."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __contains__(self, digest: str) -> bool:
        """Whether there is a sound encoding. Its file is read and checked once in the life of this process."""
        if digest not in self._sound and (tensor := self._read(digest)) is not None:
            self._keep(digest, tensor)
        return digest in self._sound

    def get(self, digest: str) -> Tensor:
        """The encoding of a picture. Raises CacheError if it is missing or damaged."""
        if (kept := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return kept
        if (tensor := self._read(digest)) is None:
            raise CacheError(
                f"The encoding `{shown_name(self._path(digest))}` was removed or damaged during the run",
                hint="the same command encodes the picture again; with --resume it goes on from the last checkpoint",
            )
        self._keep(digest, tensor)
        return tensor

    def put(self, digest: str, encoded: Tensor) -> None:
        """Store an encoding. Whatever is in the place of its file is replaced. Raises OSError."""
        tensor, path = encoded.detach().to("cpu", self.dtype).contiguous(), self._path(digest)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif not path.is_file():
            path.unlink(missing_ok=True)
        with atomic_write(path) as file:
            file.write(save(_content(tensor, name=digest)))
        self._keep(digest, tensor)

    def _read(self, digest: str) -> Tensor | None:
        """The encoding in a file; None unless it is exactly what `put` wrote for this picture."""
        path = self._path(digest)
        try:
            if not path.is_file() or path.stat().st_size != self._file_bytes:
                return None
            content = path.read_bytes()
        except OSError:
            return None
        header, rest = content[: len(self._header)], bytearray(content[len(self._header) :])
        if header != self._header or len(rest) != self.num_bytes + _DIGEST_BYTES:
            return None
        tensor = torch.frombuffer(rest[:-_DIGEST_BYTES], dtype=self.dtype).reshape(self.shape)
        return tensor if rest[-_DIGEST_BYTES:] == _digest(tensor, name=digest) else None

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
                hint="name a folder on another disk with --encoded, or make room",
            )

    def _keep(self, digest: str, tensor: Tensor) -> None:
        self._sound.add(digest)
        self._kept[digest] = tensor
        if len(self._kept) > self._most_kept:
            self._kept.popitem(last=False)

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / f"{digest}.safetensors"


def _content(tensor: Tensor, *, name: str) -> dict[str, Tensor]:
    """The tensors of a file, in their order: numbers come before bytes."""
    return {_NAME: tensor, "sha256": torch.tensor(list(_digest(tensor, name=name)), dtype=torch.uint8)}


def _digest(tensor: Tensor, *, name: str) -> bytes:
    """SHA-256 over the picture's digest and the numbers of its encoding."""
    return hashlib.sha256(name.encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
