"""8-bit and 4-bit weights on a GPU: answers and scores compared with those of widened weights on the same GPU."""

import functools
from typing import Any

import pytest

from tests.cuda.device import GRAPHS, IS_GPU, loaded
from tests.cuda.test_captioner import answers, scores


@functools.cache
def widened(precision: str) -> tuple[list[tuple[str, tuple[int, ...]]], list[float]]:
    captioner = loaded(dtype="bfloat16", precision=precision, operators="aten")
    return answers(captioner), scores(captioner)


# The limits are on log-probabilities, which bfloat16 rounds coarsely.
@pytest.mark.parametrize(
    ("precision", "operators", "layer", "limit"),
    [
        ("int8", "auto", "PackedLinear", 0.2),
        ("int8", "w8a8", "RoundedLinear", 0.4),
        ("int4", "auto", "PackedLinear", 0.4),
    ],
)
@pytest.mark.parametrize("mode", ["eager", GRAPHS])
@pytest.mark.proves("int8 weights", "CUDA")
@pytest.mark.proves("int4 weights", "CUDA")
def test_answers_are_those_of_widened_weights(
    precision: str, operators: str, layer: str, limit: float, mode: str
) -> None:
    captioner = loaded(dtype="bfloat16", precision=precision, operators=operators, mode=mode)
    if IS_GPU:
        decoder: Any = captioner._engine._runner._decoder  # type: ignore[attr-defined]
        assert any(type(module).__name__ == layer for module in decoder.modules())

    expected, their_scores = widened(precision)
    pairs = zip(answers(captioner), expected, strict=True)
    differing = [(ours[0], theirs[0]) for ours, theirs in pairs if ours != theirs]
    largest = max(abs(one - other) for one, other in zip(scores(captioner), their_scores, strict=True))
    print(f"{precision}, {operators}, {mode}: scores differ by at most {largest:.4f}, {differing=}")
    assert largest < limit
    assert differing == []
