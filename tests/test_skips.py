"""Tests may be skipped only for the allowed reasons."""

from typing import Literal

import pytest

from tests.conftest import fail_unless_allowed


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [("this processor has no avx512f", "skipped"), ("could not import 'openai': No module named 'openai'", "failed")],
)
def test_a_skip_without_an_allowed_reason_is_a_failure(reason: str, outcome: Literal["skipped", "failed"]) -> None:
    place = ("tests/test_x.py", 3, f"Skipped: {reason}")
    report = pytest.TestReport("test_x", ("test_x.py", 3, "test_x"), {}, "skipped", place, "setup")

    fail_unless_allowed(report)

    assert report.outcome == outcome
