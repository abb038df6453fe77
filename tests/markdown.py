"""Texts of users that look like Markdown, and a parser that finds out what a page makes of them."""

from typing import Final

from markdown_it import MarkdownIt

NASTY: Final = (
    *("a|b", "a\\|b", "| --- |", "two\nlines", "\\", "\\\n", "\\`", "     indented", "ends  ", "\x1b[31m", "\u202etxt"),
    *("`code`", "```\nfence", "~~~", "~~no~~", "*bold*", "_it_", "__b__", "$x$", ":smile:", "&lt;", "&#35;"),
    *("<script>alert(1)</script>", "<!-- x", "<http://a.de>", "[x](javascript:alert(1))", "![x](y)", "[x]", "[x]: y"),
    *("# title", "> quote", "- item", "+ item", "-", "1. one", "12) two", "1.", "---", "***", "==="),
)
_PARSER: Final = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def elements_of(page: str) -> tuple[list[str], list[str]]:
    """The elements of a page, those inside of lines last, and the text of each line."""
    tokens = _PARSER.parse(page)
    lines = [token.children or [] for token in tokens if token.type == "inline"]
    blocks = [token.tag or token.type for token in tokens if token.nesting >= 0 and token.type != "inline"]
    marks = [child.tag or child.type for line in lines for child in line if child.nesting >= 0 and child.type != "text"]
    return blocks + marks, ["".join(child.content for child in line) for line in lines]
