"""The words of a command line, as a shell reads it. Texts of terminals and pages may have prompts and other blanks."""

import re
from typing import NamedTuple

from llama_adapter.runtime.errors import UsageError

# `>` begins a line as a prompt if the command has the prompt `$`, or before an option, or before two lines.
_PROMPTS = re.compile(r"(?m)^\$[^\S\n]|^([^\S\n]*>)(?=[^\S\n]+--|[^\S\n].*\\[^\S\n]*\n\1[^\S\n])")
_PROMPT = "\ue000"  # replaces that `>`
_BLANKS = rf" \t\r\u00a0{_PROMPT}"
_CONTINUED = r"\\(?:[^\S\n]+#[^\n]*|[^\S\n]*)\n"  # pages have comments there
_TEXT = rf"""(?:[^{_BLANKS}\n\\'";&|<>]|(?<=\w)&(?=\w)|'[^']*'|"(?:[^"\\]|\\.)*"|(?!{_CONTINUED})\\.)+"""
_REDIRECTION = rf"(?:\d*|&)(?:>[>|&]?|<[<&]*)(?:[{_BLANKS}]|{_CONTINUED})*{_TEXT}"
_PART = re.compile(
    rf"{_CONTINUED}|#[^\n]*|{_REDIRECTION}|(?P<gap>[{_BLANKS}]+|[;&|\n]+)|(?P<word>{_TEXT})|(?P<wrong>.)", re.DOTALL
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_COPIED = re.compile(r"[—–]+-*[a-zA-Z][\w.-]*(=.*)?|“[^”\s]*|‘[^’\s]*")


class Word(NamedTuple):
    """A word of a command line, without its quotes."""

    text: str
    line: int | None = None  # in a file
    gap: str = ""  # blanks, ends of lines and `;`, `&`, `|` before it
    is_quoted: bool = False  # in a file


def place(source: str, line: int | None) -> str:
    """A line of a file, such as `run.sh:3`."""
    return source if line is None else f"{source}:{line}"


def split_words(text: str, *, source: str, line: int | None = 1) -> list[Word]:
    """The words of a command line, which may have several lines. `line` is the number of the first.

    Redirections and comments are no words. Raises UsageError for a quote without its end.
    """
    if prompts := _PROMPTS.search(text):
        text = re.sub(rf"(?m)^{re.escape(prompts[1] or '>')}(?=\s)", _PROMPT, text)
    words: list[Word] = []
    gap = ""
    for part in _PART.finditer(f"{text}\n"):
        if part["wrong"]:
            raise UsageError(f"{place(source, line)}: this is no command line: nothing closes or follows `{part[0]}`")
        if part["word"]:
            words.append(Word(_QUOTED.sub(_unquoted, part[0]), line, gap, is_quoted=bool(_QUOTED.search(part[0]))))
            gap = ""
        gap += part["gap"] or ""
        line = None if line is None else line + part[0].count("\n")
    return words


def _unquoted(quoted: re.Match[str]) -> str:
    single, double, escaped = quoted.groups()
    return re.sub(r'\\(["\\$`])', r"\1", double) if double is not None else single or escaped or ""


def check_copied(word: Word, source: str) -> None:
    """Raise UsageError for a word in which a page or terminal may have replaced or added characters."""
    text, line, _, is_quoted = word
    if _PROMPT in text or "\\\n" in text:
        what = "a quoted text has several lines, and `>` or `\\` between them may be no part of it"
        raise UsageError(
            f"{place(source, line)}: {what}", hint=r"leave out the prompts `>`, and `\` at the end of a line"
        )
    if not is_quoted and _COPIED.fullmatch(text):
        what = f"`{text}` begins with a typographic dash or quote"
        raise UsageError(f"{place(source, line)}: {what}", hint="write -- or '")
    if not is_quoted and "\u00a0--" in text:
        raise UsageError(f"{place(source, line)}: `{text}` has a non-breaking space", hint="write a plain space")
