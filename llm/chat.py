"""Chats in the format of a model's own template, as token ids. No text of a user becomes a special token."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import count, groupby, pairwise
from typing import Any, Final

from llama_adapter.llm.chat_template import ChatRefusedError, Message, TemplateProcess
from llama_adapter.llm.conversation import Role, Turn
from llama_adapter.llm.errors import PromptError
from llama_adapter.llm.pieces.base import Mark
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.runtime.errors import UsageError
from llama_adapter.runtime.text import shown_excerpt

# Characters of no language. `_PLACE` stands for a text of a chat; `_TEXT` before a name of a mark says that it is text.
_TEXT, _END = "\ue000", "\ue001"
_PLACE: Final = re.compile(f"{_TEXT}([0-9]+){_END}")
_FIRST: Final = f"{_TEXT}0{_END}"

# Values of users must not write special tokens, so their texts have none of the other characters.
_PLAIN: Final = re.compile(r"[\w .,:/+-]{0,200}")
_OWN_VALUES: Final = ("messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token")

Part = tuple[str, bool]  # a text, and whether the template has written it
Shown = tuple[int, str]  # where in a turn's text a picture stands, and what is written for it, with special tokens
_Pieces = tuple[str | None, ...]  # of a turn: texts, and None for each picture between them
_Said = Sequence[tuple[Role, _Pieces]]


@dataclass(frozen=True, slots=True)
class ChatIds:
    """A chat as token ids. An answer is encoded together with `rest`, the text after the last special token."""

    ids: tuple[int, ...]  # up to the last special token
    rest: str
    rest_ids: tuple[int, ...]


class PartsEncoder:
    """Encodes parts of which some may have special tokens, and the others are text alone. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = sorted(tokenizer.marks, key=len, reverse=True)  # of two that begin alike, the longer one is meant
        self.mark = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def ids(self, parts: Iterable[Part]) -> ChatIds:
        """Encode parts. They are divided at the template's special tokens; what is between is encoded as one text.

        Text is never divided elsewhere, because a piece may span the border of two parts.
        """
        marks = self._tokenizer.marks
        ids: list[int] = []
        text, last = "", Mark(id=-1)
        for part, is_template in parts:
            place = 0
            for found in self.mark.finditer(part) if is_template else ():
                text += part[place : found.start()]
                place, mark = found.end(), marks[found[0]]
                ids += self._run(text.rstrip() if mark.takes_left else text, last)
                ids.append(mark.id)
                text, last = "", mark
            text += part[place:]
        rest = text.lstrip() if last.takes_right else text
        return ChatIds(tuple(ids), rest, tuple(self._run(rest, last)))

    def continued(self, chat: ChatIds, text: str) -> list[int]:
        """Ids of the beginning of an answer, without an end id."""
        return self._tokenizer.encode_continuation(chat.rest, text, is_inner=bool(chat.ids))

    def _run(self, text: str, before: Mark) -> list[int]:
        """The ids of text after the special token `before`, or at the beginning if its id is negative."""
        text = text.lstrip() if before.takes_right else text
        return self._tokenizer.encode_run(text, is_inner=before.id >= 0) if text else []


