"""Values of settings: any library's numbers are taken, and other values are named."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from llama_adapter.runtime.given import real_number, texts, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_any_integer_is_an_int(value: Any) -> None:
    assert whole_number("k", value, least=3) == 3
    assert type(whole_number("k", value)) is type(real_number("k", value)) is int


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_any_real_number_is_a_float(value: Any) -> None:
    assert real_number("p", value) == 0.5
    assert type(real_number("p", value)) is float


@pytest.mark.parametrize(
    ("check", "kind", "values"),
    [
        (whole_number, "a whole number", [True, np.bool_(True), 2.0, "3", None, np.ones(3, int)]),
        (real_number, "a number", [True, np.bool_(True), 1j, "0.5", None]),
    ],
)
def test_other_values_are_no_numbers(check: Any, kind: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"k must be {kind}, got"):
            check("k", value)


def test_a_text_is_one_of_several() -> None:
    assert texts("stop", "ab") == texts("stop", ["ab"]) == texts("stop", iter(["ab"])) == ("ab",)
    for value in (5, None, b"ab", [5], ["a", ""], ""):
        with pytest.raises(ValueError, match="stop must be texts that are not empty, got"):
            texts("stop", value)
