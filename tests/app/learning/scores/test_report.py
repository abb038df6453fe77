"""All figures of a data set, and reports that show each of them, escape every text, and have pictures of the worst."""

import base64
import json
import math
from dataclasses import asdict, replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from statistics import NormalDist

import pytest
from PIL import Image
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.learning.scores import scoring
from llama_adapter.app.learning.scores.compare import compare
from llama_adapter.app.learning.scores.intervals import Draws, Figure
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.report import THUMBNAIL_SIDE, as_html, as_json, as_markdown, thumbnail_of
from llama_adapter.app.learning.scores.scoring import (
    LEAST_GAP,
    MME_COGNITION,
    MME_PERCEPTION,
    Scores,
    score,
    threshold_hint,
)
from tests.app.learning.scores.outcomes import outcome

FEW = Draws(count=20)


def answered(answer: str, right: str, *, digest: str = "", part: str = "", sure: float | None = None) -> Outcome:
    shares = None if sure is None else ((sure, 1 - sure) if answer == "yes" else (1 - sure, sure))
    return outcome(answer, right, choices=("yes", "no"), probabilities=shares, digest=digest, part=part)


def test_popes_table_has_a_row_for_each_part_and_one_for_all() -> None:
    found = score(
        [
            answered("yes", "yes", part="random"),
            answered("yes", "no", part="random"),
            answered("no", "no", part="popular"),
        ],
        draws=FEW,
    )

    assert list(found.parts) == ["(all)", "random", "popular"]
    assert {name: (own["accuracy"].value, own["accuracy"].count) for name, own in found.parts.items()} == {
        "(all)": (pytest.approx(2 / 3), 3),
        "random": (0.5, 2),
        "popular": (1.0, 1),
    }
    assert found.parts["random"]["share of yes"].value == 1.0
    assert found.parts["popular"]["precision"].value is None


def test_classes_have_the_number_of_their_examples() -> None:
    found = score([answered("yes", "yes"), answered("no", "yes"), answered("no", "no")], draws=FEW)

    assert {name: own["recall"].count for name, own in found.classes.items()} == {"yes": 2, "no": 1}
    assert found.classes["yes"]["recall"].value == 0.5


@pytest.mark.parametrize(("answer", "low", "high"), [("yes", 0.2065, 1.0), ("no", 0.0, 0.7935)])
def test_a_class_with_one_picture_is_not_certain(answer: str, low: float, high: float) -> None:
    """Wilson's interval of 1 of 1 is 1 / (1 + z²) to 1; every bootstrap draw would give the same share."""
    outcomes = [answered("no", "no", digest=f"{index}") for index in range(20)]
    found = score([*outcomes, answered(answer, "yes", digest="rare")], draws=FEW).classes

    assert (found["yes"]["recall"].low, found["yes"]["recall"].high) == pytest.approx((low, high), abs=1e-4)
    assert (found["yes"]["F1"].low == 0.0) == (answer == "no")
    assert found["yes"]["F1"].low < found["yes"]["F1"].high
    assert (found["yes"]["precision"].value is None) == (found["yes"]["precision"].low is None) == (answer == "no")
    assert found["no"]["recall"].low == pytest.approx(20 / (20 + 1.96**2), abs=1e-4)
    assert score(outcomes, draws=Draws(count=0)).classes["no"]["recall"].low is None


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_scores_that_all_draws_give_are_not_certain(answer: str) -> None:
    """Six of six right, also with two questions about each picture: Wilson's interval of six, 6 / (6 + z²) to 1."""
    outcomes = [answered(answer, "yes", digest=f"{index // 2}", part="p", sure=0.6) for index in range(12)]
    found = score(outcomes, draws=FEW)
    bounds = (6 / (6 + 1.96**2), 1.0) if answer == "yes" else (0.0, 1.96**2 / (6 + 1.96**2))

    for figures in (found.figures, found.parts["p"]):
        assert (figures["accuracy"].low, figures["accuracy"].high) == pytest.approx(bounds, abs=1e-4)
    assert (found.figures["balanced accuracy"].low, found.figures["balanced accuracy"].high) == (None, None)
    exact = score([outcome(answer, "yes", digest=f"{index}") for index in range(6)], draws=FEW).figures["exact"]
    assert (exact.low, exact.high) == pytest.approx(bounds, abs=1e-4)


