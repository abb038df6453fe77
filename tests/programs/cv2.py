"""Stands in for OpenCV in the programs of this folder: pictures as arrays in blue-green-red order."""

from pathlib import Path

import numpy as np
from PIL import Image

INTER_CUBIC = 2


def imread(path: str) -> np.ndarray | None:
    if not Path(path).is_file():
        return None
    return np.asarray(Image.open(path).convert("RGB"))[..., ::-1].copy()


def resize(picture: np.ndarray, size: tuple[int, int], interpolation: int = INTER_CUBIC) -> np.ndarray:
    assert interpolation == INTER_CUBIC
    if picture.shape[1::-1] == size:
        return picture
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
