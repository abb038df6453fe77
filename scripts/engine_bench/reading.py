"""Reading pictures exactly and fast: pictures a second at two sizes, and what fast changes in pixels and captions."""

import io
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from llama_adapter.app.captioning.assemble import Parts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.models.resources import sample_pictures
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.vision.image import load_picture
from llama_adapter.vision.preprocess import Reading, preprocess

SIZES: Mapping[int, tuple[int, int]] = {1: (1152, 864), 12: (4000, 3000)}  # by megapixels
READINGS: tuple[Reading, ...] = ("exact", "fast")
_SAMPLE_SIDE = 1600  # of samples that are told about


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedResult:
    """One thread, medians of `rounds` in turn; differences of pixels in levels of 0 to 255."""

    megapixels: int
    pictures_per_s: dict[Reading, float]
    largest_difference: int
    mean_difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeResult:
    """What the embedded model makes of the samples, enlarged to JPEGs, read fast instead of exactly."""

    pictures: int
    same_captions: int
    visual_query_difference: float  # root mean square, over that of the visual query


def measure_reading(*, megapixels: int, rounds: int) -> SpeedResult:
    """Both ways in turn, on a picture like a photograph: noise at many scales."""
    data = _jpeg(_noise(*SIZES[megapixels]))
    seconds: dict[Reading, list[float]] = {reading: [] for reading in READINGS}
    with _one_thread():
        pixels = {reading: read(data, reading) for reading in READINGS}
        for _, reading in itertools.product(range(4 * rounds), READINGS):
            started = time.perf_counter()
            read(data, reading)
            seconds[reading].append(time.perf_counter() - started)
    difference = np.abs(pixels["fast"].astype(int) - pixels["exact"])
    return SpeedResult(
        megapixels=megapixels,
        pictures_per_s={reading: 1 / statistics.median(taken) for reading, taken in seconds.items()},
        largest_difference=int(difference.max()),
        mean_difference=float(difference.mean()),
    )


def measure_change(parts: Parts) -> ChangeResult:
    """By the model of `parts` and another captioner like it."""
    files = sorted(path for path in sample_pictures().iterdir() if path.suffix in (".png", ".jpg"))
    pictures = [_jpeg(_enlarged(Image.open(file))) for file in files]
    queries = {
        reading: parts.vision.encode(np.stack([read(data, reading) for data in pictures])).float()
        for reading in READINGS
    }
    texts = [_captions(parts.spec, pictures, reading) for reading in READINGS]
    difference = (queries["fast"] - queries["exact"]).square().mean().sqrt() / queries["exact"].square().mean().sqrt()
    return ChangeResult(
        pictures=len(pictures),
        same_captions=sum(one == other for one, other in zip(*texts, strict=True)),
        visual_query_difference=float(difference),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Pillow takes one, torch as many as it has: pictures are read side by side, so that is no gain of one of them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def read(data: bytes, reading: Reading) -> np.ndarray:
    """As the captioner reads a file: pixels (224, 224, 3)."""
    return preprocess(load_picture(data, least_side=448 if reading == "fast" else None).image, reading=reading)


def _captions(spec: CaptionerSpec, pictures: list[bytes], reading: Reading) -> list[str]:
    with Captioner.load(device=spec.device, dtype=spec.dtype, reading=reading) as captioner:
        return [answer.text for answer in captioner.generate(pictures)]


def _enlarged(image: Image.Image) -> Image.Image:
    return image.convert("RGB").resize((_SAMPLE_SIDE, _SAMPLE_SIDE), Image.Resampling.BICUBIC)


def _jpeg(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def _noise(width: int, height: int) -> Image.Image:
    random = np.random.default_rng(0)
    levels = np.zeros((height, width, 3), np.float32)
    for scale in (4, 16, 64, 256):  # pixels; coarse structure is stronger, as in photographs
        for channel in range(3):
            coarse = random.normal(size=(height // scale + 2, width // scale + 2)).astype(np.float32)
            levels[..., channel] += np.asarray(Image.fromarray(coarse).resize((width, height))) * scale**0.5
    levels -= levels.min()
    return Image.fromarray((levels * (255 / levels.max())).astype(np.uint8))
