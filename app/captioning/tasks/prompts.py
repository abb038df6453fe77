"""Encodes prompts as token ids. Each prompt is tokenised once."""

import json
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from llama_adapter.llm.conversation import SEPARATOR, Role, Template, Turn, format_conversation, format_prompt
from llama_adapter.llm.errors import PromptError
from llama_adapter.llm.picture_format import Grid, PictureFormat, num_squares
from llama_adapter.runtime.text import plain_text

if TYPE_CHECKING:  # the command line imports prompts without a tokenizer
    from llama_adapter.llm.chat import ChatFormat
    from llama_adapter.llm.engine.grammars import Grammar
    from llama_adapter.llm.tokenizer import Tokenizer

TokenIds = tuple[int, ...]

# Limits of the cache. Tokens are limited too, because a hundred continuations may have more than a thousand questions.
MAX_REMEMBERED_PROMPTS = 1024
MAX_REMEMBERED_TOKENS = 500_000  # about 20 MB


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text for the model without the instruction template."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", plain_text(self.text))


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A question with earlier turns, each (role, text), oldest first; roles are system, user and assistant.

    A model whose template has no turns gets only the question. `values` is a JSON object of further variables of the
    model's own chat template, such as `{"enable_thinking": false}`: texts without special characters, numbers and
    booleans; other templates have none.
    """

    turns: tuple[Turn, ...]
    question: str
    # Where pictures stand in the text of each turn and of the question, as indices; empty: all before the question.
    pictures: tuple[tuple[int, ...], ...] = ()
    values: str = ""

    def __post_init__(self) -> None:  # JSON has lists
        turns = [tuple(map(plain_text, turn)) if isinstance(turn, (list, tuple)) else turn for turn in self.turns]
        for turn in (*turns, ("user", self.question)):
            is_pair = isinstance(turn, tuple) and len(turn) == 2
            if not is_pair or turn[0] not in get_args(Role) or not isinstance(turn[1], str):
                raise TypeError(f"A turn of a Dialogue is a pair (system, user or assistant; text), got {turn!r:.200}")
        object.__setattr__(self, "turns", tuple(turns))
        object.__setattr__(self, "question", plain_text(self.question))
        object.__setattr__(self, "pictures", tuple(map(tuple, self.pictures)))


# An instruction, an instruction with its input, a question with earlier turns, text without template, or token ids.
Prompt = str | tuple[str, str | None] | Dialogue | RawPrompt | Sequence[int]
Prompts = str | tuple[str, str | None] | Dialogue | RawPrompt | Iterable[Prompt | int]  # one prompt, or any several
_Key = tuple[Prompt, tuple[str, ...], int | None, tuple[Grid, ...], date | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt and the continuations to score, as token ids."""

    text: str  # the prompt as shown in records
    token_ids: TokenIds = ()
    continuations: tuple[TokenIds, ...] = ()
    has_end: bool = False  # whether each continuation ends with `end_id`
    end_id: int | None = None  # the token that ends an answer to this prompt; None without continuations
    num_cut: int = 0  # tokens that were cut after the first because of `max_tokens`
    stop: tuple[str, ...] = ()  # texts of the template that end an answer
    grammar: "Grammar | None" = None  # the form of an answer
    picture_starts: TokenIds = ()  # places of the first token of each square of its pictures

    def text_ids(self, index: int) -> TokenIds:
        """The token ids of a continuation's text."""
        return self.continuations[index][: -1 if self.has_end else None]


