"""scikit-learn's scans of handwritten digits: the test part of UCI's "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak, 1998).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# N scans of 8 x 8 pixels

MOST_INK = 16  # of a pixel in a scan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scans:
    """Scans and the digits that they show."""

    ink_NHW: NDArray[np.float64]  # (N, 8, 8), 0 to 16
    digits_N: NDArray[np.int64]


def load_scans() -> Scans:
    """The 1,797 scans included in scikit-learn."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return Scans(ink_NHW=loaded.images, digits_N=loaded.target.astype(np.int64))
