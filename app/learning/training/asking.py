"""Turns labelled examples into token ids: the prompt for each example, and the answers that the model learns."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llama_adapter.app.captioning.tasks.prompts import Prompt, PromptEncoder
from llama_adapter.app.jobs.questions import TemplateError
from llama_adapter.app.learning.evaluating.outcomes import question_of
from llama_adapter.app.learning.labelled.example import Example, Examples, class_question
from llama_adapter.app.models.bundle_manifest import is_question
from llama_adapter.app.models.checkpoints import StoredQuestions
from llama_adapter.app.pictures.inputs.fields import as_template
from llama_adapter.llm.conversation import Template
from llama_adapter.llm.tokenizer import Tokenizer

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A prompt with one answer as the model learns it: begin token, prompt, answer, end token."""

    token_ids: TokenIds
    num_prompt: int  # tokens before the answer; they have no loss
    unknown_id: int | None = None  # the unknown token, which has no loss either, as in the reference

    @property
    def labels(self) -> TokenIds:
        """The tokens with a loss: those of the answer, except the unknown token."""
        return tuple(token for token in self.token_ids[self.num_prompt :] if token != self.unknown_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainExample:
    """An example with its tokens."""

    example: Example
    prompt: Prompt
    rows: tuple[TokenRow, ...]  # one for each answer that the model may learn

    @property
    def has_picture(self) -> bool:
        return self.example.item.source is not None

    def row(self, *key: int) -> TokenRow:
        """The row to learn. If there are several answers, one is drawn at random; `key` alone determines which."""
        if len(self.rows) == 1:
            return self.rows[0]
        return self.rows[random.Random("/".join(map(str, key))).randrange(len(self.rows))]

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.token_ids) for row in self.rows)


def default_question(example: Example) -> str | None:
    """The question for an example that has none: it lists the example's choices.

    None for examples without choices: captions are asked with the model's caption prompt.
    """
    if example.choices is None:
        return None
    question = class_question(example.choices)
    return question if example.item.source is None else as_template(question)


def caption_prompts(examples: Iterable[TrainExample]) -> set[str]:
    """The different prompts of the captions."""
    return {_instruction(one.prompt) for one in examples if one.example.task == "caption"}


def learned_questions(examples: Sequence[TrainExample], *, base: StoredQuestions) -> StoredQuestions:
    """The questions that a model stores after training on these examples.

    They are the question of all captions, and that of all other examples. For examples of a kind that were asked
    several questions, no question is stored, and captions keep the prompt of `base`. A kind without examples keeps the
    question of `base`; but without captions, a question about all pictures is the prompt too, for the model answers
    nothing else any more.
    """
    others = {_instruction(one.prompt) for one in examples if one.example.task != "caption"}
    question, captions = _only(others), caption_prompts(examples)
    learned = _only(captions) if captions or not all(one.has_picture for one in examples) else question
    return StoredQuestions(prompt=learned or base.prompt, question=question if others else base.question)


def _instruction(prompt: Prompt) -> str:
    instruction = prompt[0] if isinstance(prompt, tuple) else prompt
    assert isinstance(instruction, str), "labelled examples ask instructions"
    return instruction


def _only(texts: set[str]) -> str | None:
    """The text, if there is only one and it can be stored."""
    return next((text for text in texts if len(texts) == 1 and is_question(text)), None)


class Asker:
    """Makes the tokens of examples exactly as the captioner does when it answers."""

    def __init__(self, tokenizer: Tokenizer, *, default_prompt: str, template: Template = "instruction") -> None:
        self._encoder = PromptEncoder(tokenizer, check=lambda prompt, answers: None, template=template)
        self._unknown_id, self._default = tokenizer.pieces.unknown_id, default_prompt

    def ask(self, example: Example) -> TrainExample:
        """The example with its tokens. A caption has a row for each right answer, other tasks one for the first answer.

        Raises TemplateError for a question with a variable that the example lacks.
        """
        prompt = question_of(example, question=None).prompt(self._default)
        answers = example.answers if example.task == "caption" else example.answers[:1]
        return TrainExample(example=example, prompt=prompt, rows=tuple(self.row(prompt, answer) for answer in answers))

    def row(self, prompt: Prompt, answer: str) -> TokenRow:
        """Begin, prompt, answer and end; the answer is tokenised together with the prompt."""
        encoded = self._encoder.encode(prompt, (answer,))
        assert encoded.end_id is not None, "there is an answer"
        ids = (*encoded.token_ids, *encoded.continuations[0], encoded.end_id)
        return TokenRow(ids, len(encoded.token_ids), self._unknown_id)

    def ask_all(self, found: Examples, *, context: int) -> dict[int, TrainExample]:
        """id(example) -> the example with its tokens.

        Examples that do not fit into the context, and questions that cannot be filled in, are added to the problems of
        `found`.
        """
        asked: dict[int, TrainExample] = {}
        kept = []
        for example in found.examples:
            try:
                one = self.ask(example)
            except TemplateError as error:
                found.refuse(example.place, f"{error.message}; {error.hint}")
                continue
            if one.num_tokens > context:
                reason = f"its prompt and answer have {one.num_tokens:,} tokens, and the context {context:,}"
                found.refuse(example.place, reason)
                continue
            asked[id(example)] = one
            kept.append(example)
        found.examples[:] = kept
        return asked
