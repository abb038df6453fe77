"""The learning rate by step: it rises linearly, then falls as a cosine (Loshchilov and Hutter, 2017)."""

import math


def rate_at(step: int, *, num_steps: int, peak: float, warmup: float, final: float) -> float:
    """The learning rate of a step, which counts from 0. `warmup` is a share of the steps, `final` a share of `peak`."""
    num_warm = round(warmup * num_steps)
    if step < num_warm:
        return peak * (step + 1) / num_warm
    share = (step - num_warm) / max(num_steps - num_warm, 1)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))
