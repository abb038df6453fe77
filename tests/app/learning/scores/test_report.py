"""Reports show every figure, escape every text, and contain small pictures of the worst answers."""

import base64
import json
from dataclasses import asdict, replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from syrupy.assertion import SnapshotAssertion

from llama_adapter.app.learning.scores.compare import compare
from llama_adapter.app.learning.scores.intervals import Draws
from llama_adapter.app.learning.scores.outcome import Outcome
from llama_adapter.app.learning.scores.report import THUMBNAIL_SIDE, as_html, as_json, as_markdown, thumbnail_of
from llama_adapter.app.learning.scores.scoring import score
from tests.app.learning.scores.outcomes import outcome

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
