"""Thresholds, the band of no decision, and choices as people type them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.app.calibration.decisions import Rule, decide, explain

SHARES = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("share", "decision"), [(0.0, "no"), (0.45, "no"), (0.46, None), (0.54, None), (0.55, "yes"), (1.0, "yes")]
)
def test_of_two_choices_the_band_around_the_threshold_stays_undecided(share: float, decision: str | None) -> None:
    assert decide({"yes": share, "no": 1 - share}, Rule(threshold=0.5, band=0.1)) == decision


@given(share=SHARES, threshold=SHARES)
def test_without_a_band_everything_is_decided(share: float, threshold: float) -> None:
    assert decide({"yes": share, "no": 1 - share}, Rule(threshold=threshold, band=0.0)) is not None


@given(share=SHARES, threshold=SHARES, narrow=SHARES, wide=SHARES)
def test_a_wider_band_never_decides_more(share: float, threshold: float, narrow: float, wide: float) -> None:
    narrow, wide = sorted((narrow, wide))
    by_wide = decide({"yes": share, "no": 1 - share}, Rule(threshold=threshold, band=wide))
    by_narrow = decide({"yes": share, "no": 1 - share}, Rule(threshold=threshold, band=narrow))

    inside = wide / 2 < threshold < 1.0 - wide / 2  # at the ends the band is cut off
    assert not inside or by_wide in (None, by_narrow)


def test_of_more_choices_the_likeliest_counts_when_it_is_likely_enough() -> None:
    shares = {"red": 0.2, "green": 0.58, "blue": 0.22}

    assert decide(shares, Rule(threshold=0.5, band=0.1)) == "green"
    assert decide(shares, Rule(threshold=0.6, band=0.0)) is None


@pytest.mark.parametrize(("share", "decision"), [(0.3, "no"), (0.31, None), (0.89, None), (0.9, "yes")])
def test_a_range_of_no_decision_need_not_be_centred(share: float, decision: str | None) -> None:
    rule = Rule.from_flags(None, (0.3, 0.9))

    assert rule is not None
    assert decide({"yes": share, "no": 1 - share}, rule) == decision


@given(share=SHARES, threshold=SHARES)
def test_a_threshold_alone_decides_everything_of_two_choices(share: float, threshold: float) -> None:
    rule = Rule.from_flags(threshold)

    assert rule is not None
    decided = decide({"yes": share, "no": 1 - share}, rule)
    assert decided == ("yes" if share >= threshold or share == pytest.approx(threshold, abs=1e-9) else "no")


def test_with_both_a_range_counts_for_two_choices_and_the_threshold_for_more() -> None:
    rule = Rule.from_flags(0.5, (0.2, 0.8))

    assert rule is not None
    assert decide({"yes": 0.6, "no": 0.4}, rule) is None
    assert decide({"red": 0.6, "green": 0.3, "blue": 0.1}, rule) == "red"
    assert explain(("red", "green", "blue"), rule).startswith("The likeliest choice counts when it has at least 50%")


@pytest.mark.parametrize("abstain", [(0.6, 0.4), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 0.5)])
def test_a_range_that_is_none_is_refused(abstain: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="abstain must be two numbers"):
        Rule.from_flags(None, abstain)


def test_a_threshold_outside_of_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold must lie in the range of abstain, 0\.2\.\.0\.4, got 0\.9"):
        Rule.from_flags(0.9, (0.2, 0.4))


def test_fewer_than_two_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        decide({"yes": 1.0}, Rule())


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_rule_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Rule(threshold=value)
    with pytest.raises(ValueError, match="band"):
        Rule(band=value)


def test_the_rule_is_told_in_a_sentence() -> None:
    assert explain(("yes", "no"), Rule()) == "“yes” from 55% on, “no” up to 45%, and undecided between 45% and 55%."
    assert "undecided between" not in explain(("yes", "no"), Rule(band=0.0))
    assert explain(("a", "b", "c"), Rule()).startswith("The likeliest choice counts when it has at least 55%")
