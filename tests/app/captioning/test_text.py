"""Prompts without a picture."""

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_adapter import Answer, Captioner, RawPrompt, TextDelta, UsageError
from llama_adapter.app.captioning.captioner import Prompt, WorkItem, WorkQuestion, text_items
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.checkpoints import ModelSources, read_encoder
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.pictures.reading.reader import PictureReading
from llama_adapter.llm.engine.sampling_params import SamplingParams
from llama_adapter.llm.prefix import TextPrefix
from llama_adapter.llm.prompt import format_prompt
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.schemes import QUANTISED, Precision
from llama_adapter.vision.pixels import zero_picture
from tests.app.golden import GOLDEN, model_options, picture
from tests.app.models.adapters import DIM, HEADS, LAYERS, v1_adapter

PROMPTS: list[Prompt] = [
    "Name a colour.",
    ("Is it red?", "Look at the border."),
    RawPrompt("Once upon a time"),
    [1, 5, 9, 200],
    ("", ""),
    "Name a colour.",
]
LLAMA = {"llama_dir": str(GOLDEN / "LLaMA"), "llama_type": "TINY"}


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return Captioner.load(**model_options(), batch_size=4)


@pytest.mark.parametrize("text_prefix", ["none", "zeros"])
def test_answers_do_not_depend_on_the_batch_or_on_pictures_in_it(captioner: Captioner, text_prefix: TextPrefix) -> None:
    alone = Captioner.load(**model_options(), batch_size=1)
    expected = [
        alone.generate_text([prompt], text_prefix=text_prefix, max_new_tokens=12)[0].token_ids for prompt in PROMPTS
    ]
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
    forms: list[Prompt] = [
        "Name a colour.",
        ("Name a colour.", None),
        RawPrompt(text),
        captioner.tokenizer.encode(text),
    ]

    alone = [captioner.generate_text(form, max_new_tokens=6) for form in forms]
    together = captioner.generate_text(iter(forms), max_new_tokens=6)

    assert [len(answers) for answers in alone] == [1, 1, 1, 1]
    assert len({answers[0].token_ids for answers in [*alone, *([one] for one in together)]}) == 1
    assert [answer.picture for answer in together] == ["prompt 0", "prompt 1", "prompt 2", "prompt 3"]


def test_streams_and_event_loops_give_the_same(captioner: Captioner) -> None:
    options = {"temperature": 0.9, "seed": 3, "max_new_tokens": 8}
    whole = captioner.generate_text(PROMPTS[:2], **options)  # type: ignore[arg-type]

    events = list(captioner.stream_text(PROMPTS[:2], **options))  # type: ignore[arg-type]
    from_loop = asyncio.run(captioner.agenerate_text(PROMPTS[:2], **options))  # type: ignore[arg-type]

    for answer in whole:
        pieces = [event.text for event in events if isinstance(event, TextDelta) and event.index == answer.index]
        assert "".join(pieces) == answer.text
    assert [answer.token_ids for answer in from_loop] == [answer.token_ids for answer in whole]


def test_choices_are_scored_without_a_picture(captioner: Captioner) -> None:
    (answer,) = captioner.generate_text("Which?", choices=["red", "green"])

    assert answer.choice is not None
    assert sum(answer.choice.values()) == pytest.approx(1)
    assert answer.text in ("red", "green")


@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])
def test_the_default_of_an_adapter_is_a_picture_of_zeros(adapter: str) -> None:
    captioner = Captioner.load(**model_options(adapter))
    zeros = PictureReading(pixels=zero_picture(captioner.image_size, channel_order="rgb"))
    item = WorkItem(picture=zeros, label="", questions=(WorkQuestion(index=0, prompt="Name a colour."),))
    (expected,) = (e for e in captioner.run([item], sampling=SamplingParams(max_new_tokens=8)) if isinstance(e, Answer))

    (answer,) = captioner.generate_text("Name a colour.", max_new_tokens=8)
    (closed,) = captioner.generate_text("Name a colour.", max_new_tokens=8, text_prefix="none")

    assert answer.token_ids == expected.token_ids != closed.token_ids


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    "options", [{"llama_dir": GOLDEN / "LLaMA-HF/TINY"}, model_options("CAPTION-TINY")], ids=["alone", "gates closed"]
)
@pytest.mark.proves("text without a picture", "CPU")
@pytest.mark.proves("LLaMA without adapter", "CPU")
def test_without_a_prefix_it_is_the_llama_of_transformers(options: dict[str, object]) -> None:
    import transformers

    captioner = Captioner.load(**options, batch_size=3, dtype="float32")  # type: ignore[arg-type]
    prompts = [
        captioner.tokenizer.encode(text) for text in ("Hello", "The sun is", "A long prompt of words, again and")
    ]
    prompts.append([1, 17])
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
    with pytest.raises(ValueError, match="text_prefix"):
        captioner.generate_text("Hello", text_prefix="zeros")
    with pytest.raises(ValueError, match="clip"):
        Captioner.load(**LLAMA, clip="ViT-L-14.pt")