def test_questions_about_one_picture_widen_the_interval_of_a_class() -> None:
    """Ten copies of each answer are no further evidence: Wilson's interval alone would be as narrow as if they were."""
    outcomes = [answered("yes" if index < 3 else "no", "yes", digest=f"{index}") for index in range(6)]
    alone, copied = (score(outcomes * times, draws=Draws()).classes["yes"]["recall"] for times in (1, 10))

    assert alone.value == copied.value == 0.5
    assert (alone.low, alone.high) == pytest.approx((0.188, 0.812), abs=1e-3)
    assert copied.low <= alone.low + 0.02
    assert copied.high >= alone.high - 0.02


@pytest.mark.parametrize(("parts", "totals"), [(MME_PERCEPTION, {"perception": 2000.0}), (MME_COGNITION[1:], {})])
def test_mmes_totals_want_all_of_its_parts(parts: tuple[str, ...], totals: dict[str, float]) -> None:
    outcomes = [answered(answer, answer, digest=part, part=part) for part in parts for answer in ("yes", "no")]

    assert score(outcomes, draws=FEW).totals == totals


def test_the_surest_wrong_answers_are_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        answered("yes", "no", sure=0.6),
        answered("yes", "yes", sure=0.99),
        answered("no", "yes", sure=0.9),
        answered("yes", "no", sure=0.7),
    ]
    monkeypatch.setattr(scoring, "NUM_WORST", 2)
    found = score(outcomes, draws=FEW).worst

    assert [one.outcome for one in found] == [outcomes[2], outcomes[3]]
    assert [one.confidence for one in found] == [0.9, 0.7]


def test_open_answers_have_parts_of_their_own_figures() -> None:
    outcomes = [outcome("two", "2", part="count"), outcome("red", "blue", part="colour")]
    found = score(outcomes, draws=FEW)

    assert found.task == "open"
    assert found.parts["count"]["normalised"].value == 1.0
    assert found.parts["colour"]["exact"].value == 0.0
    assert [one.outcome for one in found.worst] == [outcomes[1]]


def test_a_part_has_the_figures_that_it_has_alone() -> None:
    outcomes = [
        answered(answer, "yes", digest=f"{index // 2}", part=part)
        for part in ("random", "popular")
        for index, answer in enumerate(("yes", "no", "yes", "yes", "no", "no", "yes", "no"))
    ]
    alone = score([one for one in outcomes if one.part == "popular"], draws=FEW)

    assert score(outcomes, draws=FEW).parts["popular"]["accuracy"] == alone.figures["accuracy"]
    assert score(outcomes, draws=FEW).parts["popular"] == alone.parts["popular"]


def test_choices_that_differ_by_case_alone_are_told_apart() -> None:
    one = outcome("ring", "Ring", choices=("ring", "Ring"))
    found = score([one, replace(one, answer="Ring"), replace(one, answer="RING.")], draws=FEW)

    assert found.confusion.counts == ((0, 0), (2, 1)), "in other case, an answer names the first choice"


def scored(*sure: float) -> Scores:
    """Scores for an equal number of eights and then threes, given the probability of "eight" for each."""
    outcomes = [
        outcome(
            "eight" if one > 0.5 else "three",
            "eight" if index < len(sure) / 2 else "three",
            picture=f"{index}.png",
            choices=("eight", "three"),
            probabilities=(one, 1 - one),
        )
        for index, one in enumerate(sure)
    ]
    return score(outcomes, draws=FEW)


def test_a_name_that_always_loses_is_hinted_at_in_every_report() -> None:
    found = scored(0.2, 0.3, 0.25, 0.1, 0.01, 0.02)

    assert (found.figures["accuracy"].value, found.figures["ROC-AUC"].value) == (0.5, 1.0)
    assert "balanced accuracy is 50.0%" in found.hint
    assert "ask --calibrate" in found.hint
    assert found.hint in json.loads(as_json(found))["notes"]
    for report in (as_markdown(found).replace("\\", ""), as_html(found)):
        assert "ask --calibrate" in report


def test_there_is_no_hint_where_the_threshold_is_not_the_fault() -> None:
    assert scored(0.9, 0.8, 0.7, 0.1, 0.2, 0.3).hint is None, "all are right"
    assert scored(0.2, 0.3, 0.25, 0.3, 0.2, 0.26).hint is None, "chance"
    assert scored(0.1, 0.2, 0.3, 0.9, 0.8, 0.7).hint is None, "all are wrong, and the order too"


