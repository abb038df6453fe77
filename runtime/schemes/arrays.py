"""Rounding of weights to few bits, as numpy arrays, with the numbers of the schemes. Imports no torch."""

# O outputs, I inputs, G groups of 32 inputs, E inputs of a group, P pairs of them, M groups of any outputs

import functools
from typing import Final

import numpy as np

from llama_adapter.runtime.kernels.arrays import GROUP, KIND_OF, numbers, rounded
from llama_adapter.runtime.kernels.library import KINDS, Library
from llama_adapter.runtime.kernels.threads import num_threads

LARGEST: Final = 127  # of weights of 8 bits
MIDDLE: Final = 8  # the code of 0 in weights of 4 bits
# Times the scale that gives the largest weight the level -8: that, one that clips it, and one that gives it level 7.
FACTORS: Final = (1.0, 0.9, -MIDDLE / (MIDDLE - 1))


def balancing_factors(weight_I: np.ndarray, bias_I: np.ndarray, weight_OI: np.ndarray, *, dtype: str) -> np.ndarray:
    """Powers of two, float32 (I,), to divide the channels of a norm by, and to multiply the columns that read them by.

    All are float32. They make the spread of a channel, sqrt(weight^2 + bias^2), and the root mean square of its column
    as nearly equal as powers of two can, up to one constant for all channels. A factor is 1 if the channel's spread or
    its column is 0, if it has numbers that are not finite, or if `dtype` could not hold the divided numbers exactly.
    """

    def held(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float16).astype(np.float32) if dtype == "float16" else rounded(x, dtype)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        spread_I = np.sqrt(np.square(weight_I) + np.square(bias_I))
        column_I = np.sqrt(np.square(weight_OI).mean(0))
        exponent_I = (np.log2(spread_I) - np.log2(column_I)) / 2
        is_known_I = np.isfinite(exponent_I)
        factors_I = np.ones_like(spread_I)
        factors_I[is_known_I] = np.exp2(np.rint(exponent_I - exponent_I[is_known_I].mean()))[is_known_I]
        for part_I in (weight_I, bias_I):
            is_exact_I = held(part_I / factors_I) * factors_I == held(part_I)
            factors_I = np.where(is_exact_I, factors_I, np.float32(1))
    return np.asarray(factors_I)


