"""Files to measure reading by: the sample drawings, and JPEGs that a decoder takes as long for as for photographs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llama_adapter.app.models.resources import sample_pictures

DRAWINGS = "drawings"
PHOTOGRAPHS = {"1 MP JPEG": (1152, 864), "4 MP JPEG": (2304, 1728), "12 MP JPEG": (4000, 3000)}
KINDS = (DRAWINGS, *PHOTOGRAPHS)
NUM_PHOTOGRAPHS = 4  # of each size; more would only take longer to draw
QUALITY = 90


def make_pictures(folder: Path, *, kinds: Sequence[str] = KINDS) -> dict[str, list[str]]:
    """Paths by kind; photographs are drawn into `folder`, the same ones each time."""
    paths = {DRAWINGS: sorted(str(path) for path in sample_pictures().glob("*.[pj][np]g"))}
    for kind, (width, height) in PHOTOGRAPHS.items():
        if kind not in kinds:
            continue
        paths[kind] = [str(folder / f"{width}x{height}-{seed}.jpg") for seed in range(NUM_PHOTOGRAPHS)]
        for seed, path in enumerate(paths[kind]):
            photograph(width, height, seed=seed).save(path, quality=QUALITY)
    return paths


def photograph(width: int, height: int, *, seed: int) -> Image.Image:
    """Noise with as much of each scale as photographs have, and grain: it is the busy files that take time.

    Amplitudes fall with the frequency, as those of natural scenes do; colours vary less than brightness.
    """
    randomness = np.random.default_rng(seed)
    planes = [_natural(randomness, 1152, 864), *(_natural(randomness, 288, 216) for _ in range(2))]
    planes = [np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)) for plane in planes]
    grain = randomness.normal(0, 3, (height, width)).astype(np.float32)
    channels = (128 + 52 * planes[0] + grain, 128 + 16 * planes[1], 128 + 16 * planes[2])
    bands = [Image.fromarray(np.clip(channel, 0, 255).astype(np.uint8)) for channel in channels]
    return Image.merge("YCbCr", bands).convert("RGB")


def _natural(randomness: np.random.Generator, width: int, height: int) -> NDArray[np.float32]:
    """A plane (height, width) of mean 0 and deviation 1."""
    spectrum = np.fft.rfft2(randomness.normal(size=(height, width)))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    plane = np.fft.irfft2(spectrum / frequency, s=(height, width))
    return np.asarray(plane / plane.std(), np.float32)