@pytest.mark.parametrize("distance", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
def test_there_is_no_hint_for_the_best_threshold_between_two_normal_distributions(distance: float) -> None:
    normal = NormalDist()
    area, share = normal.cdf(distance / math.sqrt(2)), normal.cdf(distance / 2)
    figures = {name: Figure(value=value, count=9) for name, value in (("ROC-AUC", area), ("balanced accuracy", share))}

    assert threshold_hint(figures, num_classes=2) is None
    assert 0 <= area - share < 0.084 < LEAST_GAP
    worse = {**figures, "balanced accuracy": Figure(value=area - LEAST_GAP - 1e-9, count=9)}
    assert threshold_hint(worse, num_classes=2) is not None
    assert threshold_hint(worse, num_classes=3) is None


DRAWS = Draws(count=200, seed=4)
EVIL = "<script>alert('x')</script> | *\u202edog*"


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def asked(marks: str, *, name: str = "{}.png", right: tuple[str, str] = ("yes", "no")) -> list[Outcome]:
    """Yes-or-no outcomes, two per picture; `+` is a right answer, `-` a wrong one."""
    return [
        outcome(
            right[index % 2] if mark == "+" else {"yes": "no", "no": "yes"}[right[index % 2]],
            right[index % 2],
            picture=name.format(index // 2),
            question=f"Is it {index % 2}?",
            choices=("yes", "no"),
            probabilities=(0.75, 0.25) if (mark == "+") == (right[index % 2] == "yes") else (0.125, 0.875),
            part="odd" if index % 4 > 1 else "even",
        )
        for index, mark in enumerate(marks)
    ]


def test_the_markdown_report_is_this(snapshot: SnapshotAssertion) -> None:
    one, other = asked("++-++-++++-+"), asked("+++++++++---")
    comparison = compare(one, other, names=("base", "trained"), draws=DRAWS)

    assert as_markdown(score(other, model="trained", draws=DRAWS), comparison) == snapshot


@pytest.mark.parametrize(
    ("marks", "draws", "has_wilsons"),
    [
        ("++++++++", DRAWS, True),
        ("--------", DRAWS, True),
        ("+++-" * 3, DRAWS, True),  # of one part, all are right
        ("+--+" * 3, DRAWS, False),
        ("++++++++", Draws(count=0), False),
    ],
)
def test_a_report_says_whether_it_has_intervals_after_wilson(marks: str, draws: Draws, has_wilsons: bool) -> None:
    found = as_markdown(score(asked(marks), draws=draws))
    assert ("Right answers of 0 and 100 % have Wilson's interval for the number of pictures." in found) is has_wilsons
    assert ("No intervals: they need draws" in found) is (draws.count == 0)


def test_json_holds_every_figure_and_the_worst_answers() -> None:
    outcomes = asked("++-++-++")
    scores, compared = score(outcomes, model="m", draws=DRAWS), compare(outcomes, asked("++++++++"), draws=DRAWS)
    comparison = replace(compared, note="Asked *otherwise*.")
    found = json.loads(as_json(scores, comparison))

    assert (found["format"], found["version"]) == ("llama-adapter-scores", 1)
    assert found["figures"] == {name: asdict(one) for name, one in scores.figures.items()}
    assert found["parts"]["odd"]["accuracy"]["value"] == 0.75
    assert found["confusion"]["counts"] == [[3, 1], [1, 3]]
    assert found["worst"][0]["outcome"]["question"] == "Is it 0?"
    assert (found["comparison"]["mcnemar"]["p_value"], found["comparison"]["note"]) == (0.5, comparison.note)
    assert r"Asked \*otherwise\*." in as_markdown(scores, comparison)
    assert found["draws"] == {"count": 200, "seed": 4}


@pytest.mark.parametrize(
    ("one", "other", "has_own_pictures", "said"),
    [
        ("-" * 12, "+" * 12, True, "b is better than a. The accuracy of b is 100.0%, that of a 0.0%: a difference of"),
        ("+" * 12, "-" * 11 + "+", True, "a is better than b."),
        ("-" * 12, "+++++-------", True, "It is open whether a or b is better."),  # p = 0.0625
        ("-" * 12, "+++++-------", False, "b is better than a."),  # two questions a picture: the interval decides
        ("-" * 10, "+" * 10, False, "It is open whether a or b is better."),  # five pictures are too few
        ("+-" * 6, "-+" * 6, False, "It is open whether a or b is better."),
    ],
)
def test_a_comparison_ends_with_the_better_model(one: str, other: str, has_own_pictures: bool, said: str) -> None:
    first, second = (
        [replace(each, picture=f"{index}.png") if has_own_pictures else each for index, each in enumerate(asked(marks))]
        for marks in (one, other)
    )
    compared, scores = compare(first, second, names=("a", "b"), draws=DRAWS), score(second, draws=DRAWS)
    last = as_markdown(replace(scores, worst=()), compared).splitlines()[-1]

    assert last.startswith(f"**{said}")
    assert last.endswith(f"; McNemar's p = {compared.mcnemar.p_value:.3g}).**")
    assert said[:20] in Page(as_html(scores, compared)).words


def test_captions_are_compared_by_cider() -> None:
    one = [outcome("a sky", "two red cars on grass", picture=f"{index}.png") for index in range(5)]
    other = [replace(each, answer="two red cars on grass") for each in one]
    others = [outcome("a dog", "a dog runs", picture="9.png")]
    compared = compare([*one, *others], [*other, *others], names=("a", "b"), draws=DRAWS)

    assert "**b is better than a. The CIDEr-D of b is" in as_markdown(score(other, draws=DRAWS), compared)


def test_undefined_figures_are_null_and_a_dash() -> None:
    scores = score(asked("++", right=("no", "no")), draws=DRAWS)

    assert json.loads(as_json(scores))["parts"]["(all)"]["precision"]["value"] is None
    assert "| even | 100.0% | - | - | - | 0.0% | 100.0% | 200.0 | 2 |" in as_markdown(scores)


def test_the_page_shows_the_same_cells_as_the_markdown() -> None:
    scores = score(asked("++-++-++++-+"), draws=DRAWS)
    page = Page(as_html(scores))

    rows = [line.strip("| ").split(" | ") for line in as_markdown(scores).splitlines() if line.startswith("| ")]
    cells = [cell.replace("\\", "") for row in rows for cell in row if not cell.startswith("---")]
    assert len(cells) > 50
    assert [cell for cell in cells if cell not in page.words] == []


def test_the_worst_errors_have_small_pictures_and_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    Image.new("RGBA", (900, 300), (200, 10, 10, 255)).save(tmp_path / "0.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    scores = score(asked("-+-+", name=str(tmp_path / "{}.png")), draws=DRAWS)
    page = Page(as_html(scores, pictures=[thumbnail_of(one.outcome.picture) for one in scores.worst]))

    shown = [attributes for tag, attributes in page.tags if tag == "img"]
    assert [one["alt"] for one in shown] == [str(tmp_path / "0.png")]
    kind, _, data = (shown[0]["src"] or "").partition(",")
    assert kind == "data:image/jpeg;base64"
    picture = Image.open(BytesIO(base64.b64decode(data)))
    assert picture.size == (THUMBNAIL_SIDE, 53)
    red, green, _ = picture.getpixel((80, 26))
    assert red > 180 > 40 > green
    assert "picture not readable" in page.words
    addresses = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert addresses == [shown[0]["src"]]
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}


def test_text_is_shown_and_never_run() -> None:
    one = outcome(EVIL, EVIL + " cat", picture=EVIL, question=EVIL, part=EVIL)
    scores = score([one, outcome("", "red")], model=EVIL, draws=DRAWS)
    markdown, html = as_markdown(scores), as_html(scores)

    assert "<script" not in html
    assert "\u202e" not in html + markdown
    assert r"<script>alert('x')</script> | *\u202edog*" in Page(html).words
    assert "<script" not in markdown.replace(r"\<", "")
    assert json.loads(as_json(scores))["worst"][0]["outcome"]["picture"] == EVIL  # JSON data are not escaped


def test_captions_have_a_report() -> None:
    outcomes = [
        outcome("a small dog runs", "a small dog runs home", "a dog"),
        outcome("a blue sky", "two red cars on grass"),
    ]
    markdown = as_markdown(score(outcomes, draws=DRAWS))

    assert "## Worst captions" in markdown
    assert markdown.index("a blue sky") < markdown.index("a small dog runs")
    assert "| BLEU-1 | 0.372" in markdown


def test_many_classes_have_a_list_of_confusions() -> None:
    names = tuple(f"class {index}" for index in range(31))
    outcomes = [
        outcome(answer, right, choices=names)
        for right, answer in ((names[1], names[2]), (names[3], names[4]), (names[3], names[4]), (names[5], names[5]))
    ]
    markdown = as_markdown(score(outcomes, draws=DRAWS))

    assert "| class 3 | class 4 | 2 |\n| class 1 | class 2 | 1 |\n\nThe whole matrix of 31 classes" in markdown
    assert "Confusion matrix" not in markdown
