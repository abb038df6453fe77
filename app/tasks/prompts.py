"""Prompts as users give them -> token ids, each tokenised once. Knows the template, not the engine."""

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_adapter.llm.prompt import format_prompt

if TYPE_CHECKING:  # the command line knows prompts and loads no tokenizer
    from llama_adapter.llm.tokenizer import Tokenizer

# Of each at most: a hundred choices of a stranger's may have more tokens than a thousand questions.
MAX_REMEMBERED_PROMPTS = 1024
MAX_REMEMBERED_TOKENS = 500_000  # about 20 MB


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """Text that goes to the model as it is, without the instruction template."""

    text: str


# An instruction, an instruction with its input, text without a template, or token ids used as they are.
Prompt = str | tuple[str, str | None] | RawPrompt | Sequence[int]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engine takes it."""

    text: str  # as a record shows it
    token_ids: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]


class PromptEncoder:
    """Encodes prompts and remembers them: most runs ask few different questions. Threads may share it."""

    def __init__(
        self, tokenizer: "Tokenizer", *, check: Callable[[tuple[int, ...], tuple[tuple[int, ...], ...]], None]
    ) -> None:
        """`check` raises for token ids and choices that could not be answered."""
        self._tokenizer, self._check = tokenizer, check
        self._encoded: dict[tuple[Prompt, tuple[str, ...] | None], EncodedPrompt] = {}
        self._num_tokens = 0  # of all of them
        self._lock = threading.Lock()

    def encode(self, prompt: Prompt, choices: tuple[str, ...] | None) -> EncodedPrompt:
        """Raises ValueError for what is no prompt, and what `check` raises."""
        key = _hashable(prompt), choices
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = self._tokenise(key[0], choices)
            num_tokens = len(encoded.token_ids) + sum(map(len, encoded.choices))
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

    def _tokenise(self, prompt: Prompt, choices: tuple[str, ...] | None) -> EncodedPrompt:
        model_text: str | None
        match prompt:
            case str(instruction):
                shown, model_text = instruction, format_prompt(instruction)
            case RawPrompt(str(text)):
                shown, model_text = text, text
            case (str(instruction), None):
                shown, model_text = instruction, format_prompt(instruction)
            case (str(instruction), str(given)):
                shown, model_text = f"{instruction}\n{given}", format_prompt(instruction, given)
            case _:
                shown, model_text = "", None
        token_ids = _as_token_ids(prompt) if model_text is None else self._tokenizer.encode(model_text)
        self._check(tuple(token_ids), ())  # of each choice it is tokenised once more: what is too long shall not be
        choice_ids: tuple[tuple[int, ...], ...] = ()
        if choices is not None:
            choice_ids = tuple(tuple(self._tokenizer.encode_continuation(model_text, text)) for text in choices)
            if _some_begins_with_another(choice_ids):
                # "1" would always beat "10": with the end token it has to be the whole answer.
                choice_ids = tuple((*ids, self._tokenizer.eos_id) for ids in choice_ids)
            self._check(tuple(token_ids), choice_ids)
        if model_text is None:
            shown = self._tokenizer.decode(token_ids)
        return EncodedPrompt(shown, tuple(token_ids), choice_ids)


def shown_prompt(prompt: Prompt) -> str:
    """A prompt as a record shows it, where no tokenizer is at hand: of token ids, nothing."""
    match prompt:
        case str(text) | RawPrompt(str(text)) | (str(text), None):
            return text
        case (str(instruction), str(given)):
            return f"{instruction}\n{given}"
        case _:
            return ""


def as_choices(choices: Any) -> tuple[str, ...] | None:
    """Answers to choose from; raises ValueError unless they are at least two different texts."""
    if choices is None:
        return None
    texts = () if isinstance(choices, str) else tuple(choices)
    if isinstance(choices, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'choices must be a list of texts such as ["Yes", "No"], got {choices!r}')
    if len(texts) < 2 or len(set(texts)) < len(texts):
        raise ValueError(f"choices must be at least two different answers, got {list(texts)}")
    return texts


def _hashable(prompt: Prompt) -> Prompt:
    """The prompt as a key of a cache: token ids become a tuple."""
    is_pair = isinstance(prompt, tuple) and len(prompt) > 0 and isinstance(prompt[0], str)
    return prompt if is_pair or isinstance(prompt, (str, RawPrompt)) else tuple(_as_token_ids(prompt))


def _some_begins_with_another(choices: Sequence[tuple[int, ...]]) -> bool:
    return any(one != other and one == other[: len(one)] for one in choices for other in choices)


def _as_token_ids(prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [operator.index(token_id) for token_id in prompt]
    except (TypeError, ValueError):
        raise ValueError(
            f"A prompt must be text, a pair (instruction, input) or a list of token ids, got {prompt!r}"
        ) from None
