"""Past keys and values: what every prompt attends to before its first token. Imports no torch."""

# L layers, N heads, C past tokens, H head size

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, slots=True)
class PastKeyValues:
    """Keys and values of C tokens in front of every prompt, float32 (L, N, C, H) each.

    Prefix tuning (Li & Liang, 2021) and P-Tuning v2 (Liu et al., 2022) learn them. They share the softmax of the
    prompt's own tokens. Their positions are 0..C-1: the keys are rotated for them, and a prompt begins at position C.
    """

    k_LNCH: np.ndarray
    v_LNCH: np.ndarray

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values."""
        return self.k_LNCH, self.v_LNCH

    def of_heads(self, heads: slice) -> "PastKeyValues":
        """Those of some heads."""
        return PastKeyValues(self.k_LNCH[:, heads], self.v_LNCH[:, heads])

    def __len__(self) -> int:
        """C, the number of past tokens."""
        return int(self.k_LNCH.shape[2])

    @property
    def digest(self) -> str:
        """SHA-256 of the values, in hex."""
        digest = hashlib.sha256(repr(self.k_LNCH.shape).encode())
        for part in self.parts:
            digest.update(np.ascontiguousarray(part, "<f4").tobytes())
        return digest.hexdigest()


def shifted(k_LNCH: np.ndarray, positions: int, *, theta: float) -> np.ndarray:
    """Keys in half-split order, rotated by `positions` more: by RoPE, all positions may shift together.

    `theta` is the base of the rotary embedding (Su et al., 2021).
    """
    half = k_LNCH.shape[-1] // 2
    angles = positions * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = k_LNCH[..., :half].astype(np.float64), k_LNCH[..., half:].astype(np.float64)
    rotated: np.ndarray = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(np.float32)
