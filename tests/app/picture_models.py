"""Toy models that see pictures as tokens, saved by transformers with random weights, and its answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from llama_adapter import Answer, Captioner
from llama_adapter.llm.runners.base import MixedPlan
from tests.llm.vocabularies import tokenizer_json

# As the published templates of LLaVA-1.5 and SmolVLM.
LLAVA = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': '}}{% endif %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLVLM = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
FRAME, SIDE, PATCH = "<fake_token_around_image>", 32, 8
KINDS = ("llava", "joycaption", "smolvlm", "idefics3")
END = "<|eot_id|>"
QUESTIONS = ("What is it?", "Is it red or blue, and how many are there in all?", "a")


def vocabulary() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(tokenizer_json("Qwen").decode())
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    names = ["<image>", FRAME, "<global-img>", *rows]
    made.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in names])
    return made


def save(folder: Path, kind: str, *, has_template: bool = True, decoder: str = "llama", **entries: Any) -> Path:
    """Save a model of a kind with its tokenizer and preprocessing; `decoder` is the type of its language model."""
    torch.manual_seed(KINDS.index(kind))
    words, is_llava = vocabulary(), kind in ("llava", "joycaption")
    image_id = words.token_to_id("<image>")
    text: dict[str, Any] = {
        "vocab_size": words.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": words.token_to_id(END),
        "bos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.3,
        "rms_norm_eps": 1e-5,
    }
    tower: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "initializer_range": 0.3,
    }
    language: Any = transformers.AutoConfig.for_model(decoder, **{**text, **entries})
    model: Any
    if is_llava:
        has_class = kind == "llava"
        vision: Any = transformers.CLIPVisionConfig(**tower) if has_class else transformers.SiglipVisionConfig(**tower)
        model = transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(
                vision_config=vision,
                text_config=language,
                image_token_index=image_id,
                image_seq_length=(SIDE // PATCH) ** 2,
                vision_feature_select_strategy="default" if has_class else "full",
                vision_feature_layer=-2 if has_class else [-2],
            )
        )
    else:
        names = {
            "smolvlm": ("SmolVLM", transformers.SmolVLMConfig),
            "idefics3": ("Idefics3", transformers.Idefics3Config),
        }
        name, config = names[kind]
        model = getattr(transformers, f"{name}ForConditionalGeneration")(
            config(vision_config=tower, text_config=language.to_dict(), image_token_id=image_id, scale_factor=2)
        )
    model.generation_config.eos_token_id = text["eos_token_id"]
    with torch.no_grad():
        for tensor_name, tensor in model.named_parameters():
            if "norm" not in tensor_name and tensor.ndim == 1:
                tensor.normal_(std=0.2)
            elif "projector" in tensor_name or "modality_projection" in tensor_name:
                tensor.normal_(std=0.4)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(words.to_str())
    names_of = {"eos_token": END, "bos_token": "<|begin_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names_of))
    processor(kind).save_pretrained(folder)
    if has_template:
        template = LLAVA if is_llava else SMOLVLM
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    return folder


def processor(kind: str) -> Any:
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind == "llava":
        return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    if kind == "joycaption":
        return SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, **half)
    return SmolVLMImageProcessorPil(
        size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE}, return_row_col_info=True, **half
    )


def pictures(count: int, *, seed: int = 0) -> list[Image.Image]:
    """Pictures of different sizes, shapes and colours."""
    draw = np.random.default_rng(seed)
    sizes = [(40, 30), (33, 100), (64, 64), (200, 50), (20, 21)]
    return [
        Image.fromarray(draw.integers(0, 256, (*sizes[index % len(sizes)][::-1], 3), dtype=np.uint8))
        for index in range(count)
    ]


class Reference:
    """The model of a folder, run by transformers."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.processor = kind, processor(kind)
        self.tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=vocabulary(), bos_token="<|begin_of_text|>", eos_token=END
        )
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.known: dict[object, list[int]] = {}  # answers by what was asked, as several tests ask the same

    def ids(self, images: Sequence[Image.Image], question: str) -> tuple[list[int], dict[str, Any]]:
        """The ids of a prompt and the arguments with its pictures."""
        content: Any = [*[{"type": "image"}] * len(images), {"type": "text", "text": question}]
        template = LLAVA if self.kind in ("llava", "joycaption") else SMOLVLM
        text: Any = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=template, add_generation_prompt=True, tokenize=False
        )
        given: dict[str, Any] = {}
        if self.kind in ("llava", "joycaption"):
            text = text.replace("<image>", "<image>" * (SIDE // PATCH) ** 2)
            if images:
                given = {"pixel_values": self.processor(images=list(images), return_tensors="pt")["pixel_values"]}
        elif images:
            made = self.processor(images=[list(images)], return_tensors="pt")
            given = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
            for rows, columns in zip(made["rows"][0], made["cols"][0], strict=True):
                own = get_image_prompt_string(int(rows), int(columns), 4, FRAME, "<picture>", "<global-img>")
                text = text.replace("<image>", own, 1)
            text = text.replace("<picture>", "<image>")
        return self.tokenizer(text, add_special_tokens=False)["input_ids"], given  # type: ignore[return-value]

    def answer(self, images: Sequence[Image.Image], question: str, *, max_new_tokens: int) -> list[int]:
        """The ids of a greedy answer, without the end."""
        asked = tuple((image.size, image.tobytes()) for image in images), question, max_new_tokens
        if asked not in self.known:
            self.known[asked] = self._answer(images, question, max_new_tokens=max_new_tokens)
        return self.known[asked]

    @torch.inference_mode()
    def _answer(self, images: Sequence[Image.Image], question: str, *, max_new_tokens: int) -> list[int]:
        ids, given = self.ids(images, question)
        prompt = torch.tensor([ids])
        whole = self.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            **given,
        )
        found: list[int] = whole[0, len(ids) :].tolist()
        end = self.tokenizer.convert_tokens_to_ids(END)
        return found[: found.index(end)] if end in found else found


def check_ragged_batches(captioner: Captioner, reference: Reference, *, max_new_tokens: int) -> list[Answer]:
    """Questions about pictures, and without one, are answered in shared batches as by transformers.

    Returns the answers about pictures.
    """
    images = pictures(5)
    questions = [QUESTIONS[index % 3] for index in range(5)]
    answers = captioner.generate(images, questions, max_new_tokens=max_new_tokens)
    texts = captioner.generate_text(QUESTIONS, max_new_tokens=max_new_tokens)

    for answer, image, question in zip(answers, images, questions, strict=True):
        assert answer.error is None
        assert list(answer.token_ids) == reference.answer([image], question, max_new_tokens=max_new_tokens)
    for answer, question in zip(texts, QUESTIONS, strict=True):
        assert list(answer.token_ids) == reference.answer([], question, max_new_tokens=max_new_tokens)
    return answers


def check_further_questions(captioner: Captioner, reference: Reference, *, max_new_tokens: int) -> None:
    """A further question about a picture computes its own tokens only, and is answered as by transformers."""
    first, second = pictures(2, seed=2)
    runner = captioner._engine._runner
    known: list[bool] = []

    def run(plan: Any, own: Any = runner.run) -> Any:
        prefill = plan.prefill if isinstance(plan, MixedPlan) else plan
        known.extend(kept.is_known for kept in getattr(prefill, "kept", ()) if kept is not None)
        return own(plan)

    with patch.object(runner, "run", run):
        for image, question in ((first, 0), (first, 1), (second, 1), (first, 2), (second, 0)):
            answer = captioner.ask(image, QUESTIONS[question], max_new_tokens=max_new_tokens)
            expected = reference.answer([image], QUESTIONS[question], max_new_tokens=max_new_tokens)
            assert list(answer.token_ids) == expected
    assert known == [False, True, False, True, True]
