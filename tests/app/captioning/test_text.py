"""Prompts without a picture."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter import Answer, Captioner, RawPrompt, UsageError
from llama_adapter.app.captioning.captioner import Prompt, WorkItem, WorkQuestion, text_items
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.llm.conversation import format_prompt
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import TextPrefix
from llama_adapter.vision.pixels import zero_picture
from tests.app.golden import GOLDEN, model_options, picture

PROMPTS: list[Prompt] = [
    "Name a colour.",
    ("Is it red?", "Look at the border."),
    RawPrompt("Once upon a time"),
    [1, 5, 9, 200],
    ("", ""),
    "Name a colour.",
]
LLAMA: dict[str, Any] = {"llama_dir": str(GOLDEN / "LLaMA"), "llama_type": "TINY"}


@pytest.mark.parametrize("text_prefix", ["none", "zeros"])
def test_answers_do_not_depend_on_the_batch_or_on_pictures_in_it(captioner: Captioner, text_prefix: TextPrefix) -> None:
    alone = Captioner.load(**model_options(), batch_size=1)
    options: Any = {"text_prefix": text_prefix, "max_new_tokens": 12}
    expected = [alone.generate_text([prompt], **options)[0].token_ids for prompt in PROMPTS]
    items = text_items(PROMPTS, text_prefix=text_prefix)
    for index, name in enumerate(("shapes_200x300.jpg", "tiny_10x10.png", "missing.png"), start=len(PROMPTS)):
        question = WorkQuestion(index=index, prompt="Describe it.")
        items.append(WorkItem(picture=Path(picture(name)), label=name, questions=(question,)))
    random.Random(1).shuffle(items)

    events = captioner.run(items, sampling=SamplingParams(max_new_tokens=12))
    answers = {event.index: event.token_ids for event in events if isinstance(event, Answer)}

    assert [answers[index] for index in range(len(PROMPTS))] == expected
    assert len(set(expected)) == len(PROMPTS) - 1


def test_a_prompt_comes_in_four_forms_alone_or_in_a_list(captioner: Captioner) -> None:
    text = format_prompt("Name a colour.")
    ids = captioner.tokenizer.encode(text)
    forms: list[Prompt] = ["Name a colour.", ("Name a colour.", None), RawPrompt(text), ids]

    alone = [captioner.generate_text(form, max_new_tokens=6) for form in forms]
    together = captioner.generate_text(iter(forms), max_new_tokens=6)
    from_loop = asyncio.run(captioner.agenerate_text(forms, max_new_tokens=6))

    assert [len(answers) for answers in alone] == [1, 1, 1, 1]
    assert len({answers[0].token_ids for answers in [*alone, *([one] for one in together)]}) == 1
    assert [answer.picture for answer in together] == ["prompt 0", "prompt 1", "prompt 2", "prompt 3"]
    assert [answer.token_ids for answer in from_loop] == [answer.token_ids for answer in together]


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])
def test_the_default_of_an_adapter_is_a_picture_of_zeros(adapter: str) -> None:
    captioner = Captioner.load(**model_options(adapter))
    zeros = PictureReading(pixels=zero_picture(captioner.pixels, channel_order="rgb"))
    item = WorkItem(picture=zeros, label="", questions=(WorkQuestion(index=0, prompt="Name a colour."),))
    (expected,) = (e for e in captioner.run([item], sampling=SamplingParams(max_new_tokens=8)) if isinstance(e, Answer))

    (answer,) = captioner.generate_text("Name a colour.", max_new_tokens=8)
    (closed,) = captioner.generate_text("Name a colour.", max_new_tokens=8, text_prefix="none")

    assert answer.token_ids == expected.token_ids != closed.token_ids


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    "options", [{"llama_dir": GOLDEN / "LLaMA-HF/TINY"}, model_options("CAPTION-TINY")], ids=["alone", "gates closed"]
)
@pytest.mark.proves("text without a picture", "LLaMA without adapter", "CPU")
def test_without_a_prefix_it_is_the_llama_of_transformers(options: dict[str, object]) -> None:
    import transformers

    captioner = Captioner.load(**options, batch_size=3, dtype="float32")  # type: ignore[arg-type]
    texts = ("Hello", "The sun is", "A long prompt of words, again and")
    prompts = [*map(captioner.tokenizer.encode, texts), [1, 17]]
    theirs = transformers.LlamaForCausalLM.from_pretrained(GOLDEN / "LLaMA-HF/TINY", dtype=torch.float32).eval()
    widest = max(map(len, prompts))
    ids = torch.tensor([[0] * (widest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = transformers.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=2, pad_token_id=0)
    generated = theirs.generate(ids, attention_mask=mask, generation_config=settings)[:, widest:].tolist()
    expected = [row[: row.index(2)] if 2 in row else row for row in generated]

    answers = captioner.generate_text(prompts, max_new_tokens=24, text_prefix="none")

    assert [list(answer.token_ids) for answer in answers] == expected


def test_llama_alone_answers_texts_and_refuses_pictures() -> None:
    captioner = Captioner.load(**LLAMA, batch_size=2)

    answers = captioner.generate_text(PROMPTS, max_new_tokens=8)

    assert [answer.error for answer in answers] == [None] * len(PROMPTS)
    assert {answer.digest for answer in answers} == {"none"}
    assert not captioner.info.has_adapter
    with pytest.raises(UsageError):
        captioner.caption(picture())
    with pytest.raises(ValueError, match="clip"):
        Captioner.load(**LLAMA, clip="ViT-L-14.pt")
