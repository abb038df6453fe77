"""Rotary embeddings: how the angle of a position is computed (Su et al., 2021), and the scalings of long contexts."""

import math
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

import numpy as np

Scaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]
SCALINGS: Final[tuple[Scaling, ...]] = get_args(Scaling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How a layer rotates queries and keys. Names and formulas are those of transformers' `modeling_rope_utils.py`.

    `share` of the coordinates of a head are rotated, the first ones. `factor` is the scaling's s. `original_context`
    is the context that the model was trained with before its scaling; `longest_context` the one it is meant for.
    `attention_factor` multiplies cos and sin; 0 computes it from the other values. Raises ValueError for values out of
    range.
    """

    theta: float = 10000.0
    share: float = 1.0
    scaling: Scaling = "none"
    factor: float = 1.0
    original_context: int = 0
    longest_context: int = 0
    attention_factor: float = 0.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float = 0.0  # yarn
    mscale_all_dim: float = 0.0  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the frequencies
    long_factors: tuple[float, ...] = ()  # longrope

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"the rotary scaling must be one of {', '.join(SCALINGS)}, got {self.scaling!r}")
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name.endswith("_factors"):
                object.__setattr__(self, one.name, tuple(map(float, value)))
                value = min(getattr(self, one.name), default=1.0)
                if not 0 < value < math.inf:
                    raise ValueError(f"{one.name} must be above 0 and finite")
            elif type(one.default) is float and not (type(value) in (int, float) and 0 <= value < math.inf):
                raise ValueError(f"{one.name} must be a finite number of at least 0, got {value!r}")
            elif type(one.default) is int and (type(value) is not int or value < 0):
                raise ValueError(f"{one.name} must be a whole number of at least 0, got {value!r}")
        if not self.theta > 0 or not 0 < self.share <= 1:
            raise ValueError(f"theta {self.theta} must be above 0, and the rotated share {self.share} in 0..1")
        if self.scaling in ("linear", "dynamic", "llama3") and not self.factor > 0:
            raise ValueError(f"the factor of a {self.scaling} rotary scaling must be above 0")
        if self.scaling in ("dynamic", "llama3", "yarn", "longrope") and not self.original_context:
            raise ValueError(f"a {self.scaling} rotary scaling needs the context that it scales")

    @property
    def is_plain(self) -> bool:
        """Whether all coordinates are rotated without a scaling."""
        return self == Rotary(theta=self.theta)

    def rotated(self, head_dim: int) -> int:
        """Number of rotated coordinates of a head. Raises ValueError for an odd number, which leaves half a pair."""
        if (rotated := int(head_dim * self.share)) % 2:
            raise ValueError(f"a share {self.share} of {head_dim} coordinates is {rotated}, an odd number")
        return rotated

    def frequencies(self, head_dim: int, *, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Angle of one position for each pair of coordinates, and the factor of its cos and sin, float32 (H / 2,) each.

        Pairs are coordinates i and i + H / 2. If only a share is rotated, the rotated pairs are the first ones; the
        other pairs have angle 0 and factor 1. Scalings that depend on the length use `context` for all positions.
        """
        rotated = self.rotated(head_dim)
        angles, factors = np.zeros(head_dim // 2, np.float32), np.ones(head_dim // 2, np.float32)
        angles[: rotated // 2], factors[: rotated // 2] = self._frequencies(rotated, context)
        return angles, factors

    def table(self, head_dim: int, *, context: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of every position, float32 (context, H) each. Both halves of a row are equal.

        They are rounded from float64, so they are the same on all processors.
        """
        angles, factors = self.frequencies(head_dim, context=context)
        angles_PH = np.outer(np.arange(context, dtype=np.float32), angles).astype(np.float64)
        halves_PH = (function(angles_PH).astype(np.float32) * factors for function in (np.cos, np.sin))
        cos, sin = (np.tile(half_PH, 2) for half_PH in halves_PH)
        return cos, sin

    def _frequencies(self, rotated: int, context: int) -> tuple[np.ndarray, float]:
        """Angle of one position for each rotated pair, and the factor of cos and sin."""
        exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
        # The power is rounded once, from float64, so that all processors and libraries have the same numbers.
        plain: np.ndarray = 1.0 / np.power(self.theta, exponents, dtype=np.float64).astype(np.float32)
        match self.scaling:
            case "none":
                return plain, 1.0
            case "linear":
                return plain / self.factor, 1.0
            case "dynamic":
                stretch = self.factor * max(context, self.original_context) / self.original_context - (self.factor - 1)
                base = np.float32(self.theta * stretch ** (rotated / (rotated - 2)))
                return 1.0 / base**exponents, 1.0
            case "llama3":
                return self._llama3(plain), 1.0
            case "yarn":
                return self._yarn(plain, rotated), self.attention_factor or self._yarn_factor()
            case "longrope":
                divisors = np.array(self.long_factors if context > self.original_context else self.short_factors)
                if divisors.shape != plain.shape:
                    raise ValueError(f"longrope needs {len(plain)} factors, got {len(divisors)}")
                return plain / divisors, self.attention_factor or self._longrope_factor()

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original_context * plain / (2 * math.pi)  # of the original context
        between = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = (1 - between) * plain / self.factor + between * plain
        slow = np.where(turns < self.low_freq_factor, plain / self.factor, smooth)
        return np.where(turns > self.high_freq_factor, plain, slow)

    def _yarn(self, plain: np.ndarray, rotated: int) -> np.ndarray:
        def place(turns: float) -> float:
            return rotated * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        width = high - low or 0.001
        ramp = np.clip((np.arange(rotated // 2, dtype=np.float32) - low) / width, 0, 1)
        stretched: np.ndarray = plain / self._stretch() * ramp + plain * (1 - ramp)
        return stretched

    def _yarn_factor(self) -> float:
        def scale(weight: float) -> float:
            stretch = self._stretch()
            return 1.0 if stretch <= 1 else 0.1 * weight * math.log(stretch) + 1.0

        return scale(self.mscale) / scale(self.mscale_all_dim) if self.mscale and self.mscale_all_dim else scale(1.0)

    def _longrope_factor(self) -> float:
        stretch = self._stretch()
        return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(self.original_context))

    def _stretch(self) -> float:
        return self.factor if self.factor > 0 and self.factor != 1 else self.longest_context / self.original_context

    def to_dict(self) -> dict[str, Any]:
        """JSON values; those that are default are left out."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
