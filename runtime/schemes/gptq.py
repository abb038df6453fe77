"""Rounding that preserves a layer's outputs: GPTQ (Frantar et al., 2022, arXiv 2210.17323), from the paper's formulas.

Rounding to nearest minimises the error of the weights W. GPTQ minimises the error of the output X Wᵀ: the squared error
of one output is e H eᵀ, with the Hessian H = XᵀX and the error e of the output's weights. Columns are rounded one after
the other. After each, the weights that are not yet rounded are changed to compensate its error, in proportion to a row
of the Cholesky factor of H⁻¹.
"""

# O outputs, I inputs, G inputs of one group

from collections.abc import Callable

import torch
from torch import Tensor

_OUTPUTS_AT_ONCE = 4096
# Multiples of the median of H's diagonal. The larger ones are tried if H is not positive definite in float32.
_DAMPINGS = (0.01, 0.1, 1.0)

# From weights (O, G) and the cost (G,) of a squared error in each column to scales float32 (O, 1).
ChooseScales = Callable[[Tensor, Tensor], Tensor]


def round_columns(
    weight_OI: Tensor, hessian_II: Tensor, *, group: int, choose_scales: ChooseScales, levels: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Weight (O, I) of any float type -> levels float32 (O, I) and scales (O, I / group, rounded up).

    A weight is about level * scale. `hessian_II` is float32 and symmetric; its unit does not matter. Each `group` of
    inputs has its own scales, which are chosen when its first column is reached. Groups with the largest inputs come
    first, so that the other groups compensate their errors. An input that is always 0 is rounded to nearest. If no
    damping makes H positive definite, all inputs are, and the diagonal of H weights the errors when scales are chosen.

    Raises ValueError for weights or a Hessian that are not finite, and what `choose_scales` raises.
    """
    num_outputs, num_inputs = weight_OI.shape
    diagonal_I = hessian_II.diagonal()
    if not bool(diagonal_I.isfinite().all()):
        raise ValueError("an input is infinite or NaN")
    if not bool(diagonal_I.any()):  # no input has a value, so all weights count alike
        hessian_II = torch.eye(num_inputs)
        diagonal_I = hessian_II.diagonal()
    order_I = _order(diagonal_I, group=group)
    factor_II = _inverse_factor(hessian_II, order_I)
    cost_I = diagonal_I[order_I] if factor_II is None else factor_II.diagonal() ** -2
    levels_OI, scales = torch.empty(num_outputs, num_inputs), torch.empty(num_outputs, -(-num_inputs // group))
    for start in range(0, num_outputs, _OUTPUTS_AT_ONCE):
        part = slice(start, start + _OUTPUTS_AT_ONCE)
        rest_OI = weight_OI[part].float()[:, order_I]
        if not bool(rest_OI.isfinite().all()):
            raise ValueError("a number is infinite or NaN")
        first = 0
        while first < num_inputs:
            number = int(order_I[first]) // group
            last = first + min(group, num_inputs - number * group)
            scales_O1 = choose_scales(rest_OI[:, first:last], cost_I[first:last])
            own_GG = None if factor_II is None else factor_II[first:last, first:last]
            levels_OG, errors_OG = _round_group(rest_OI[:, first:last], scales_O1, own_GG, levels=levels)
            if factor_II is not None:
                rest_OI[:, last:] -= errors_OG @ factor_II[first:last, last:]
            levels_OI[part, order_I[first:last]] = levels_OG
            scales[part, number] = scales_O1[:, 0]
            first = last
    return levels_OI, scales


def _round_group(
    weight_OG: Tensor, scales_O1: Tensor, factor_GG: Tensor | None, *, levels: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Round the columns one after the other.

    Returns levels (O, G), and the errors divided by the factor's diagonal (O, G).
    """
    if factor_GG is None:
        return (weight_OG / scales_O1).round_().clamp_(*levels), torch.zeros_like(weight_OG)
    rest_OG, levels_OG, errors_OG = weight_OG.clone(), torch.empty_like(weight_OG), torch.empty_like(weight_OG)
    for column in range(weight_OG.shape[1]):
        wanted_O1 = rest_OG[:, column, None]
        level_O1 = (wanted_O1 / scales_O1).round_().clamp_(*levels)
        error_O1 = (wanted_O1 - level_O1 * scales_O1) / factor_GG[column, column]
        rest_OG[:, column + 1 :] -= error_O1 * factor_GG[column, column + 1 :]
        levels_OG[:, column, None], errors_OG[:, column, None] = level_O1, error_O1
    return levels_OG, errors_OG


def _order(diagonal_I: Tensor, *, group: int) -> Tensor:
    """Indices of the inputs: groups by descending sum of the diagonal, and inputs in a group by descending diagonal.

    Equal values keep their order.
    """
    groups = torch.split(diagonal_I, group)
    sums = torch.stack([part.sum() for part in groups])
    first = sums.argsort(descending=True, stable=True).tolist()
    return torch.cat([groups[n].argsort(descending=True, stable=True) + n * group for n in first])


def _inverse_factor(hessian_II: Tensor, order_I: Tensor) -> Tensor | None:
    """The upper Cholesky factor U of the damped inverse, H⁻¹ = UᵀU, inputs in the given order; None if it fails.

    The paper adds a part of the mean of H's diagonal, but a few outliers make the mean too large for all other inputs.
    Here a part of the median is added. Inputs are scaled to equal size for the factorisation, and U is scaled back.
    """
    squares_I = hessian_II.diagonal()[order_I].clamp(min=0)
    typical = squares_I.median() if squares_I.median() > 0 else squares_I.mean()
    sizes_I = torch.where(squares_I > 0, squares_I, typical).sqrt()
    scaled_II = hessian_II[order_I][:, order_I].div_(sizes_I).div_(sizes_I[:, None])
    diagonal_I, share_I = scaled_II.diagonal(), typical / sizes_I.square()
    own_I = diagonal_I.clone()
    for damping in _DAMPINGS:
        diagonal_I.copy_(own_I + damping * share_I)
        lower_II, is_faulty = torch.linalg.cholesky_ex(scaled_II)
        if is_faulty:
            continue
        upper_II: Tensor
        upper_II, is_faulty = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
        if not is_faulty and bool(upper_II.isfinite().all()):
            return upper_II.div_(sizes_I)
    return None
