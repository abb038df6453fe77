"""The words of a command line, as a shell reads it. Texts of terminals and pages may have prompts and other blanks."""

import re
from typing import NamedTuple

from llama_adapter.runtime.errors import UsageError

# `>` begins a line as a prompt if the command has the prompt `$`, or before an option, or before two lines.
_PROMPTS = re.compile(r"(?m)^\$[^\S\n]|^([^\S\n]*>)(?=[^\S\n]+--|[^\S\n].*\\[^\S\n]*\n\1[^\S\n])")
_PROMPT = "\ue000"  # replaces that `>`
_BLANKS = rf" \t\r\u00a0{_PROMPT}"
_CONTINUED = r"\\(?:[^\S\n]+#[^\n]*|[^\S\n]*)\n"  # pages have comments there
_TEXT = rf"""(?:[^{_BLANKS}\n\\'";&|<>]|'[^']*'|"(?:[^"\\]|\\.)*"|(?!{_CONTINUED})\\.)+"""
_DIRECTED = rf"(?:\d*|&)(?:>[>|&]?|<[<&]*)(?:[{_BLANKS}]|{_CONTINUED})*"
_REDIRECTION = rf"{_DIRECTED}(?:[<>]\([^)]*\)|(?!\(){_TEXT})"
# A placeholder `<path>`, an option as the target, and a prompt `>` before a text.
_UNCLEAR = rf"<\w[^\s<>]*>|{_DIRECTED}[-—–−]+[a-zA-Z][\w.-]*|{_CONTINUED}[{_BLANKS}]*>[{_BLANKS}]+['\"](?!\$)"
_PART = re.compile(
    rf"(?s)(?P<unclear>{_UNCLEAR})|{_CONTINUED}|#[^\n]*|{_REDIRECTION}"
    rf"|(?P<gap>[{_BLANKS}]+|[;&|\n]+)|(?P<word>{_TEXT})|(?P<wrong>.)"
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_COPIED = re.compile(r"-?[—–−]+-*[a-zA-Z][\w.-]*(=.*)?|“[^”\s]*|‘[^’\s]*")
_BEFORE_OPTION = re.compile(r"\A(?!--)\W*[-—–−]{2,}[a-zA-Z]|(?:[^\S \t\r\n]|\u200b)--[a-zA-Z]")


class Word(NamedTuple):
    """A word of a command line, without its quotes."""

    text: str
    line: int | None = None  # in a file
    gap: str = ""  # blanks, ends of lines and `;`, `&`, `|` before it
    bare: str | None = None  # in a file: the word with `"` in place of each quoted text


def place(source: str, line: int | None) -> str:
    """A line of a file, such as `run.sh:3`."""
    return source if line is None else f"{source}:{line}"


def split_words(text: str, *, source: str, line: int | None = 1) -> list[Word]:
    """The words of a command line, which may have several lines. `line` is the number of the first.

    Redirections and comments are no words. Raises UsageError for an open quote and an unclear redirection.
    """
    if prompts := _PROMPTS.search(text):
        text = re.sub(rf"(?m)^{re.escape(prompts[1] or '>')}(?=\s)", _PROMPT, text)
    words: list[Word] = []
    gap = ""
    for part in _PART.finditer(f"{text}\n"):
        after = None if line is None else line + part[0].count("\n")
        if part["unclear"]:
            what = f"`{part[0].split(chr(10))[-1].strip()}` may be a placeholder or after a prompt, and no redirection"
            raise UsageError(f"{place(source, after)}: {what}", hint="replace `<path>`; begin no line with `>`")
        if part["wrong"]:
            raise UsageError(f"{place(source, line)}: this is no command line: nothing closes or follows `{part[0]}`")
        if part["word"]:
            words.append(Word(_QUOTED.sub(_unquoted, part[0]), line, gap, _QUOTED.sub('"', part[0])))
            gap = ""
        gap += part["gap"] or ""
        line = after
    return words


def _unquoted(quoted: re.Match[str]) -> str:
    single, double, escaped = quoted.groups()
    return re.sub(r'\\(["\\$`])', r"\1", double) if double is not None else single or escaped or ""


def check_copied(word: Word, source: str) -> None:
    """Raise UsageError for a word in which a page or terminal may have replaced or added characters."""
    text, line, bare = word.text, word.line, word.bare or word.text
    if _PROMPT in text or "\\\n" in text:
        what = "a quoted text has several lines, and `>` or `\\` between them may be no part of it"
        raise UsageError(
            f"{place(source, line)}: {what}", hint=r"leave out the prompts `>`, and `\` at the end of a line"
        )
    if _COPIED.fullmatch(bare) or _BEFORE_OPTION.search(bare):
        what = f"`{text}` has a typographic dash or quote, or another character than a plain space before `--`"
        hint = "write --, ' or a plain space; for a text that begins with it write --predict_data='...'"
        raise UsageError(f"{place(source, line)}: {what}", hint=hint)