class PromptEncoder:
    """Encodes prompts and caches them, because most runs ask few different questions. Thread-safe."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        check: Callable[[TokenIds, tuple[TokenIds, ...]], None],
        template: Template = "instruction",
        pictures: PictureFormat | None = None,
    ) -> None:
        """`check` raises for a prompt or continuations that the engine cannot take. `template` is the model's.

        `pictures` is the form of pictures in prompts, if the model sees them so. Raises UsageError for the template
        `chat` if the tokenizer has none.
        """
        self._tokenizer, self._check, self._template, self._pictures = tokenizer, check, template, pictures
        self._chat = _open_chat(tokenizer, pictures) if template == "chat" else None
        self._encoded: dict[_Key, EncodedPrompt] = {}
        self._num_tokens = 0  # in all cached prompts
        self._lock = threading.Lock()

    def encode(
        self,
        prompt: Prompt,
        continuations: tuple[str, ...] = (),
        *,
        max_tokens: int | None = None,
        grids: tuple[Grid, ...] = (),
    ) -> EncodedPrompt:
        """Encode a prompt and its continuations.

        `grids` are those of the pictures of the prompt. They stand in front of its question or its text, unless it is a
        `Dialogue` that says where they are.

        Raises TypeError for an invalid prompt, PromptError for one that the chat template refuses, and the errors of
        `check`. A prompt of more than `max_tokens` tokens keeps its begin token, or what is before the end of its
        pictures, and its end. `num_cut` is the number of tokens cut.
        """
        day = date.today() if self._chat is not None and self._chat.changes_daily else None
        key = _hashable(prompt), continuations, max_tokens, grids, day
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = self._tokenise(*key[:4])
            num_tokens = len(encoded.token_ids) + sum(map(len, encoded.continuations))
            with self._lock:
                if (
                    len(self._encoded) >= MAX_REMEMBERED_PROMPTS
                    or self._num_tokens + num_tokens > MAX_REMEMBERED_TOKENS
                ):
                    self._encoded.clear()
                    self._num_tokens = 0
                self._encoded[key] = encoded
                self._num_tokens += num_tokens
        return encoded

    def _tokenise(
        self, prompt: Prompt, continuations: tuple[str, ...], max_tokens: int | None, grids: tuple[Grid, ...]
    ) -> EncodedPrompt:
        shown, form = shown_prompt(prompt), self._pictures
        turns, places = _turns(prompt, len(grids))
        pictures = [form.text(grid) for grid in grids] if form is not None else []
        end_id, begin = self._tokenizer.eos_id, self._tokenizer.begin_ids
        if self._chat is not None and turns is not None:
            values = prompt.values if isinstance(prompt, Dialogue) and prompt.values else "{}"
            rest = iter(pictures)
            shown_pictures = {number: [(at, next(rest)) for at in own] for number, own in enumerate(places)}
            chat = self._chat.encode(turns, pictures=shown_pictures, values=json.loads(values))
            token_ids, encode_answer = (*chat.ids, *chat.rest_ids), partial(self._chat.continue_chat, chat)
            end_id = self._chat.end_id if continuations else end_id
            if form is not None and token_ids[: len(begin)] != begin:  # as the processors of such models
                token_ids = (*begin, *token_ids)
        else:
            text = self._text(prompt, turns)
            token_ids = tuple(_as_token_ids(prompt) if text is None else self._tokenizer.encode(text))
            encode_answer = partial(self._tokenizer.encode_continuation, text)
            if pictures:
                from llama_adapter.llm.chat import PartsEncoder

                encoder = PartsEncoder(self._tokenizer)
                given = token_ids[len(begin) * (token_ids[: len(begin)] == begin) :] if text is None else ()
                chat = encoder.ids([*((picture, True) for picture in pictures), (text or "", False)])
                token_ids, encode_answer = (*begin, *chat.ids, *chat.rest_ids, *given), partial(encoder.continued, chat)
        starts = self._places(token_ids, grids)
        num_cut = 0 if max_tokens is None else max(0, len(token_ids) - max_tokens)
        num_first = int(token_ids[:1] == (self._tokenizer.bos_id,) and max_tokens != 1)
        if form is not None and starts:
            num_first = starts[-1] + form.tokens_each
            if num_cut and num_cut >= len(token_ids) - num_first:
                raise PromptError(
                    f"The prompt has pictures in its first {num_first} tokens, and {max_tokens} are allowed",
                    hint="allow more tokens: pictures are not cut",
                )
        token_ids = token_ids[:num_first] + token_ids[num_first + num_cut :]
        self._check(token_ids, ())  # before continuations, which are tokenised together with the prompt
        ids = tuple(tuple(encode_answer(text)) for text in continuations)
        # If one choice begins another, as "1" begins "10", it would always be at least as likely. With the end token,
        # each choice is scored as a whole answer.
        has_end = any(one != other and one == other[: len(one)] for one in ids for other in ids)
        if has_end:
            ids = tuple((*one, end_id) for one in ids)
        if ids:
            self._check(token_ids, ids)
        is_ids = turns is None and not isinstance(prompt, RawPrompt)
        return EncodedPrompt(
            text=self._tokenizer.decode(token_ids) if is_ids else shown,
            token_ids=token_ids,
            continuations=ids,
            has_end=has_end,
            end_id=end_id if ids else None,
            num_cut=num_cut,
            picture_starts=starts,
            stop=(SEPARATOR,) if turns is not None and self._template == "conversation" else (),
        )

    def _places(self, token_ids: TokenIds, grids: tuple[Grid, ...]) -> TokenIds:
        """The places of the first token of each square. Raises PromptError for other tokens of pictures in a prompt."""
        form = self._pictures
        if form is None:
            return ()
        places = tuple(place for place, one in enumerate(token_ids) if one == form.token_id)
        wanted = form.tokens_each * sum(map(num_squares, grids))
        if len(places) != wanted:
            raise PromptError(
                f"The prompt has the token `{form.token}` {len(places)} times, and its pictures {wanted} times",
                hint="leave this token out of token ids: it is written for pictures alone",
            )
        return places[:: form.tokens_each]

    def _text(self, prompt: Prompt, turns: tuple[Turn, ...] | None) -> str | None:
        """The prompt in the template of instructions or conversations; None for token ids."""
        if turns is not None and self._template == "conversation":
            return format_conversation(turns)
        match prompt:
            case str(instruction) | (str(instruction), None) | Dialogue(question=str(instruction)):
                return format_prompt(instruction)
            case (str(instruction), str(given)):
                return format_prompt(instruction, given)
            case RawPrompt(str(text)):
                return text
            case _:
                return None


def _open_chat(tokenizer: "Tokenizer", pictures: PictureFormat | None) -> "ChatFormat":
    from llama_adapter.llm.chat import ChatFormat

    return ChatFormat(tokenizer, picture="" if pictures is None else pictures.token)


def prompt_length(prompt: Prompt) -> int:
    """Length of a prompt in characters or token ids, without its template."""
    match prompt:
        case RawPrompt(text):
            return len(text)
        case Dialogue(turns=turns, question=question):
            return len(question) + sum(len(text) for _, text in turns)
        case (str(instruction), given):
            return len(instruction) + (len(given) if isinstance(given, str) else 0)
        case _:
            return len(prompt)


def shown_prompt(prompt: Prompt) -> str:
    """A prompt as shown in records; "" for token ids, which only a tokenizer can decode."""
    match prompt:
        case str(text) | RawPrompt(str(text)) | (str(text), None) | Dialogue(question=str(text)):
            return plain_text(text)
        case (str(instruction), str(given)):
            return f"{plain_text(instruction)}\n{plain_text(given)}"
        case _:
            return ""


def _turns(prompt: Prompt, num_pictures: int) -> tuple[tuple[Turn, ...] | None, tuple[tuple[int, ...], ...]]:
    """The prompt as turns of a conversation, the last one the user's, and where pictures stand in each.

    None for text without template and token ids. Turns without text and pictures are left out.
    """
    match prompt:
        case Dialogue(turns, question, places):
            if len(places) != len(turns) + 1 or sum(map(len, places)) != num_pictures:
                places = (*((),) * len(turns), (0,) * num_pictures)
            kept = [(turn, own) for turn, own in zip(turns, places, strict=False) if turn[1] or own]
            return (*(turn for turn, _ in kept), ("user", question)), (*(own for _, own in kept), places[-1])
        case str() | (str(), str() | None):
            return (("user", shown_prompt(prompt)),), ((0,) * num_pictures,)
        case _:
            return None, ()


def _hashable(prompt: Prompt) -> Prompt:
    """The prompt as a dictionary key: token ids become a tuple."""
    is_pair = isinstance(prompt, tuple) and len(prompt) > 0 and isinstance(prompt[0], str)
    return prompt if is_pair or isinstance(prompt, (str, RawPrompt, Dialogue)) else tuple(_as_token_ids(prompt))


def _as_token_ids(prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, bytes | Mapping):
            raise TypeError
        return [operator.index(token_id) for token_id in prompt]
    except (TypeError, ValueError):
        raise TypeError(
            f"A prompt must be text, a pair (instruction, input) or a list of token ids, got {prompt!r}"
        ) from None
