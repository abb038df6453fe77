"""Past keys and values: those of virtual tokens before every prompt, which all its tokens attend to.

Imports no torch.
"""

# L layers, N heads of keys and values, C past tokens, H head size

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class PastKeyValues:
    """Keys and values of C tokens before every prompt, float32 (L, N, C, H) each.

    Prefix tuning (Li & Liang, 2021) and P-Tuning v2 (Liu et al., 2022) learn them. They are part of the same softmax as
    the prompt's own tokens. The keys are rotated for positions 0..C-1, and a prompt begins at position C.
    """

    k_LNCH: np.ndarray
    v_LNCH: np.ndarray

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values."""
        return self.k_LNCH, self.v_LNCH

    def of_heads(self, heads: slice) -> "PastKeyValues":
        """The keys and values of some heads."""
        return PastKeyValues(self.k_LNCH[:, heads], self.v_LNCH[:, heads])

    def __len__(self) -> int:
        """C, the number of past tokens."""
        return int(self.k_LNCH.shape[2])

    @property
    def digest(self) -> str:
        """SHA-256 of keys and values, in hexadecimal."""
        digest = hashlib.sha256(repr(self.k_LNCH.shape).encode())
        for part in self.parts:
            digest.update(np.ascontiguousarray(part, "<f4").tobytes())
        return digest.hexdigest()
