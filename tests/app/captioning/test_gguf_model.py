"""A real model in a GGUF file, SmolLM2-135M-Instruct in Q4_1, from its file to its texts."""

from pathlib import Path

import pytest
import tokenizers
import torch

from llama_adapter import Captioner
from llama_adapter.llm.chat import ChatFormat
from llama_adapter.llm.tokenizer import Tokenizer
from tests.app.captioning.smollm2 import PROMPTS, WAYS, chat_ids, reference, reference_answers, stored_answers
from tests.llm.gguf_files import SMOLLM2

TEXTS = ["The capital of France is", "def fibonacci(n):\n    ", "List three colours:\n1."]
# As the template of the file writes it.
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.slow
def test_tokens_of_a_real_model_equal_those_of_transformers() -> None:
    assert SMOLLM2.is_file(), "`make .venv/smollm2` fetches it"
    captioner = Captioner.load(llama_dir=SMOLLM2, dtype="float32")
    prompts = [captioner.tokenizer.encode(text) for text in TEXTS]
    model = reference()
    expected = []
    for ids in prompts:
        settings = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
        made = model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
        expected.append([token for token in made if token != 2])
    answers = captioner.generate_text(prompts, max_new_tokens=32)
    assert [list(answer.token_ids) for answer in answers] == expected
    assert [captioner.tokenizer.decode(ids) for ids in prompts] == TEXTS
    whole = tokenizers.Tokenizer.from_str(captioner.tokenizer.data.decode()).encode(CHAT)  # knows special tokens
    chat, same = captioner.generate_text(["Name three colours.", list(whole.ids)], max_new_tokens=8)
    assert chat.text
    assert chat.token_ids == same.token_ids


@pytest.mark.slow
def test_prompts_of_all_scripts_are_the_chats_of_transformers() -> None:
    assert SMOLLM2.is_file(), "`make .venv/smollm2` fetches it"
    chats = ChatFormat(Tokenizer.load(SMOLLM2))
    encoded = [chats.encode([("user", prompt)]) for prompt in PROMPTS]
    assert [[*chat.ids, *chat.rest_ids] for chat in encoded] == chat_ids(PROMPTS)
    assert list(stored_answers()) == list(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_answers_in_all_scripts_are_those_of_transformers(way: str, tmp_path: Path) -> None:
    prompts = PROMPTS[3::8]  # one in each script
    stored = stored_answers()
    assert WAYS[way](prompts, tmp_path) == [stored[prompt] for prompt in prompts]


@pytest.mark.slow
def test_the_stored_answers_are_those_of_transformers() -> None:
    assert reference_answers(PROMPTS[19:20], model=reference()) == [stored_answers()[PROMPTS[19]]]
