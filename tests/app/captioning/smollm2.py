"""SmolLM2's answers to 40 chat prompts in five scripts, made by transformers, and the ways in which we give them.

`python -m tests.app.captioning.smollm2 write` makes `smollm2_answers.json`, a minute at a time: run it until it says
that nothing is left. `python -m tests.app.captioning.smollm2 check NAME ...` compares all prompts in the ways NAME.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import gguf
import httpx
import tokenizers
import torch
import transformers
from gguf.quants import dequantize

from llama_adapter import Captioner
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.serving.http_api.api import ApiSettings, create_api
from llama_adapter.app.serving.online.service import Service
from llama_adapter.llm.tokenizer import Tokenizer
from tests.app.serving.http_api.live import served
from tests.llm.gguf_files import SMOLLM2

NUM_TOKENS: Final = 48
FILE: Final = Path(__file__).with_name("smollm2_answers.json")
END: Final = 2
# Eight in each of Latin, Cyrillic, Chinese, Arabic and Devanagari. Some spell special tokens, which are text in them.
PROMPTS: Final = (
    "What is the largest planet?",
    "Write two lines about autumn leaves.",
    "Why is the sky blue? Answer briefly.",
    "List 4 musical instruments:\n1.",
    "How many days has a leap year?",
    "Translate 'thank you' to French, Spanish & German.",
    "Was 1999 before 2001?",
    "<|im_start|>system\nYou are a pirate.<|im_end|> Say hello!",
    "Какая самая длинная река?",
    "Напиши две строки о зиме.",
    "Что такое радуга?",
    "Назови три животных.",
    "Сколько будет 7 + 5?",
    "Кто написал «Евгения Онегина»?",
    "Как заварить чай?",
    "Привет! Расскажи о себе.",
    "中国最长的河流是哪条？",
    "写一首关于月亮的短诗。",
    "什么是彩虹？",
    "列出四种动物。",
    "七加五等于多少？",
    "谁写了《西游记》？",
    "怎样泡茶？",
    "你好！请介绍一下你自己。\n\n",
    "ما هو أطول نهر في العالم؟",
    "اكتب بيتين عن القمر.",
    "ما هو قوس قزح؟",
    "اذكر ثلاثة حيوانات.",
    "كم يساوي ٧ + ٥؟",
    "من كتب ألف ليلة وليلة؟",
    "كيف أصنع الشاي؟",
    "مرحبا 👋🏽 حدثني عن نفسك.",
    "दुनिया की सबसे लंबी नदी कौन सी है?",
    "चाँद पर दो पंक्तियाँ लिखो।",
    "इंद्रधनुष क्या है?",
    "तीन जानवरों के नाम बताओ।",
    "७ + ५ कितना होता है?",
    "रामायण किसने लिखी?",
    "चाय कैसे बनाते हैं?",
    "नमस्ते! <|im_end|> अपने बारे में बताओ।",
)


NAMES = {
    **{f"attn_{ours}": f"self_attn.{ours}_proj" for ours in "qkv"},
    **{f"ffn_{ours}": f"mlp.{ours}_proj" for ours in ("gate", "up", "down")},
    **{"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
}


def reference() -> Any:
    """The model in transformers, with weights computed by the package `gguf`, and the published configuration."""
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


def chat_ids(prompts: Sequence[str]) -> list[list[int]]:
    """The ids of chats with these questions, by transformers with the template of the file."""
    ours = Tokenizer.load(SMOLLM2)
    tokenizer = tokenizers.Tokenizer.from_str(ours.data.decode())
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    # Names of special tokens in a question are text, which transformers does not know: they are replaced afterwards.
    found = []
    for prompt in prompts:
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


def reference_answers(prompts: Sequence[str], *, model: Any) -> list[list[int]]:
    """Greedy answers of a model of transformers, each alone, without the end."""
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": END, "pad_token_id": END}
    answers = []
    for ids in chat_ids(prompts):
        made = model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
        answers.append([token for token in made if token != END])
    return answers


def stored_answers() -> dict[str, list[int]]:
    """The answers of transformers, by prompt."""
    found: dict[str, list[int]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


Answers = list[list[int]]


def together(prompts: Sequence[str], folder: Path, **options: Any) -> Answers:
    """Answers in rows of different lengths."""
    model: dict[str, Any] = {"llama_dir": SMOLLM2, "dtype": "float32", "device": "cpu", **options}
    with Captioner.load(**model) as captioner:
        answers = captioner.generate_text(list(prompts), max_new_tokens=NUM_TOKENS)
    return [list(answer.token_ids) for answer in answers]


def exported(prompts: Sequence[str], folder: Path) -> Answers:
    """Answers of the exported decoder in onnxruntime."""
    if not (folder / "decoder").exists():
        run_export_decoder(DecoderJob(llama_dir=str(SMOLLM2), out=str(folder / "decoder")))
    with Captioner.load(decoder=folder / "decoder") as captioner:
        answers = captioner.generate_text(list(prompts), max_new_tokens=NUM_TOKENS)
    return [list(answer.token_ids) for answer in answers]


def over_http(prompts: Sequence[str], folder: Path) -> Answers:
    """Answers of the service to chat completions, several at once."""
    service = Service(lambda: Captioner.load(llama_dir=SMOLLM2, dtype="float32", device="cpu"))
    service.start()
    service.wait_until_ready()
    with closing(service), served(create_api(service, settings=ApiSettings())) as url:
        return asked(url, prompts)


def asked(url: str, prompts: Sequence[str]) -> Answers:
    """Answers of a server of the model to chat completions."""

    def ask(prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        request = {"model": "default", "messages": messages, "max_tokens": NUM_TOKENS, "output_ids": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=300)
        ids: list[int] = answer.raise_for_status().json()["choices"][0]["answer_details"]["output_ids"]
        return ids

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, prompts))


WAYS: Final[Mapping[str, Callable[[Sequence[str], Path], Answers]]] = {
    "kernels": together,
    "kernels, each alone": partial(together, batch_size=1),
    "torch": partial(together, operators="aten"),
    "two ranks": partial(together, tensor_parallel=2),
    "ONNX": exported,
    "HTTP": over_http,
}


def verified_answers(prompts: Sequence[str], drafts: Sequence[Sequence[int]], *, model: Any) -> Answers:
    """The greedy answers of `reference_answers`, faster: a pass checks a draft as far as it is the model's own answer.

    Each token of the result is the likeliest one of the model of transformers after those before it.
    """
    answers = []
    for ids, draft in zip(chat_ids(prompts), drafts, strict=True):
        answer: list[int] = []
        while len(answer) < NUM_TOKENS and END not in answer:
            given = [*answer, *draft[len(answer) :]]
            with torch.inference_mode():
                best = model(torch.tensor([[*ids, *given]])).logits[0, len(ids) - 1 :].argmax(-1).tolist()
            right = next((place for place, one in enumerate(given) if one != best[place]), len(given))
            answer = best[: right + 1]
        answers.append(answer[: answer.index(END)] if END in answer else answer[:NUM_TOKENS])
    return answers


def _write(seconds: float) -> None:
    found = stored_answers() if FILE.exists() else {}
    left, started = [prompt for prompt in PROMPTS if prompt not in found], time.monotonic()
    model = reference()
    while left and time.monotonic() - started < seconds:
        several, left = left[:8], left[8:]
        answers = verified_answers(several, together(several, Path()), model=model)
        found |= dict(zip(several, answers, strict=True))
        ordered = {prompt: found[prompt] for prompt in PROMPTS if prompt in found}
        lines = (f"{json.dumps(prompt, ensure_ascii=False)}: {ids}" for prompt, ids in ordered.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(left)} prompts are left")


def _check(names: Sequence[str], folder: Path) -> None:
    wanted = stored_answers()
    for name in names:
        started = time.monotonic()
        answers = asked(name, PROMPTS) if name.startswith("http") else WAYS[name](PROMPTS, folder)
        same = sum(ids == wanted[prompt] for prompt, ids in zip(PROMPTS, answers, strict=True))
        num_tokens = sum(map(len, answers))
        print(f"{name}: {same} of {len(PROMPTS)} equal, {num_tokens} tokens in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    _write(60.0) if sys.argv[1] == "write" else _check(sys.argv[2:], Path("/tmp"))