def round_int8(floats_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A weight in float32 as the scheme int8 rounds it: int8 (O, I), and scales float32 (O,)."""
    steps_O = np.abs(floats_OI).max(1) / np.float32(LARGEST)
    scale_O = np.where(steps_O > 0, steps_O, np.float32(1))
    levels_OI = np.rint(floats_OI / scale_O[:, None])
    return np.clip(levels_OI, -LARGEST, LARGEST).astype(np.int8), scale_O


def round_int4(weight_OI: np.ndarray, *, library: Library | None) -> tuple[np.ndarray, np.ndarray]:
    """A weight in float32, or in bfloat16 as its bits, rounded to 4 bits as `runtime.schemes.int4` says.

    Returns bytes of two codes (O, G, 16) and scales float16 (O, G). The kernels add errors in another order than
    `choose_scales`. Groups where that could change the choice of the scale are rounded here, and without kernels all of
    them. Raises ValueError for a number that is not finite or too large.
    """
    plain_OI, (num_out, num_in) = np.ascontiguousarray(weight_OI), weight_OI.shape
    shape = num_out, -(-num_in // GROUP)
    codes_OGP = np.empty((*shape, GROUP // 2), np.uint8)
    scales_OG, undecided_OG = np.empty(shape, np.float32), np.ones(shape, np.bool_)
    if library is not None:
        addresses = (array.ctypes.data for array in (plain_OI, codes_OGP, scales_OG, undecided_OG))
        library.round_int4(KINDS[KIND_OF[plain_OI.dtype.name]], num_out, num_in, *addresses, num_threads())
    if undecided_OG.any():
        groups_OGE = _in_whole_groups(numbers(plain_OI)).reshape(*shape, GROUP)
        codes_OGP[undecided_OG], scales_OG[undecided_OG] = _round_groups(groups_OGE[undecided_OG])
    return codes_OGP, scales_OG.astype(np.float16)


def _in_whole_groups(weight_OI: np.ndarray) -> np.ndarray:
    """Padded with zeros to a multiple of 32 inputs; not copied if it is one."""
    missing = -weight_OI.shape[1] % GROUP
    return np.pad(weight_OI, ((0, 0), (0, missing))) if missing else weight_OI


def _round_groups(weight_ME: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Groups of weights -> codes (M, 16) and scales (M,)."""
    if not np.isfinite(weight_ME).all():
        raise ValueError("a number is infinite or NaN")
    with np.errstate(over="ignore"):  # weights that overflow here are refused by `choose_scales`
        cost_ME = np.square(weight_ME / _storable(_widest(weight_ME))) + np.float32(MIDDLE**2 / 2)
    steps_M1 = choose_scales(weight_ME, cost_ME)
    return in_pairs(_levels(weight_ME, steps_M1)), steps_M1[:, 0]


def choose_scales(weight_ME: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Scales (M, 1) of groups, as `runtime.schemes.int4.quantise_groups` says, with errors that count `cost` times.

    The costs are (E,) or (M, E). Scales are float32 numbers that are exact in float16. A group may be shorter than 32.
    Raises ValueError for weights that are too large for such a scale.
    """
    widest_M1 = _widest(weight_ME)
    if not (np.abs(widest_M1) < 65520).all():
        raise ValueError("a number is too large for a scale in float16")
    tried_MF = np.concatenate([_storable(widest_M1 * np.float32(factor)) for factor in FACTORS], axis=1)
    errors = [
        _sums(np.square(_levels(weight_ME, steps_M1) * steps_M1 - weight_ME) * cost)
        for steps_M1 in np.split(tried_MF, len(FACTORS), axis=1)
    ]
    best_M1 = np.take_along_axis(tried_MF, np.concatenate(errors, axis=1).argmin(1)[:, None], 1)
    levels_ME = _levels(weight_ME, best_M1)
    counted_ME = cost * levels_ME
    squares_M1 = _sums(levels_ME * counted_ME)
    with np.errstate(invalid="ignore"):
        return np.where(squares_M1 > 0, _storable(_sums(counted_ME * weight_ME) / squares_M1), best_M1)


def in_pairs(levels_OI: np.ndarray) -> np.ndarray:
    """Levels -8..7 -> bytes of two codes (O, I / 2)."""
    codes_OI = (levels_OI + MIDDLE).astype(np.uint8)
    return np.asarray(codes_OI[:, 0::2] | (codes_OI[:, 1::2] << 4))


def _widest(weight_ME: np.ndarray) -> np.ndarray:
    """Scales (M, 1) that give the largest weight of each group the level -8."""
    return np.take_along_axis(weight_ME, np.abs(weight_ME).argmax(1)[:, None], 1) / np.float32(-MIDDLE)


def _levels(weight_ME: np.ndarray, steps_M1: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(np.rint(weight_ME / steps_M1), -MIDDLE, MIDDLE - 1))


def _storable(steps_M1: np.ndarray) -> np.ndarray:
    """Scales rounded to finite numbers of float16, with 1 in place of 0."""
    with np.errstate(over="ignore"):
        steps_M1 = np.clip(steps_M1.astype(np.float16).astype(np.float32), -65504, 65504)
    return np.asarray(np.where(steps_M1 == 0, np.float32(1), steps_M1))


def _sums(weight_ME: np.ndarray) -> np.ndarray:
    """(M, 1), added in one order on all processors."""
    first_M8, *others = np.split(_in_whole_groups(weight_ME), 4, axis=1)
    return np.asarray(np.cumsum(functools.reduce(np.add, others, first_M8), axis=1, dtype=np.float32)[:, -1:])


def widened(array: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """A weight of few bits in float32 (O, I)."""
    levels_OI, steps_OI = array.astype(np.float32), scale[:, None]
    if array.dtype == np.uint8:
        codes_OI = np.stack([array & 15, array >> 4], axis=-1).reshape(len(array), -1)
        steps_OI = np.repeat(scale.astype(np.float32), GROUP, axis=1)[:, : codes_OI.shape[1]]
        levels_OI = codes_OI.astype(np.float32) - np.float32(8)
    return np.asarray(levels_OI * steps_OI)