def test_llama_alone_runs_by_all_operators() -> None:
    plain = Captioner.load(**LLAMA, operators="aten").generate_text(PROMPTS, max_new_tokens=8)  # type: ignore[arg-type]
    auto = Captioner.load(**LLAMA).generate_text(PROMPTS, max_new_tokens=8)  # type: ignore[arg-type]

    assert [answer.token_ids for answer in plain] == [answer.token_ids for answer in auto]


@pytest.mark.parametrize("precision", QUANTISED)
def test_llama_alone_answers_with_fewer_bits(precision: Precision) -> None:
    captioner = Captioner.load(**LLAMA, precision=precision)  # type: ignore[arg-type]
    together = captioner.generate_text(PROMPTS, max_new_tokens=8)
    alone = [captioner.generate_text([prompt], max_new_tokens=8)[0] for prompt in PROMPTS]

    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


# Adapters of LLaMA-Adapter V1


def logits_of_v1(adapter: dict[str, torch.Tensor], token_ids: list[int]) -> torch.Tensor:
    """Next-token logits of a plain float64 LLaMA with V1's attention, computed one head and one token at a time."""
    w = {
        name: tensor.double()
        for name, tensor in torch.load(LLAMA_FOLDER / "consolidated.00.pth", weights_only=True).items()
    }
    head_dim, num_adapter = DIM // HEADS, len(adapter["adapter_query.weight"]) // 10
    queries = adapter["adapter_query.weight"].double().view(num_adapter, 10, DIM)
    eps = PARAMS["norm_eps"]

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def rotated(x: torch.Tensor) -> torch.Tensor:  # (S, head_dim)
        angles = torch.arange(len(x)).double()[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim).double()
        even, odd, cos, sin = x[:, 0::2], x[:, 1::2], angles.cos(), angles.sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(1)

    x = w["tok_embeddings.weight"][token_ids]
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        h = norm(x, w[f"{at}attention_norm.weight"])
        q, k, v = (h @ w[f"{at}attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        outs = []
        for head in range(HEADS):
            part = slice(head * head_dim, (head + 1) * head_dim)
            q_h, k_h = rotated(q[:, part]), rotated(k[:, part])
            scores = q_h @ k_h.T / math.sqrt(head_dim)
            mask = torch.ones_like(scores).triu(1).bool()
            out = scores.masked_fill(mask, -math.inf).softmax(-1) @ v[:, part]
            if (j := layer - (LAYERS - num_adapter)) >= 0:
                a_k, a_v = (queries[j] @ w[f"{at}attention.{name}.weight"].T[:, part] for name in ("wk", "wv"))
                gate = adapter[f"{at}attention.gate"].double().flatten()
                gate = gate[head if len(gate) > 1 else 0]
                out = out + gate * ((q_h @ a_k.T / math.sqrt(head_dim)).softmax(-1) @ a_v)
            outs.append(out)
        x = x + torch.cat(outs, dim=-1) @ w[f"{at}attention.wo.weight"].T
        h = norm(x, w[f"{at}ffn_norm.weight"])
        up = torch.nn.functional.silu(h @ w[f"{at}feed_forward.w1.weight"].T) * (h @ w[f"{at}feed_forward.w3.weight"].T)
        x = x + up @ w[f"{at}feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"])[-1] @ w["output.weight"].T


LLAMA_FOLDER = GOLDEN / "LLaMA" / "TINY"
PARAMS = json.loads((LLAMA_FOLDER / "params.json").read_text(encoding="utf-8"))


@pytest.mark.proves("LLaMA-Adapter V1 for texts", "CPU")
@pytest.mark.parametrize("operators", ["auto", "aten"])
@pytest.mark.parametrize("heads", [HEADS, 1])
def test_an_adapter_of_v1_answers_as_a_naive_float64_loop(heads: int, operators: Any, tmp_path: Path) -> None:
    adapter = v1_adapter(tmp_path / "v1.pth", heads=heads)
    prompts = [[1, 5, 9, 200], [1, 44, 17]]

    with Captioner.load(**LLAMA, adapter=tmp_path / "v1.pth", operators=operators) as captioner:
        answers = captioner.generate_text(prompts, max_new_tokens=6)
        bare = captioner.generate_text(prompts, max_new_tokens=6, text_prefix="none")

    for prompt, answer in zip(prompts, answers, strict=True):
        expected: list[int] = []
        while len(expected) < 6 and (not expected or expected[-1] != captioner.tokenizer.eos_id):
            expected.append(int(logits_of_v1(adapter, prompt + expected).argmax()))
        assert list(answer.token_ids) == [one for one in expected if one != captioner.tokenizer.eos_id]
    assert [answer.token_ids for answer in bare] != [answer.token_ids for answer in answers]


@pytest.mark.slow
@pytest.mark.proves("LLaMA-Adapter V1 for texts", "ONNX")
def test_an_exported_adapter_of_v1_answers_as_torchs(tmp_path: Path) -> None:
    v1_adapter(tmp_path / "v1.pth")
    adapter = str(tmp_path / "v1.pth")
    run_export_decoder(DecoderJob(**LLAMA, adapter=adapter, out=str(tmp_path / "decoder")))  # type: ignore[arg-type]

    with Captioner.load(**LLAMA, adapter=adapter) as torchs, Captioner.load(decoder=tmp_path / "decoder") as exported:
        wanted = torchs.generate_text(PROMPTS, max_new_tokens=8)
        made = exported.generate_text(PROMPTS, max_new_tokens=8)
        with pytest.raises(UsageError):
            exported.caption(picture())

    assert [answer.token_ids for answer in made] == [answer.token_ids for answer in wanted]


def test_an_adapter_of_v1_sees_no_pictures_and_others_learned_no_text(captioner: Captioner, tmp_path: Path) -> None:
    v1_adapter(tmp_path / "v1.pth")

    sources = ModelSources(**LLAMA, adapter=tmp_path / "v1.pth")
    assert {finding.level for finding in diagnose(sources)} == {"ok"}
    with pytest.raises(CheckpointError):
        convert(sources, tmp_path / "bundle")
    with pytest.raises(CheckpointError):
        read_encoder(tmp_path / "v1.pth", clip=model_options()["clip"])
    with Captioner.load(**LLAMA, adapter=tmp_path / "v1.pth") as texts:
        with pytest.raises(UsageError):
            texts.caption(picture())
        with pytest.raises(ValueError, match="zeros"):
            texts.generate_text("x", text_prefix="zeros")
    for other in (captioner, Captioner.load(**LLAMA)):
        with pytest.raises(ValueError, match="learned"):
            other.generate_text("x", text_prefix="learned")


@pytest.mark.parametrize(
    "change",
    [
        {"adapter_query.weight": torch.zeros(15, 64)},
        {"adapter_query.weight": torch.zeros(20, 32)},
        {"adapter_query.weight": torch.zeros(1000, 64)},
        {"layers.0.attention.wq.weight": torch.zeros(64, 64)},
        {"layers.1.attention.gate": torch.zeros(1, 3, 1, 1)},
        {"layers.99.attention.gate": torch.zeros(1)},
    ],
)
def test_a_damaged_adapter_of_v1_is_refused(change: dict[str, torch.Tensor], tmp_path: Path) -> None:
    torch.save(v1_adapter(tmp_path / "v1.pth") | change, tmp_path / "v1.pth")

    with pytest.raises(CheckpointError):
        Captioner.load(**LLAMA, adapter=tmp_path / "v1.pth")


def test_a_checkpoint_of_v1s_trainer_holds_the_whole_llama_too(tmp_path: Path) -> None:
    tensors = v1_adapter(tmp_path / "v1.pth")
    llama = torch.load(LLAMA_FOLDER / "consolidated.00.pth", weights_only=True)
    llama |= {"norm.weight": llama["norm.weight"] * 2}
    checkpoint = {**llama, **tensors, "rope.freqs": torch.ones(8)}
    torch.save({"model": checkpoint, "epoch": 4}, tmp_path / "checkpoint-4.pth")
    own = tmp_path / "own"
    own.mkdir()
    (own / "params.json").write_bytes((LLAMA_FOLDER / "params.json").read_bytes())
    (own / "tokenizer.model").write_bytes((GOLDEN / "LLaMA" / "tokenizer.model").read_bytes())
    torch.save(llama, own / "consolidated.00.pth")

    with (
        Captioner.load(**LLAMA, adapter=tmp_path / "checkpoint-4.pth") as trained,
        Captioner.load(llama_dir=own, adapter=tmp_path / "v1.pth") as separate,
    ):
        answers = trained.generate_text(PROMPTS, max_new_tokens=8)
        wanted = separate.generate_text(PROMPTS, max_new_tokens=8)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]

    del checkpoint["layers.1.attention.wv.weight"]
    torch.save({"model": checkpoint}, tmp_path / "checkpoint-4.pth")
    with pytest.raises(CheckpointError, match=r"layers\.1\.attention\.wv\.weight"):
        Captioner.load(**LLAMA, adapter=tmp_path / "checkpoint-4.pth")


def test_an_adapter_of_imagebind_llm_is_told(tmp_path: Path) -> None:
    names = ("image_bind_proj.weight", "image_bind_norm_1.weight", "prefix_query.weight", "llama.norm.weight")
    torch.save({"model": {name: torch.zeros(4, 64) for name in names}}, tmp_path / "7B-beta.pth")

    with pytest.raises(CheckpointError, match="ImageBind"):
        Captioner.load(**LLAMA, adapter=tmp_path / "7B-beta.pth")
