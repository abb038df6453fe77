"""The templates of prompts in the adapters' training, compared with the golden prompts, and that of the chat demo."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_adapter.llm.conversation import format_conversation, format_prompt

CASES = json.loads((Path(__file__).parents[1] / "golden" / "cases.json").read_text())["generate"]
PROMPTS = [prompt for case in CASES for prompt in case["prompts"] if prompt.get("instruction") is not None]
SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions."
)


def test_there_are_golden_prompts() -> None:
    assert len(PROMPTS) > 10


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["instruction"][:20])
def test_prompt_is_formatted_as_in_the_reference(prompt: dict[str, str]) -> None:
    assert format_prompt(prompt["instruction"], prompt.get("input")) == prompt["text"]


def test_an_empty_string_is_an_input_and_braces_are_plain_text() -> None:
    assert "### Input:\n\n\n### Response:" in format_prompt("What?", "")
    assert "### Input:" not in format_prompt("What?")

    assert "\n{instruction} {0}\n" in format_prompt("{instruction} {0}", "{input}")

    number: Any = 5
    assert "\n5\n" in format_prompt(number)


def test_a_question_follows_the_example() -> None:
    system, example, answer, question, rest = format_conversation([("user", "Why?")]).split("###")

    assert system == SYSTEM
    assert example == "Human: What are the key differences between renewable and non-renewable energy sources?"
    assert answer.startswith("Assistant: Renewable energy sources are those that can be replenished naturally in a ")
    assert answer.endswith("and their depletion can lead to economic and social instability.\n")
    assert [line[:3] for line in answer.splitlines()[1:]] == ["1. ", "2. ", "3. ", "4. ", "5. ", "6. "]
    assert (question, rest) == ("Human: Why?", "Assistant:")


def test_turns_follow_in_their_order_and_texts_of_the_system_replace_the_first_sentences() -> None:
    turns = [("user", "Hello"), ("assistant", "Hi."), ("user", ""), ("user", "Why?")]

    assert format_conversation(turns).split("###")[3:] == [  # type: ignore[arg-type]
        "Human: Hello",
        "Assistant: Hi.",
        "Human: Why?",
        "Assistant:",
    ]

    text = format_conversation([("system", "Be brief."), ("system", "Be kind."), ("user", "Why?")])

    assert text.startswith("Be brief.\nBe kind.###Human: What are the key")
    assert SYSTEM not in text