class ChatFormat:
    """A tokenizer and its chat template. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, picture: str = "") -> None:
        """`picture` is the name of the token that stands for a picture. Raises UsageError without a chat template."""
        template = tokenizer.settings.chat_template
        if template is None:
            raise UsageError(
                "This model has no chat template",
                hint="leave out --prompt-template, or put the `chat_template.jinja` or `tokenizer_config.json` of its "
                "Hugging Face folder beside its tokenizer",
            )
        self._tokenizer, self._picture = tokenizer, picture
        self._process = TemplateProcess(template, tokenizer.template_names)
        self._encoder = PartsEncoder(tokenizer)
        self._mark = self._encoder.mark
        self._border = re.compile(f"{_TEXT}({self._mark.pattern})|[{_TEXT}{_END}]")
        self.changes_daily = "strftime_now" in template

    @cached_property
    def end_id(self) -> int:
        """The end id with which the template ends an assistant's turn; the tokenizer's if it writes none."""
        try:
            turns = self._messages([("user", ("?",)), ("assistant", (_FIRST,))])
            [text] = self._process.render([turns], asks=False)
        except ChatRefusedError:
            return self._tokenizer.eos_id
        ends = self._mark.finditer(_PLACE.split(text)[-1])
        ids = (self._tokenizer.marks[found[0]].id for found in ends)
        return next((one for one in ids if one in self._tokenizer.end_ids), self._tokenizer.eos_id)

    def encode(
        self,
        turns: Sequence[Turn],
        *,
        pictures: Mapping[int, Sequence[Shown]] | None = None,
        now: datetime | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> ChatIds:
        """The ids of a chat and of the beginning of the assistant's turn.

        `pictures` has the pictures of a turn, in the order of their places, by its index. `now` is the time that the
        template sees; default: the present. `values` are further variables of the template: texts without special
        characters, numbers and booleans. Raises PromptError if the template fails or refuses the chat, for other
        values, and if it writes a token that the tokenizer lacks, and ValueError for text that UTF-8 cannot encode.
        """
        for name, value in (values or {}).items():
            if name in _OWN_VALUES or not (isinstance(value, int | float) or _PLAIN.fullmatch(str(value))):
                raise PromptError(f"The value `{shown_excerpt(name)}` cannot be given to the model's chat template")
        render = partial(self._process.render, now=now, values=values)
        shown = [(pictures or {}).get(number, ()) for number in range(len(turns))]
        given = [(role, _pieces(text, own)) for (role, text), own in zip(turns, shown, strict=True)]
        said, whole, pattern = self._rendered(given, render)
        texts = [piece for _, pieces in said for piece in pieces if piece is not None]
        unmarked = self._mark.sub("\n", pattern)  # a lacking name may be a part of one that is there
        if lacking := [name for name in self._tokenizer.lacking if name in unmarked]:
            raise PromptError(
                f"The model's chat template writes the token {shown_excerpt(lacking[0])!r}, which its tokenizer lacks",
                hint=self._tokenizer.lacking_hint,
            )
        parts = _parts(whole, pattern, texts)
        if parts is None:  # the template changes texts, so where they stand in `whole` is unknown
            [whole] = render([self._messages(_with_texts(said, map(self._marked, texts)))])
            # Every second piece is a name of a mark in a text.
            parts = [(piece, number % 2 == 0) for number, piece in enumerate(self._border.split(whole)) if piece]
        return self._encoder.ids(self._shown(parts, [text for own in shown for _, text in own]))

    def continue_chat(self, chat: ChatIds, text: str) -> list[int]:
        """Ids of the beginning of the assistant's answer, without an end id."""
        return self._encoder.continued(chat, text)

    def _rendered(self, turns: _Said, render: Callable[[list[list[Message]]], list[str]]) -> tuple[_Said, str, str]:
        """The turns, their chat, and the same chat with places for its texts.

        The texts of the system are elsewhere if the template refuses the turns, or leaves out one of these texts.
        """
        problem = PromptError(
            "The model's chat template leaves out texts of the system", hint="send them in the user's text"
        )
        for said in _arrangements(turns):
            places = _with_texts(said, (f"{_TEXT}{number}{_END}" for number in count()))
            try:
                whole, pattern = render([self._messages(one) for one in (said, places)])
            except ChatRefusedError as error:
                problem = error  # that of the turns that templates refuse least
                continue
            system = [piece for role, pieces in places if role == "system" for piece in pieces]
            if all(piece is None or piece in pattern for piece in system):
                return said, whole, pattern
        raise problem

    def _messages(self, turns: _Said) -> list[Message]:
        """The turns as the template takes them."""
        return [{"role": role, "content": self._content(pieces)} for role, pieces in turns]

    @cached_property
    def _content(self) -> Callable[[_Pieces], Any]:
        """What the template takes: texts, or lists of parts, as most do that have a place for pictures.

        Of the other templates, some write a picture's token themselves, and the rest expect it in the text.
        """
        kinds: tuple[Callable[[_Pieces], Any], ...] = (
            lambda pieces: [{"type": "image"} if one is None else {"type": "text", "text": one} for one in pieces],
            lambda pieces: "".join(filter(None, pieces)),
            lambda pieces: "".join(f"{self._picture}\n" if one is None else one for one in pieces),
        )
        for content in kinds if self._picture else ():
            with suppress(ChatRefusedError):
                [text] = self._process.render([[{"role": "user", "content": content((None, _FIRST))}]])
                # A template that takes texts would write out the list.
                if text.count(_FIRST) == text.count(self._picture) == 1 and not re.search("['\"]type['\"]", text):
                    return content
        return kinds[1]

    def _shown(self, parts: Sequence[Part], pictures: Sequence[str]) -> list[Part]:
        """The parts with a picture in each place where the template has written its token. Raises PromptError."""
        if not self._picture:
            return list(parts)
        mark = re.compile(re.escape(self._picture))
        count = sum(len(mark.findall(part)) for part, is_template in parts if is_template)
        if count != len(pictures):
            raise PromptError(
                f"The model's chat template has {count} places for pictures in this chat, and it has {len(pictures)}",
                hint="ask about one picture, without earlier turns",
            )
        rest = iter(pictures)
        return [(mark.sub(lambda _: next(rest), part) if own else part, own) for part, own in parts]

    def _marked(self, text: str) -> str:
        """A text in which no name of a mark is read as the template's.

        Special tokens are broken. Others are marked in front, because templates look for some, such as `</think>`.
        """

        def as_text(found: re.Match[str]) -> str:
            name = found[0]
            return name[0] + _END + name[1:] if self._tokenizer.marks[name].is_special else _TEXT + name

        return self._mark.sub(as_text, text.replace(_TEXT, "").replace(_END, ""))


