"""JPEGs that take as long to decode as photographs."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

QUALITY = 90


def write_photographs(folder: Path, count: int, *, width: int, height: int) -> list[Path]:
    """Write `count` different JPEG files; each call writes the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{width}x{height}-{seed:06d}.jpg" for seed in range(count)]
    for seed, path in enumerate(paths):
        photograph(width, height, seed=seed).save(path, quality=QUALITY)
    return paths


def photograph(width: int, height: int, *, seed: int) -> Image.Image:
    """Noise with the spectrum of natural scenes, and film grain. Colours vary less than brightness."""
    randomness = np.random.default_rng(seed)
    planes = [_natural(randomness, 1152, 864), *(_natural(randomness, 288, 216) for _ in range(2))]
    planes = [np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)) for plane in planes]
    grain = randomness.normal(0, 3, (height, width)).astype(np.float32)
    channels = (128 + 52 * planes[0] + grain, 128 + 16 * planes[1], 128 + 16 * planes[2])
    bands = [Image.fromarray(np.clip(channel, 0, 255).astype(np.uint8)) for channel in channels]
    return Image.merge("YCbCr", bands).convert("RGB")


def _natural(randomness: np.random.Generator, width: int, height: int) -> NDArray[np.float32]:
    """A plane (height, width) with mean 0 and deviation 1; amplitudes fall with the frequency."""
    spectrum = np.fft.rfft2(randomness.normal(size=(height, width)))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    plane = np.fft.irfft2(spectrum / frequency, s=(height, width))
    return np.asarray(plane / plane.std(), np.float32)
