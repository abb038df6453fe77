"""A real model in a GGUF file, SmolLM2-135M-Instruct in Q4_1, from its file to its texts."""

from typing import Any

import gguf
import pytest
import tokenizers
import torch
from gguf.quants import dequantize

from llama_adapter import Captioner
from tests.llm.gguf_files import SMOLLM2

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "List three colours:\n1."]
# As the template of the file writes it.
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
)
NAMES = {
    **{f"attn_{ours}": f"self_attn.{ours}_proj" for ours in "qkv"},
    **{f"ffn_{ours}": f"mlp.{ours}_proj" for ours in ("gate", "up", "down")},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}


def reference() -> Any:
    """The model in transformers, with weights computed by the package `gguf`, and the published configuration."""
    import transformers

    config = transformers.LlamaConfig(
        **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for tensor in gguf.GGUFReader(SMOLLM2).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        top, *rest = tensor.name.removesuffix(".weight").split(".")
        if not rest:
            state[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[top] + ".weight"] = weight
            continue
        if rest[1] in ("attn_q", "attn_k"):  # from the order of Meta's files
            weight = weight.reshape(-1, 32, 2, 576).transpose(1, 2).reshape(weight.shape)
        state[f"model.layers.{rest[0]}.{NAMES[rest[1]]}.weight"] = weight
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.mark.slow
def test_tokens_of_a_real_model_equal_those_of_transformers() -> None:
    assert SMOLLM2.is_file(), "`make .venv/smollm2` fetches it"
    captioner = Captioner.load(llama_dir=SMOLLM2, dtype="float32")
    prompts = [captioner.tokenizer.encode(text) for text in PROMPTS]
    model = reference()
    expected = []
    for ids in prompts:
        settings = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
        made = model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
        expected.append([token for token in made if token != 2])
    answers = captioner.generate_text(prompts, max_new_tokens=32)
    assert [list(answer.token_ids) for answer in answers] == expected
    assert [captioner.tokenizer.decode(ids) for ids in prompts] == PROMPTS
    whole = tokenizers.Tokenizer.from_str(captioner.tokenizer.data.decode()).encode(CHAT)  # knows special tokens
    chat, same = captioner.generate_text(["Name three colours.", list(whole.ids)], max_new_tokens=8)
    assert chat.text
    assert chat.token_ids == same.token_ids
