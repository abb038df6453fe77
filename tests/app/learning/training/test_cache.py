"""Encoded pictures on disk: each is encoded once and written completely or not at all; unreadable ones are reported."""

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llama_adapter.app.learning.training import cache as module
from llama_adapter.app.learning.training.cache import CacheError, EncodedCache
from llama_adapter.app.learning.training.encoding import check_unreadable, encode_pictures
from llama_adapter.app.learning.training.prepare import Unreadable
from llama_adapter.app.pictures.answer_error import AnswerError
from llama_adapter.app.pictures.inputs import PictureInput
from llama_adapter.app.pictures.reading.reader import PictureReading

SHAPE = (3, 4)
DIGESTS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(6)]


def open_cache(folder: Path, *, encoder: str = "a", dtype: torch.dtype = torch.bfloat16) -> EncodedCache:
    return EncodedCache(folder, encoder=encoder, shape=SHAPE, dtype=dtype, in_memory=2 * 24)


class Pictures:
    """Reads pixels that all have the picture's number as their value; the fourth picture cannot be read."""

    def __init__(self) -> None:
        self.num_read = 0

    def read(self, source: object, **options: object) -> PictureReading:
        self.num_read += 1
        number = int(str(source))
        if number == 3:
            return PictureReading(error=AnswerError(code="unreadable", message="it is cut off"))
        return PictureReading(pixels=np.full((2, 2, 3), number, dtype=np.uint8))

    def close(self) -> None:
        pass


def encode(pixels_BHWC: torch.Tensor) -> torch.Tensor:
    return pixels_BHWC[:, 0, 0, 0].float()[:, None, None].expand(-1, *SHAPE)


def test_pictures_are_encoded_once_for_all_runs_and_bad_ones_are_named(tmp_path: Path) -> None:
    items = (PictureInput(source=str(number), label=f"{number}.png") for number in range(len(DIGESTS)))
    inputs = dict(zip(DIGESTS, items, strict=True))
    unreadable = encode_pictures(open_cache(tmp_path), inputs, reader=Pictures(), encode=encode)
    other = open_cache(tmp_path)

    assert [(one.label, one.reason) for one in unreadable] == [("3.png", "it is cut off")]
    assert other.missing(DIGESTS) == [DIGESTS[3]]
    assert [float(other.get(digest)[0, 0]) for digest in (DIGESTS[5], DIGESTS[1])] == [5.0, 1.0]
    assert open_cache(tmp_path, encoder="b").missing(DIGESTS) == DIGESTS
    assert open_cache(tmp_path, dtype=torch.float32).missing(DIGESTS) == DIGESTS


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


WRONG: list[Callable[[Path], object]] = [
    lambda path: path.write_bytes(path.read_bytes()[:-3]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    *(partial(flipped, place=place) for place in (0, 12, -1, -40, -52)),  # header, digest, numbers
    lambda path: path.write_bytes(path.with_name(f"{DIGESTS[1]}.safetensors").read_bytes()),
    lambda path: save_file({"encoded": torch.ones(SHAPE, dtype=torch.bfloat16)}, path),  # without a digest
    lambda path: save_file({"encoded": torch.ones(SHAPE), "sha256": torch.zeros(32, dtype=torch.uint8)}, path),
    partial(replaced, make=Path.mkdir),
    partial(replaced, make=lambda path: (path / "more").mkdir(parents=True)),
    partial(replaced, make=os.mkfifo),
    partial(replaced, make=lambda path: path.symlink_to("nowhere")),
]


@pytest.mark.parametrize("damage", WRONG)
def test_a_damaged_encoding_is_encoded_again(
    damage: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncodedCache, "_path", lambda self, digest: self._folder / f"{digest}.safetensors")
    cache = open_cache(tmp_path)
    for value, digest in enumerate(DIGESTS[:2]):
        cache.put(digest, torch.full(SHAPE, float(value)))
    damage(next(tmp_path.rglob(f"{DIGESTS[0]}.safetensors")))

    fresh = open_cache(tmp_path)
    assert fresh.missing(DIGESTS[:2]) == DIGESTS[:1]
    with pytest.raises(CacheError, match="removed or damaged during the run"):
        fresh.get(DIGESTS[0])
    fresh.put(DIGESTS[0], torch.zeros(SHAPE))
    again = open_cache(tmp_path)
    assert again.missing(DIGESTS[:2]) == []
    assert [float(again.get(digest)[0, 0]) for digest in DIGESTS[:2]] == [0.0, 1.0]


def test_the_last_encodings_stay_in_memory(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    for value, digest in enumerate(DIGESTS[:3]):
        cache.put(digest, torch.full(SHAPE, float(value)))
    shutil.rmtree(tmp_path)
    assert [float(cache.get(digest)[0, 0]) for digest in DIGESTS[1:3]] == [1.0, 2.0]
    with pytest.raises(CacheError, match="removed or damaged during the run"):
        cache.get(DIGESTS[0])


def test_a_full_disk_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 10_000}))
    open_cache(tmp_path).require_room(2)
    with pytest.raises(CacheError, match=r"1,000 pictures take 0\.0 GB"):
        open_cache(tmp_path).require_room(1000)


def test_too_many_bad_pictures_stop_the_run() -> None:
    bad = [Unreadable(label=f"{number}.png", reason="cut off", digest=str(number)) for number in range(25)]

    lines = list(check_unreadable(bad, num_pictures=250, most=0.1))
    assert lines[0] == "left out: 0.png: cut off"
    assert lines[-1] == "left out: 5 more"
    with pytest.raises(CacheError, match="25 of 240 pictures cannot be read"):
        list(check_unreadable(bad, num_pictures=240, most=0.1))
