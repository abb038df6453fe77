"""The support table equals what the tests prove, and tests may be skipped only for the allowed reasons."""

from typing import Literal

import pytest

from tests import support
from tests.conftest import fail_unless_allowed
from tests.support import FEATURES, PAGE, Proof, page, proofs


def test_the_page_is_up_to_date_and_every_feature_is_proved_somewhere() -> None:
    found = list(proofs())

    assert PAGE.read_text(encoding="utf-8") == page(iter(found)), "run `python -m tests.support`"
    proved = {proof.feature for proof in found}
    assert {feature for _, features in FEATURES.values() for feature in features} == proved


@pytest.mark.parametrize(("feature", "columns"), [("teleport", ("CPU",)), ("doctor", ("NPU",)), ("graphs", ())])
def test_a_mark_that_is_no_cell_is_an_error(feature: str, columns: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no cell"):
        page(iter([Proof("tests/test_x.py::test_x", feature, columns)]))


def test_a_cell_without_a_test_is_not_run() -> None:
    text = page(iter([Proof("tests/test_x.py::test_x", "float32", ("CPU", "NPU"))]))

    assert f"| float32 | {support.RUN} | not run | {support.CONTRACT} | not run | not run |" in text


def test_a_test_on_hardware_shows_more_than_one_without() -> None:
    proofs = [Proof(f"tests/{place}/test_x.py::test_x", "int8 weights", ("CUDA",)) for place in ("llm", "cuda")]

    assert f"| int8 weights | not run | {support.CONTRACT} |" in page(iter(proofs[:1]))
    assert f"| int8 weights | not run | {support.RUN} |" in page(iter(proofs))


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [("this processor has no avx512f", "skipped"), ("could not import 'openai': No module named 'openai'", "failed")],
)
def test_a_skip_without_an_allowed_reason_is_a_failure(reason: str, outcome: Literal["skipped", "failed"]) -> None:
    place = ("tests/test_x.py", 3, f"Skipped: {reason}")
    report = pytest.TestReport("test_x", ("test_x.py", 3, "test_x"), {}, "skipped", place, "setup")

    fail_unless_allowed(report)

    assert report.outcome == outcome
