"""Text of users in Markdown, from which a parser gives back the same text without markup; numbers with their nouns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_adapter.runtime.text import counted, markdown_text, one_line, shown_text
from tests.markdown import NASTY, elements_of


def assert_is_text(text: str) -> None:
    """A heading, a paragraph, a list and a table with the text show it, and have no other elements."""
    one, shown = markdown_text(text), shown_text(text).strip(" ")
    page = f"# {one}\n\n{one}\n\n- {one}\n\n| {one} | n |\n| --- | --- |\n| {one} | {one} |\n"
    elements, texts = elements_of(page)
    assert elements == ["h1", "p", "ul", "li", "p", "table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"], page
    assert texts == [shown, shown, shown, shown, "n", shown, shown], page


@pytest.mark.parametrize("text", NASTY)
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    assert_is_text(text)


@given(st.text("\\`*_[]<>()|#&~$@!:/.-+= \t\n019aw\x1b\u202e", min_size=1).filter(lambda text: text.strip(" ")))
def test_markdown_shows_any_text_as_it_is(text: str) -> None:
    assert_is_text(text)


def test_dialects_with_bare_links_find_none() -> None:
    assert markdown_text("http://a.de WWW.a.de a@a.de :smile:") == r"http\://a.de WWW\.a.de a\@a.de \:smile:"


def test_plain_text_is_not_changed() -> None:
    for text in ("a red star, 2.5 % (-3)", "-1", "12-red-star.jpg", "Mr. Fox: yes!", "+0.5%", "1.5"):
        assert markdown_text(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a  b", "a  b"),
        ("\u3042\u3000\u3044", "\u3042\u3000\u3044"),
        ("a\u00a0!", "a\u00a0!"),
        (" a\n\n\t- b \r\nc", "a - b c"),
    ],
)
def test_lines_are_joined_and_white_space_inside_them_stays(text: str, line: str) -> None:
    assert one_line(text) == line


def test_a_noun_is_in_the_plural_unless_there_is_one() -> None:
    assert [counted(number, "picture") for number in (0, 1, 2, 2000)] == [
        "0 pictures",
        "1 picture",
        "2 pictures",
        "2,000 pictures",
    ]
    assert [counted(number, "axis", plural="axes") for number in (1, 2)] == ["1 axis", "2 axes"]
