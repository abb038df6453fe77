"""A calibration is read back from its file unchanged, and decides on records as stated in it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.captioning.decisions.calibration import Calibration, read_calibration, write_calibration
from llama_adapter.app.captioning.decisions.decider import UNDECIDED, Decider
from llama_adapter.app.captioning.decisions.measures import apply_temperature
from llama_adapter.app.captioning.decisions.rule import Rule
from llama_adapter.app.learning.calibration.fitting import Examples, calibrate
from llama_adapter.app.learning.calibration.report import Mistake, format_calibration
from llama_adapter.runtime.errors import UsageError


def examples(count: int = 200) -> Examples:
    """Examples of an overconfident model: its logits are too large by a factor of 3."""
    random = np.random.default_rng(5)
    true_N = random.random(count)
    labels_N = (random.random(count) > true_N).astype(np.int64)
    raw_NC = apply_temperature(np.stack((true_N, 1 - true_N), axis=1), 1 / 3)
    return Examples(probabilities_NC=raw_NC, labels_N=labels_N, groups_N=np.arange(count))


def calibration(target_precision: float = 0.8) -> Calibration:
    return calibrate(
        examples(), choices=("Yes", "No"), question="Red?", model_digest="abc", target_precision=target_precision
    )


def test_a_calibration_makes_too_sure_probabilities_less_so_in_its_own_order() -> None:
    found = replace(calibration(), temperature=2.0)
    assert found.apply({"No": 0.2, "Yes": 0.8}) == pytest.approx({"Yes": 2 / 3, "No": 1 / 3})
    with pytest.raises(ValueError, match="Wanted the choices Yes, No, got Yes, Maybe"):
        found.apply({"Yes": 0.5, "Maybe": 0.5})

    found = calibration()
    assert found.temperature == pytest.approx(3, rel=0.3)
    assert found.after.nll < found.before.nll
    assert found.after.ece < found.before.ece
    assert found.held_out is not None
    assert found.after.nll <= found.held_out.nll < found.before.nll


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    earlier = replace(calibration(), promise=None)  # as in files without promises
    for found in (calibration(), calibration(target_precision=1.0), replace(calibration(), held_out=None), earlier):
        write_calibration(found, str(tmp_path / "c.json"))
        assert read_calibration(str(tmp_path / "c.json")) == found
    content = json.loads((tmp_path / "c.json").read_text())
    assert (content["format"], content["version"]) == ("llama-adapter-calibration", 1)
    del content["promise"]
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert read_calibration(str(tmp_path / "c.json")) == earlier
    assert "nothing is promised" in format_calibration(earlier)


def test_an_invalid_calibration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_calibration(calibration(), str(path))
    valid = json.loads(path.read_text())
    changes = json.loads(Path(__file__).with_name("invalid_calibrations.json").read_text(encoding="utf-8"))

    changed = [json.dumps(valid | change).encode() for change in changes]
    for data in (*changed, b"", b"[]", b"null", b"\xff", b"{}", b"[" * 100_000):
        path.write_bytes(data)
        with pytest.raises(UsageError):
            read_calibration(str(path))


def test_its_own_examples_are_decided_with_the_precision_that_it_tells() -> None:
    found, asked = calibration(), examples()
    decider = Decider(calibration=found)

    taken = [
        label
        for row, label in zip(asked.probabilities_NC, asked.labels_N, strict=True)
        if decider.decide({"Yes": float(row[0]), "No": float(row[1])}).text == "Yes"
    ]
    assert found.threshold is not None
    assert len(taken) == found.threshold.count
    assert taken.count(0) / len(taken) == pytest.approx(found.threshold.precision)
    assert found.threshold.precision >= 0.8


def test_of_more_choices_the_threshold_is_on_the_likeliest() -> None:
    random = np.random.default_rng(1)
    true_NC = random.dirichlet([0.5] * 3, size=300)
    labels_N = (true_NC.cumsum(axis=1) > random.random((300, 1))).argmax(axis=1)
    found = calibrate(
        Examples(probabilities_NC=true_NC, labels_N=labels_N, groups_N=np.arange(300)),
        choices=("a", "b", "c"),
        question=None,
        model_digest="",
        target_precision=0.9,
    )

    assert found.threshold is not None
    assert found.before.accuracy < 0.9
    decisions = [Decider(calibration=found).decide(dict(zip("abc", row.tolist(), strict=True))).text for row in true_NC]
    decided = [(text, label) for text, label in zip(decisions, labels_N, strict=True) if text != UNDECIDED]
    assert np.mean([text == "abc"[label] for text, label in decided]) >= 0.9
    assert "right among the answered (95 % confidence; " in format_calibration(found)


# Deciding


MADE = calibration()
SOFT = replace(MADE, temperature=2.0, threshold=None)  # calibrated, but without a threshold
SURE = replace(MADE, temperature=1.0)


@pytest.mark.parametrize(
    ("decider", "choice", "text", "probability"),
    [
        (Decider(), {"a": 0.3, "b": 0.4, "c": 0.3}, "b", 0.4),
        (Decider(rule=Rule.from_flags(None, (0.2, 0.8))), {"yes": 0.4, "no": 0.6}, UNDECIDED, 0.6),
        (Decider(calibration=SURE), {"Yes": 0.999, "No": 0.001}, "Yes", 0.999),
        # The flags override the threshold of the calibration.
        (Decider(rule=Rule.from_flags(1.0), calibration=SURE), {"Yes": 0.999, "No": 0.001}, "No", 0.001),
        (Decider(calibration=SOFT), {"Yes": 0.8, "No": 0.2}, "Yes", 0.666667),
        (Decider(), {"Yes": None, "No": 0.5}, UNDECIDED, None),
        (Decider(calibration=MADE), {"Yes": None, "No": 0.5}, UNDECIDED, None),
    ],
)
def test_a_decision_and_its_probability(
    decider: Decider, choice: dict[str, float | None], text: str, probability: float | None
) -> None:
    decided = decider.decide(choice)

    assert (decided.text, decided.probability) == (text, probability)
    assert decider.is_plain == (decider == Decider())
    assert decider.calibration is SOFT or decided.choice == choice


# Reports


def test_the_report(snapshot: SnapshotAssertion) -> None:
    mistakes = [Mistake(picture="a.png", answer="No", label="Yes", probability=0.93, line=7)] * 9
    asked = examples()
    unreachable = replace(asked, labels_N=np.where(asked.probabilities_NC[:, 0] > 0.9, 1, asked.labels_N))
    right = Examples(
        probabilities_NC=np.array([[0.9, 0.1], [0.2, 0.8]]), labels_N=np.array([0, 1]), groups_N=np.arange(2)
    )
    wrong = replace(right, labels_N=np.array([1, 0]))

    assert format_calibration(calibration(), mistakes=mistakes) == snapshot(name="mistakes")
    of_a_folder = format_calibration(calibration(), mistakes=[replace(mistakes[0], line=0)])
    assert "\n  a.png: No (0.93), labelled Yes" in of_a_folder
    many = replace(asked, labels_N=(asked.probabilities_NC[:, 0] < 0.5).astype(np.int64), groups_N=np.arange(200) // 4)
    for name, one in (("unreachable", unreachable), ("all right", right), ("all wrong", wrong), ("promised", many)):
        found = calibrate(one, choices=("Yes", "No"), question=None, model_digest="", target_precision=0.95)
        assert format_calibration(found) == snapshot(name=name)


def test_another_question_or_model_than_the_calibration_is_of_is_doubted() -> None:
    made = calibration()
    decider = Decider(calibration=made)
    assert made.question is not None

    assert not decider.doubts(prompts=[made.question], model_digests=[made.model_digest])
    assert len(decider.doubts(prompts=["Is it?"], model_digests=[made.model_digest])) == 1
    assert len(decider.doubts(prompts=[made.question], model_digests=["other"])) == 1
    assert not Decider().doubts(prompts=["Is it?"], model_digests=["other"])
    unreached = Decider(calibration=replace(made, threshold=None))
    (note,) = unreached.doubts(prompts=[made.question], model_digests=[made.model_digest])
    assert note.startswith("note: no threshold of this calibration reaches a precision of")
    assert not replace(unreached, rule=Rule()).doubts(prompts=[made.question], model_digests=[made.model_digest])
