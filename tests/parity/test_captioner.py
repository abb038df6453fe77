"""The whole path from picture files and checkpoints to text, compared with the reference."""

import functools
from typing import Any

import pytest

from llama_adapter import Captioner
from tests.parity.golden import CASES, GENERATE, GOLDEN, model_options


@functools.lru_cache(maxsize=2)  # neighbours among the cases have the same model
def load(adapter: str, **options: Any) -> Captioner:
    return Captioner.load(**{**model_options(adapter), "exif": "ignore", "transparency": "ignore", **options})


def answer(captioner: Captioner, case: dict[str, Any], *, as_ids: bool) -> list[tuple[list[int], str]]:
    prompts: list[Any] = [
        prompt["ids"] if as_ids else (prompt["instruction"], prompt["input"]) for prompt in case["prompts"]
    ]
    answers = captioner.generate(
        [GOLDEN / "images" / image for image in case["images"]], prompts, max_new_tokens=case["max_gen_len"]
    )
    return [(list(answer.token_ids), answer.text) for answer in answers]


@pytest.mark.parametrize("name", list(GENERATE))
@pytest.mark.proves("token ids of the reference", "CPU")
@pytest.mark.proves("Meta LLaMA and adapter", "CPU")
@pytest.mark.proves("BIAS adapters", "CPU")
@pytest.mark.proves("LORA adapters", "CPU")
@pytest.mark.proves("CAPTION adapters (one query)", "CPU")
@pytest.mark.proves("float32", "CPU")
def test_pictures_and_prompts_give_the_texts_of_the_reference(name: str) -> None:
    case = GENERATE[name]
    expected = list(zip(case["output_ids"], case["output_text"], strict=True))
    together = load(case["adapter"], context=case["max_seq_len"])
    assert answer(together, case, as_ids=False) == expected
    alone = load(case["adapter"], context=case["max_seq_len"], batch_size=1, operators="aten")
    assert answer(alone, case, as_ids=True) == expected


def edge_case(name: str) -> Any:
    return next(case["value"] for case in CASES["edge_cases"] if case["name"] == name)


def test_full_context_ends_one_row_only() -> None:
    case = GENERATE["bias_b3_mixed"]
    captioner = load("BIAS-TINY", context=70)
    pictures = [GOLDEN / "images" / image for image in case["images"][:2]]
    prompts = [prompt["instruction"] for prompt in case["prompts"][:2]]
    answers = captioner.generate(pictures, prompts, max_new_tokens=16)
    assert [answer.text for answer in answers] == edge_case("full_and_short")


def test_the_begin_token_alone_is_a_prompt() -> None:
    answers = load("BIAS-TINY").generate([GOLDEN / "images/shapes_200x300.jpg"], [[1]], max_new_tokens=4)
    assert [answer.text for answer in answers] == edge_case("empty_prompt")


def test_the_references_negative_temperature_is_0_here() -> None:
    case = GENERATE["bias_b1"]
    picture, question = GOLDEN / "images" / case["images"][0], case["prompts"][0]["instruction"]
    answers = load("BIAS-TINY").generate([picture], question, temperature=0.0, max_new_tokens=4)
    with pytest.raises(ValueError, match="temperature must be a finite number of at least 0, got -1"):
        load("BIAS-TINY").generate([picture], question, temperature=-1.0)
    assert [answer.text for answer in answers] == edge_case("negative_temperature")
