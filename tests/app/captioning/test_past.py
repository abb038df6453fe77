"""Pasts (cached keys and values) before prompts, through the captioner and the command line."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from llama_adapter import Captioner
from llama_adapter.__main__ import main
from llama_adapter.app.models.resources import sample_pictures
from tests.app.command import Run
from tests.app.exported import exported_embedded
from tests.app.models_of_each_kind import MODELS
from tests.llm.toys import refusal
from tests.parity.exported import choice_limit
from tests.parity.golden import GOLDEN

LLAMA = {"llama_dir": GOLDEN / "LLaMA-HF/TINY"}
NUM_PAST = 6


@pytest.mark.slow  # imports transformers
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.proves("prefix tuning", "CPU")
def test_answers_behind_a_peft_adapter_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    options = MODELS["prefix tuning"](tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(LLAMA["llama_dir"], dtype=torch.float32).eval()
    sizes, [flat] = theirs.config, load_file(tmp_path / "adapter_model.safetensors").values()
    heads, width = sizes.num_attention_heads, sizes.hidden_size // sizes.num_attention_heads
    # The layout of PeftModel.get_prompt: (tokens, layers * 2, heads, width), with keys and values alternating.
    parts = torch.tensor(flat).view(NUM_PAST, sizes.num_hidden_layers * 2, heads, width)
    pairs = parts.permute(1, 2, 0, 3)[:, None].split(2)
    captioner = Captioner.load(**options, batch_size=3, dtype="float32")
    prompts = [*map(captioner.tokenizer.encode, ("Hello", "The sun is", "A long prompt of words, again and"))]
    settings = transformers.GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=2, pad_token_id=0)
    expected = []
    for prompt in prompts:
        past = transformers.DynamicCache()
        for layer, pair in enumerate(pairs):
            past.update(pair[0], pair[1], layer)
        mask = torch.ones(1, NUM_PAST + len(prompt), dtype=torch.long)
        # `generate` counts the past as part of the given ids, and drops that number of ids.
        ids = torch.tensor([[0] * NUM_PAST + prompt])
        [row] = theirs.generate(ids, attention_mask=mask, past_key_values=past, generation_config=settings).tolist()
        row = row[NUM_PAST + len(prompt) :]
        expected.append(row[: row.index(2)] if 2 in row else row)

    answers = captioner.generate_text(prompts, max_new_tokens=20)

    assert [list(answer.token_ids) for answer in answers] == expected
    plain = Captioner.load(**LLAMA, dtype="float32")
    assert [list(answer.token_ids) for answer in plain.generate_text(prompts, max_new_tokens=20)] != expected
    assert captioner.info.context == plain.info.context - NUM_PAST


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys and values of a text placed before the embedded model's prompts."""
    path = tmp_path_factory.mktemp("past") / "pre_caches.npy"
    assert main(["encode", "--text", "Answer in one word.", "--out", str(path), "--dtype", "float32"]) == 0
    return path


@pytest.mark.proves("prefix tuning", "CPU")
@pytest.mark.proves("prefix tuning", "ONNX")
def test_an_exported_decoder_has_torchs_answers_behind_a_past(past: Path) -> None:
    pictures = sorted(sample_pictures().iterdir())[:6]
    question, choices = "What colour is the background?", ["red", "white"]
    ours = Captioner.load(past_key_values=past, dtype="float32", batch_size=4)
    exported = Captioner.load(past_key_values=past, decoder=exported_embedded(), batch_size=4)

    for options in ({}, {"temperature": 5.0, "top_k": 50, "seed": 3, "max_new_tokens": 12}):
        wanted = ours.generate(pictures, question, **options)  # type: ignore[arg-type]
        made = exported.generate(pictures, question, **options)  # type: ignore[arg-type]
        assert [one.token_ids for one in made] == [one.token_ids for one in wanted]
    for one, other in zip(
        exported.generate(pictures[:3], question, choices=choices),
        ours.generate(pictures[:3], question, choices=choices),
        strict=True,
    ):
        assert one.choice == pytest.approx(other.choice, abs=choice_limit())


@pytest.mark.slow
def test_records_with_and_without_a_past_differ(past: Path, tmp_path: Path, run: Run) -> None:
    command = ["caption", str(min(sample_pictures().iterdir())), "--out", str(tmp_path / "records.jsonl")]

    for flags in ([], ["--past-key-values", str(past)], ["--past-key-values", str(past)]):
        assert run(command, flags).code == 0

    first, second = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert first["id"] != second["id"]


def test_what_is_wrong_with_a_past_is_told(past: Path, tmp_path: Path, snapshot: object) -> None:
    whole = np.load(past)
    layers, _, heads, _, width = whole.shape
    (tmp_path / "empty").mkdir()
    for name, kind in {"lora": "LORA", "bare": "PREFIX_TUNING", "other": "PREFIX_TUNING"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    save_file({"prompt_embeddings": np.zeros((4, 10), np.float32)}, tmp_path / "other/adapter_model.safetensors")
    arrays = {
        "layers.npy": whole[:-1],
        "flat.npy": whole.ravel(),
        "long.npy": np.zeros((layers, 2, heads, 5000, width), np.float16),
        "none.npy": whole[:, :, :, :0],
        "nan.npy": np.full_like(whole, np.nan),
        "texts.npy": np.array(["a"]),
    }
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
    (tmp_path / "cut.npy").write_bytes(past.read_bytes()[:-100])
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)

    names = ("missing", "lora", "bare", "empty", "other", *arrays, "cut.npy", "pickled.npy")
    load = Captioner.load
    assert [refusal(partial(load, past_key_values=tmp_path / name), tmp_path) for name in names] == snapshot


@pytest.mark.parametrize(
    "flags", [["picture.jpg"], ["--keys-values"], ["--list", "names"], []], ids=["picture", "keys", "list", "suffix"]
)
def test_a_text_is_encoded_alone(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / ("past.npy" if flags else "past")

    assert main(["encode", "--text", "x", "--out", str(out), *flags]) == 2
    assert not out.exists()
