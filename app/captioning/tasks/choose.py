"""The task `choose`: answer with the most likely of given texts."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llama_adapter.app.captioning.tasks.answers import Answer
from llama_adapter.app.captioning.tasks.entry import Option, RequestField, TaskEntry, Widget
from llama_adapter.app.captioning.tasks.free_text import ASK
from llama_adapter.app.captioning.tasks.prompts import EncodedPrompt
from llama_adapter.app.captioning.tasks.question import Question
from llama_adapter.app.captioning.tasks.task import FREE_TEXT, Task
from llama_adapter.runtime.given import split_choices
from llama_adapter.runtime.text import plain_text


@dataclass(frozen=True, slots=True)
class OneOf:
    """Answer with the most likely of at least two different texts. Raises ValueError for anything else."""

    choices: tuple[str, ...]

    def __post_init__(self) -> None:
        texts = [text for text in self.choices if isinstance(text, str) and text.strip()]
        if len(self.choices) < 2 or len(set(texts)) < len(self.choices):
            raise ValueError(f"choices must be at least two different answers, got {list(self.choices)!r:.80}")

    @property
    def continuations(self) -> tuple[str, ...]:
        return self.choices

    def settings(self) -> dict[str, Any]:
        return {"choices": list(self.choices)}

    def complete(self, answer: Answer, *, prompt: EncodedPrompt, logprobs: tuple[float, ...]) -> Answer:
        probabilities = _normalised(logprobs)
        best = probabilities.index(max(probabilities))
        return dataclasses.replace(
            answer,
            text=self.choices[best],
            token_ids=prompt.text_ids(best),
            finish="choice",
            choice=dict(zip(self.choices, probabilities, strict=True)),
        )


def choosing(choices: Iterable[str] | None) -> Task:
    """The task for given choices; None means free text. Raises ValueError for invalid choices."""
    if choices is None:
        return FREE_TEXT
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise ValueError(f'choices must be a list of texts such as ["Yes", "No"], got {choices!r:.80}')
    texts = tuple(map(plain_text, choices))
    return _one_of(texts) if all(isinstance(text, str) for text in texts) else OneOf(texts)


_one_of = lru_cache(maxsize=64)(OneOf)  # all questions of a data set may have the same choices


def parse_choices(text: str) -> tuple[str, ...]:
    """`Yes, No`, or a JSON list -> ("Yes", "No").

    Raises ValueError for fewer than two choices, and for empty or equal ones.
    """
    try:
        given = split_choices(text)
        "".join(given).encode()  # JSON can hold numbers, and halves of characters
        return OneOf(tuple(choice.strip() for choice in given)).choices
    except (TypeError, ValueError):
        raise ValueError(
            f"wanted at least two different answers separated by commas, or a JSON list of them, got {text!r:.80}"
        ) from None


def _question(values: Mapping[str, Any]) -> Question:
    if not values.get("choices"):
        raise ValueError("choose needs choices, a list of texts")
    return dataclasses.replace(ASK.question(values), task=choosing(values["choices"]))


def _normalised(logprobs: tuple[float, ...]) -> list[float]:
    best = max(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


CHOOSE = TaskEntry(
    name="choose",
    command="ask",
    takes="a picture, a question and the possible answers",
    answers="one of the possible answers, with the probability of each",
    options=(
        Option(
            name="choices",
            flag="--choices",
            metavar="A,B,...",
            parse=parse_choices,
            separator=",",
            help="answer with one of these; as a JSON list, they may contain commas",
            request=RequestField(
                name="answer_choices",
                description="The answer is the most likely of these texts, and `answer_probabilities` holds the "
                "probability of each. Sampling parameters and `stop` have no effect.",
                min_texts=2,
                aliases=("guided_choice",),
            ),
            widget=Widget(
                label="Choices (optional)",
                info="Separated by commas, such as: yes, no. Each picture gets the probability of every choice.",
            ),
        ),
    ),
    question=_question,
    has_probabilities=True,
)
