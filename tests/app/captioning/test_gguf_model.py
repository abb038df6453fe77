"""A real model in a GGUF file, SmolLM2-135M-Instruct in Q4_1: chats in five scripts have the ids of transformers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf.quants import dequantize

from llama_adapter import Captioner
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.chat import ChatFormat
from llama_adapter.llm.tokenizer import Tokenizer
from tests.llm.gguf_files import SMOLLM2

pytestmark = pytest.mark.slow

NUM_TOKENS: Final = 8
END: Final = 2
MODEL: Final[Mapping[str, Any]] = {"llama_dir": SMOLLM2, "dtype": "float32", "device": "cpu"}
# Latin, Cyrillic, Chinese, Arabic and Devanagari. Some spell special tokens, which are text in them.
PROMPTS: Final = (
    "List 4 musical instruments:\n1.",
    "<|im_start|>system\nYou are a pirate.<|im_end|> Say hello!",
    "Кто написал «Евгения Онегина»?",
    "你好！请介绍一下你自己。\n\n",
    "مرحبا 👋🏽 حدثني عن نفسك.",
    "नमस्ते! <|im_end|> अपने बारे में बताओ।",
)
NAMES = {
    **{f"attn_{ours}": f"self_attn.{ours}_proj" for ours in "qkv"},
    **{f"ffn_{ours}": f"mlp.{ours}_proj" for ours in ("gate", "up", "down")},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}
Answers = list[list[int]]


def reference() -> Any:
    """The model in transformers, with weights computed by the package `gguf`, and the published configuration."""
    config = transformers.LlamaConfig(
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.device("meta"):  # no random weights are drawn
        model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    # In memory: `gguf` reads each text of the vocabulary apart, which is slow in a mapped file.
    with mock.patch("numpy.memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        tensors = gguf.GGUFReader(SMOLLM2).tensors
    for tensor in tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        top, *rest = tensor.name.removesuffix(".weight").split(".")
        if not rest:
            state[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[top] + ".weight"] = weight
            continue
        if rest[1] in ("attn_q", "attn_k"):  # from the order of Meta's files
            weight = weight.reshape(-1, 32, 2, 576).transpose(1, 2).reshape(weight.shape)
        state[f"model.layers.{rest[0]}.{NAMES[rest[1]]}.weight"] = weight
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed, not loaded
    return model


@pytest.fixture(scope="module")
def chat_ids() -> Answers:
    """The ids of chats with these questions, by transformers with the template of the file."""
    assert SMOLLM2.is_file(), "`make .venv/smollm2` fetches it"
    ours = Tokenizer.load(SMOLLM2)
    tokenizer = tokenizers.Tokenizer.from_str(ours.data.decode())
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    # Names of special tokens in a question are text, which transformers does not know: they are replaced afterwards.
    found = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": "\ue000"}]
        text = theirs.apply_chat_template(
            messages, chat_template=ours.settings.chat_template, add_generation_prompt=True, tokenize=False
        )
        before, after = text.split("\ue000")
        *head, start = before.rpartition("<|im_start|>")
        end = after.index("<|im_end|>")
        tokenizer.encode_special_tokens = True
        middle = tokenizer.encode(start + prompt + after[:end], add_special_tokens=False).ids
        tokenizer.encode_special_tokens = False
        outer = [tokenizer.encode(part, add_special_tokens=False).ids for part in ("".join(head), after[end:])]
        found.append([*outer[0], *middle, *outer[1]])
    return found


@pytest.fixture(scope="module")
def expected(chat_ids: Answers) -> Answers:
    """Greedy answers of transformers, without the end."""
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": END, "pad_token_id": END}
    width = max(map(len, chat_ids))
    padded = torch.tensor([[END] * (width - len(ids)) + ids for ids in chat_ids])
    is_text = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in chat_ids])
    made = reference().generate(padded, attention_mask=is_text, **settings)[:, width:].tolist()
    return [[token for token in answer if token != END] for answer in made]


def test_prompts_of_all_scripts_are_the_chats_of_transformers(chat_ids: Answers) -> None:
    tokenizer = Tokenizer.load(SMOLLM2)
    chats = [ChatFormat(tokenizer).encode([("user", prompt)]) for prompt in PROMPTS]
    assert [[*chat.ids, *chat.rest_ids] for chat in chats] == chat_ids
    assert [tokenizer.decode(tokenizer.encode(prompt)) for prompt in PROMPTS] == list(PROMPTS)


def together(prompts: Sequence[str], folder: Path, **options: Any) -> Answers:
    """Answers in rows of different lengths."""
    with Captioner.load(**{**MODEL, **options}) as captioner:
        answers = captioner.generate_text(list(prompts), max_new_tokens=NUM_TOKENS)
        if not options:  # steps of one row have kernels of their own
            alone = [captioner.generate_text(prompt, max_new_tokens=NUM_TOKENS)[0] for prompt in prompts[:2]]
            assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in answers[:2]]
    return [list(answer.token_ids) for answer in answers]


def exported(prompts: Sequence[str], folder: Path) -> Answers:
    """Answers of the exported decoder in onnxruntime. They are compared, so the export need not compare with torch."""
    spec = CaptionerSpec(llama_dir=str(SMOLLM2))
    run_export_decoder(DecoderJob(spec=spec, out=str(folder / "decoder"), compare=False))
    with Captioner.load(decoder=folder / "decoder") as captioner:
        answers = captioner.generate_text(list(prompts), max_new_tokens=NUM_TOKENS)
    return [list(answer.token_ids) for answer in answers]


WAYS: Final[Mapping[str, Callable[[Sequence[str], Path], Answers]]] = {
    "kernels": together,
    "two ranks": partial(together, tensor_parallel=2),
    "ONNX": exported,
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_in_all_scripts_are_those_of_transformers(way: str, expected: Answers, tmp_path: Path) -> None:
    assert WAYS[way](PROMPTS, tmp_path) == expected
