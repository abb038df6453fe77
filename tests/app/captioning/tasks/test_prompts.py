"""Prompts are tokenised once, and the cache of them is bounded."""

from collections.abc import Iterator

import pytest

import llama_adapter.app.captioning.tasks.prompts
from llama_adapter.app.captioning.captioner import Captioner
from llama_adapter.app.captioning.tasks.choose import OneOf
from llama_adapter.app.captioning.tasks.prompts import PromptEncoder
from llama_adapter.llm.errors import PromptTooLongError
from llama_adapter.llm.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def captioner() -> Iterator[Captioner]:
    with Captioner.load(batch_size=1) as captioner:
        yield captioner


def encoder_of(tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(tokenizer, check=lambda ids, choices: None)


def test_a_prompt_is_tokenised_once(captioner: Captioner) -> None:
    encoder = encoder_of(captioner.tokenizer)

    assert encoder.encode("Is it red?", ("yes", "no")) is encoder.encode("Is it red?", ("yes", "no"))


def test_prompt_cache_is_bounded_in_prompts_and_tokens(captioner: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_adapter.app.captioning.tasks.prompts, "MAX_REMEMBERED_PROMPTS", 10)
    monkeypatch.setattr(llama_adapter.app.captioning.tasks.prompts, "MAX_REMEMBERED_TOKENS", 2000)
    encoder = encoder_of(captioner.tokenizer)
    for number in range(30):
        encoder.encode(f"How many are there, {number}?")
        assert len(encoder._encoded) <= 10
    for number in range(30):
        encoder.encode("Which?", tuple(f"{number} or {other}" for other in range(100)))
        remembered = encoder._encoded.values()
        assert sum(len(prompt.token_ids) + sum(map(len, prompt.continuations)) for prompt in remembered) <= 2000


def test_a_prompt_that_is_too_long_is_refused_before_its_choices_are_tokenised(
    captioner: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_continuation", lambda *_: pytest.fail("a choice was tokenised"))

    with pytest.raises(PromptTooLongError):
        captioner.encode_prompt("word " * 3000, OneOf(("yes", "no")))