def _pieces(text: str, pictures: Sequence[Shown]) -> _Pieces:
    """A turn's text, divided at its pictures."""
    borders = [0, *(place for place, _ in pictures), len(text)]
    texts = [text[begin:end] for begin, end in pairwise(borders)]
    pieces = [texts[0], *(piece for text in texts[1:] for piece in (None, text))]
    return tuple(piece for piece in pieces if piece != "") or ("",)


def _arrangements(turns: _Said) -> Iterator[_Said]:
    """The turns; with those of the system as one in front; and in front of the user's first, as in Gemma 3.

    Pictures keep their order, because they belong to their places by it.
    """
    yield turns
    system, rest = ([one for one in turns if (one[0] == "system") is is_system] for is_system in (True, False))
    if not system:
        return
    in_front = [("system", _joined(system)), *rest]
    if in_front != turns and _owners([*system, *rest]) == _owners(turns):
        yield in_front
    first = next(number for number, (role, _) in enumerate(rest) if role == "user")
    before, after = rest[:first], rest[first + 1 :]
    if _owners([*before, *system, *rest[first:]]) == _owners(turns):
        yield [*before, ("user", _joined([*system, rest[first]])), *after]


def _joined(turns: _Said) -> _Pieces:
    """The pieces of turns as those of one turn, with an empty line between two turns."""
    pieces = [piece for _, own in turns for piece in ("\n\n", *own)][1:]
    groups = [list(group) for _, group in groupby(pieces, key=lambda piece: piece is None)]
    return tuple(piece for group in groups for piece in (group if group[0] is None else ["".join(filter(None, group))]))


def _owners(turns: _Said) -> list[Role]:
    """Whose turn each picture is in."""
    return [role for role, pieces in turns for piece in pieces if piece is None]


def _with_texts(turns: _Said, texts: Iterable[str]) -> _Said:
    """The turns with other texts, in their order."""
    rest = iter(texts)
    return [(role, tuple(one if one is None else next(rest) for one in pieces)) for role, pieces in turns]


def _parts(whole: str, pattern: str, texts: Sequence[str]) -> list[Part] | None:
    """The parts of a rendered chat, if it is `pattern` with each place replaced by its text or the stripped text."""
    parts: list[Part] = []
    at = 0
    for number, piece in enumerate(_PLACE.split(pattern)):
        is_template = number % 2 == 0
        if not is_template and int(piece) >= len(texts):
            return None
        ways = (piece,) if is_template else (texts[int(piece)], texts[int(piece)].strip())
        found = next((way for way in ways if whole.startswith(way, at)), None)
        if found is None:
            return None
        parts.append((found, is_template))
        at += len(found)
    return parts if at == len(whole) else None
