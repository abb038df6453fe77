"""Thresholds, the undecided band, and typed choices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.captioning.decisions.rule import Rule, decide, explain

SHARES = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("share", "decision"), [(0.0, "no"), (0.45, "no"), (0.46, None), (0.54, None), (0.55, "yes"), (1.0, "yes")]
)
def test_of_two_choices_the_band_around_the_threshold_stays_undecided(share: float, decision: str | None) -> None:
    assert decide({"yes": share, "no": 1 - share}, Rule(threshold=0.5, band=0.1)) == decision


@given(share=SHARES, threshold=SHARES, narrow=SHARES, wide=SHARES)
def test_a_wider_band_never_decides_more(share: float, threshold: float, narrow: float, wide: float) -> None:
    narrow, wide = sorted((narrow, wide))
    by_wide = decide({"yes": share, "no": 1 - share}, Rule(threshold=threshold, band=wide))
    by_narrow = decide({"yes": share, "no": 1 - share}, Rule(threshold=threshold, band=narrow))

    inside = wide / 2 < threshold < 1.0 - wide / 2  # outside, the band is cut off at 0 or 1
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


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_numbers_out_of_range_are_refused(wrong: float) -> None:
    for name, values in (
        ("threshold", {"threshold": wrong}),
        ("band", {"band": wrong}),
        ("abstain", {"abstain": (wrong, 0.5)}),
        ("abstain", {"abstain": (0.6, 0.4)}),
        ("threshold", {"threshold": 0.9, "abstain": (0.2, 0.4)}),
    ):
        with pytest.raises(ValueError, match=f"^{name} must"):
            Rule(**values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least two"):
        decide({"yes": 1.0}, Rule())


def test_the_rule_in_a_sentence(snapshot: SnapshotAssertion) -> None:
    rules = (Rule(), Rule(band=0.0), Rule(threshold=0.5, abstain=(0.2, 0.8)))
    assert [explain(choices, rule) for rule in rules for choices in (("yes", "no"), ("a", "b", "c"))] == snapshot
