"""Values of settings: any library's numbers are taken, and other values are named."""

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llama_adapter.runtime.given import (
    real_number,
    require_above_zero,
    require_least,
    require_named,
    require_one_of,
    texts,
    whole_number,
)

SETTINGS = SimpleNamespace(none=None, zero=0, one=1, nan=float("nan"), empty="", path="a")


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


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: require_one_of("k", "c", (None, "a", "b")), "k must be a or b, got 'c'"),
        (lambda: require_least(SETTINGS, "one", "zero"), "zero must be at least 1, got 0"),
        (lambda: require_least(SETTINGS, "one", least=2), "one must be at least 2, got 1"),
        (lambda: require_least(SETTINGS, "nan", least=0), "nan must be at least 0, got nan"),
        (lambda: require_above_zero(SETTINGS, "one", "zero"), "zero must be above 0, got 0"),
        (lambda: require_above_zero(SETTINGS, "nan"), "nan must be above 0, got nan"),
        (lambda: require_named(SETTINGS, "path", "empty", hint="name one"), "empty is empty: name one"),
    ],
)
def test_settings_out_of_range_are_named(check: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check()


def test_settings_at_their_limits_and_missing_ones_are_taken() -> None:
    require_one_of("k", None, (None, "a"))
    require_least(SETTINGS, "none", "one")
    require_least(SETTINGS, "zero", least=0)
    require_named(SETTINGS, "none", "path", hint="")
