"""Thresholds, the undecided band, and typed choices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.captioning.decisions.rule import Rule, decide, explain

SHARES = st.floats(0.0, 1.0)


def two(share: float) -> dict[str, float]:
    return {"yes": share, "no": 1 - share}


def three(green: float) -> dict[str, float]:
    return {"red": 0.9 - green, "green": green, "blue": 0.1}


BAND = Rule(threshold=0.5, band=0.1)  # of two choices, the band around the threshold stays undecided
RANGE = Rule.from_flags(None, (0.3, 0.9))  # which need not be centred
BOTH = Rule.from_flags(0.5, (0.2, 0.8))  # the range counts for two choices, and the threshold for more


@pytest.mark.parametrize(
    ("rule", "shares", "decision"),
    [
        *((BAND, two(share), "no") for share in (0.0, 0.45)),
        *((BAND, two(share), None) for share in (0.46, 0.54)),
        *((BAND, two(share), "yes") for share in (0.55, 1.0)),
        (BAND, three(0.58), "green"),
        (Rule(threshold=0.6, band=0.0), three(0.58), None),  # the likeliest is not likely enough
        *((RANGE, two(share), decided) for share, decided in ((0.3, "no"), (0.31, None), (0.89, None), (0.9, "yes"))),
        (BOTH, two(0.6), None),
        (BOTH, three(0.6), "green"),
    ],
)
def test_a_rule_decides_where_a_share_is_clear(
    rule: Rule | None, shares: dict[str, float], decision: str | None
) -> None:
    assert rule is not None
    assert decide(shares, rule) == decision


@given(share=SHARES, threshold=SHARES, narrow=SHARES, wide=SHARES)
def test_a_wider_band_never_decides_more(share: float, threshold: float, narrow: float, wide: float) -> None:
    narrow, wide = sorted((narrow, wide))
    by_wide = decide(two(share), Rule(threshold=threshold, band=wide))
    by_narrow = decide(two(share), Rule(threshold=threshold, band=narrow))

    inside = wide / 2 < threshold < 1.0 - wide / 2  # outside, the band is cut off at 0 or 1
    assert not inside or by_wide in (None, by_narrow)


@given(share=SHARES, threshold=SHARES)
def test_a_threshold_alone_decides_everything_of_two_choices(share: float, threshold: float) -> None:
    rule = Rule.from_flags(threshold)

    assert rule is not None
    decided = decide(two(share), rule)
    assert decided == ("yes" if share >= threshold or share == pytest.approx(threshold, abs=1e-9) else "no")


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
