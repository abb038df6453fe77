"""The two prompt templates of the adapters' training, compared with the golden prompts."""

import json
from pathlib import Path

import pytest

from llama_adapter.llm.prompt import format_prompt

CASES = json.loads((Path(__file__).parents[1] / "golden" / "cases.json").read_text())["generate"]
PROMPTS = [prompt for case in CASES for prompt in case["prompts"] if prompt.get("instruction") is not None]


def test_there_are_golden_prompts() -> None:
    assert len(PROMPTS) > 10


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["instruction"][:20])
def test_prompt_is_formatted_as_in_the_reference(prompt: dict[str, str]) -> None:
    assert format_prompt(prompt["instruction"], prompt.get("input")) == prompt["text"]


def test_an_empty_string_is_an_input() -> None:
    assert "### Input:\n\n\n### Response:" in format_prompt("What?", "")
    assert "### Input:" not in format_prompt("What?")


def test_braces_are_plain_text() -> None:
    assert "\n{instruction} {0}\n" in format_prompt("{instruction} {0}", "{input}")
