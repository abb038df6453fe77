"""Models of families that transformers computes: their texts are those of its own `generate`, asked in any way."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llama_adapter import Captioner, ModelRunner, RawPrompt, TextDelta, UsageError
from llama_adapter.app.captioning.assemble_foreign import assemble_foreign
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.models.llama_folder import find_llama
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.runners.foreign import ForeignRunner
from llama_adapter.runtime.errors import CheckpointError, LlamaAdapterError
from tests.app.command import Run
from tests.llm.foreign import END, TOYS, model_of, save
from tests.llm.toys import QueuedBackend, default_dtype

PROMPTS = ["Hello, my name is", "A", "The quick brown fox jumps over the lazy dog, and"]
LENGTH = 10
RAW = [RawPrompt(prompt) for prompt in PROMPTS]


def ids_of(text: str) -> list[int]:
    """The ids of a text in the toys' tokenizer, whose first 256 tokens are bytes."""
    return list(text.encode())


def text_of(ids: tuple[int, ...]) -> str:
    pieces = [bytes([one]) if one < 256 else f"<{one}>".encode() for one in ids]
    return b"".join(pieces).decode(errors="replace")


def generated(model: Any, ids: list[int], *, length: int = LENGTH) -> tuple[int, ...]:
    """The ids of transformers' greedy answer to one prompt, without its end."""
    given = torch.tensor([ids])
    whole = model.generate(given, attention_mask=given * 0 + 1, max_new_tokens=length, do_sample=False, pad_token_id=0)
    return tuple(one for one in whole[0, len(ids) :].tolist() if one != END)


@pytest.fixture(scope="module", params=TOYS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def captioner(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captioner]:
    folder = save(kind, tmp_path_factory.mktemp(kind))
    with Captioner.load(llama_dir=folder, device="cpu", batch_size=2) as made:
        yield made


@pytest.mark.proves("Bloom, GLM, GPT-2, gpt_oss (through transformers)", "CPU")
def test_a_ragged_batch_is_that_of_transformers(kind: str, captioner: Captioner) -> None:
    expected = [generated(model_of(kind), ids_of(prompt)) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    # Three prompts on two slots: the third one joins when a row has ended.
    answers = captioner.generate_text(RAW, max_new_tokens=LENGTH, logprobs=2)
    assert [answer.token_ids for answer in answers] == expected

    ids = torch.tensor([[*ids_of(PROMPTS[0]), *expected[0]]])
    logprobs = model_of(kind)(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
    wanted = logprobs[range(len(expected[0])), expected[0]].tolist()
    assert [one.logprob for one in answers[0].logprobs] == pytest.approx(wanted, abs=1e-4)

    pieces = dict.fromkeys(range(len(PROMPTS)), "")
    for event in captioner.stream_text(RAW, max_new_tokens=LENGTH):
        if isinstance(event, TextDelta):
            pieces[event.index] += event.text
    assert list(pieces.values()) == [answer.text for answer in answers]


@pytest.mark.parametrize("kind", ["bloom", "gpt_oss"], indirect=True)  # all kinds give logits to one sampler
def test_sampled_texts_do_not_depend_on_the_batch(captioner: Captioner) -> None:
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 1.0, "seed": 5}
    alone = [captioner.generate_text(prompt, **options)[0].token_ids for prompt in RAW]
    assert [answer.token_ids for answer in captioner.generate_text(RAW, **options)] == alone


def test_choices_are_scored_by_the_logits(kind: str, captioner: Captioner) -> None:
    choices = ["yes", "n", "perhaps"]
    [answer] = captioner.generate_text(RAW[2], choices=choices)
    scores = []
    for choice in choices:
        ids = [*ids_of(PROMPTS[2]), *ids_of(choice)]
        logprobs = model_of(kind)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        scores.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(len(ids_of(PROMPTS[2])), len(ids))))
    assert answer.text == choices[scores.index(max(scores))]
    assert answer.choice is not None
    wanted = torch.tensor(scores).softmax(-1).tolist()
    assert [answer.choice[choice] for choice in choices] == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("name", ["bloom", "gpt_oss"])
@pytest.mark.proves("Bloom, GLM, GPT-2, gpt_oss (through transformers)", "CUDA")
def test_a_device_with_a_queue_gives_the_same_texts(name: str, tmp_path: Path) -> None:
    folder = str(save(name, tmp_path))
    spec = CaptionerSpec(llama_dir=folder, device="cpu", batch_size=2)
    parts = assemble_foreign(spec, find_llama(folder))
    runner = parts.runner
    assert isinstance(runner, ForeignRunner)
    queued = ForeignRunner(runner.model, runner.config, backend=QueuedBackend())
    for each in (runner, queued):
        each.warm_up(prompt_tokens=5, new_tokens=3)
    with Captioner(dataclasses.replace(parts, runner=queued)) as captioner:
        answers = captioner.generate_text(RAW, max_new_tokens=LENGTH)
    assert [answer.token_ids for answer in answers] == [generated(model_of(name), ids_of(one)) for one in PROMPTS]


def test_what_a_program_sets_in_torch_has_no_effect(tmp_path: Path) -> None:
    folder = save("gptj", tmp_path)  # its table of positions would have torch's default dtype

    def answered() -> object:
        with Captioner.load(llama_dir=folder, device="cpu") as captioner:
            return captioner.generate_text(RAW[0], max_new_tokens=8, logprobs=1)[0].logprobs

    expected, low = answered(), torch.bfloat16
    for context in (default_dtype(low), torch.autocast("cpu", low)):
        with context:
            given = torch.get_default_dtype()
            assert (answered(), torch.get_default_dtype()) == (expected, given)


def test_a_chat_has_the_prompt_of_the_models_own_template(tmp_path: Path) -> None:
    folder = save("glm", tmp_path, chats=True)
    with Captioner.load(llama_dir=folder, device="cpu") as captioner:
        [answer] = captioner.generate_text("Why?", max_new_tokens=8)
    assert answer.token_ids == generated(model_of("glm"), ids_of("<|user|>Why?\n<|assistant|>"), length=8)


def test_a_settings_file_of_a_neighbour(run: Run, tmp_path: Path) -> None:
    folder = save("bloom", tmp_path / "model")
    (tmp_path / "predict.yaml").write_text(
        f"run_mode: predict\nload_checkpoint: {folder}\npredict_data: '{PROMPTS[0]}'\ncontext: {{device_target: CPU}}\n"
        "model: {model_config: {type: BloomConfig, max_new_tokens: 16}, arch: {type: BloomLMHeadModel}}\n"
    )
    limits = ["--max-new-tokens", str(LENGTH), "--device", "cpu", "--dtype", "float32"]
    ran = run("generate", "--config", str(tmp_path / "predict.yaml"), *limits)
    assert ran.code == 0, ran.err
    assert ran.records[0]["text"] == text_of(generated(model_of("bloom"), ids_of(PROMPTS[0])))
    assert ran.err.count("(bloom) runs through transformers") == 1


def test_the_4_bit_weights_of_gpt_oss(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = save("gpt_oss", tmp_path, **sizes)
    file = folder / "model.safetensors"
    state = load_file(file)
    torch.manual_seed(1)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, wide, narrow = state.pop(name).shape  # stored transposed, in blocks of 32 weights
        state[f"{name}_blocks"] = torch.randint(0, 256, (experts, narrow, wide // 32, 16), dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(123, 126, (experts, narrow, wide // 32), dtype=torch.uint8)
    save_file(state, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    settings = {"model_path": str(folder), "exe_mode": "ge_graph", "model_config": {"dtype": "float32"}}
    runner = ModelRunner({**settings, "data_config": {"max_new_tokens": LENGTH}}, device="cpu")
    with pytest.warns(UserWarning, match="Steps run eager: mode `ge_graph`"):
        runner.init_model()
    assert runner.execute_mode == "eager"
    runner.model_generate([PROMPTS[0]])
    assert runner.answers[0].token_ids == generated(theirs, ids_of(PROMPTS[0]))
    runner.close()


@pytest.mark.parametrize(
    ("entries", "options", "error", "told"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, {}, CheckpointError, "needs code of its own folder"),
        (
            {"auto_map": {"AutoModel": "modeling_chatglm.ChatGLMModel"}, "model_type": "chatglm"},
            {},
            CheckpointError,
            "needs code of its own folder",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, {}, CheckpointError, "are quantised"),
        ({"peft": True}, {}, CheckpointError, "an adapter of PEFT"),
        ({"n_layer": 5}, {}, CheckpointError, "lack `transformer.h.3"),
        ({"n_head": "six"}, {}, CheckpointError, "transformers cannot open"),
        ({"vocab_size": 100}, {}, CheckpointError, "100 tokens"),
        ({}, {"context": 512}, CheckpointError, "256 positions"),
        ({}, {"precision": "int8"}, UsageError, "without precision"),
        ({}, {"lora": ["a"]}, UsageError, "without lora"),
        ({}, {"encoder": __file__}, UsageError, "without encoder"),
        ({}, {"mode": "graph", "strict": True}, LlamaAdapterError, "without graphs"),
    ],
)
def test_what_is_refused(entries: Any, options: Any, error: Any, told: str, tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path)
    (folder / "evil.py").write_text("raise SystemExit('code of a folder was run')")
    if "peft" in entries:
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    with pytest.raises(error, match=told):
        Captioner.load(llama_dir=folder, device="cpu", **options)


def test_what_only_our_own_decoder_does_names_the_ways_that_are_there(run: Run, tmp_path: Path) -> None:
    folder = save("opt", tmp_path)
    ran = run("export", "decoder", "--llama-dir", str(folder), "--out", str(tmp_path / "decoder"))
    assert ran.code == 1
    assert "of type 'opt', which is run for texts only, by the package transformers" in ran.err
    ran = run("caption", "assets/pictures", "--llama-dir", str(folder))
    assert "--llama-dir needs --adapter" in ran.err


def test_without_transformers_the_way_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save("opt", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="run through the package transformers") as raised:
        Captioner.load(llama_dir=folder, device="cpu")
    assert "[transformers]" in raised.value.hint


@pytest.mark.parametrize("kind", ["gpt2", "glm", "gpt_oss"])
def test_doctor_says_what_a_folder_holds_and_lacks(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / kind)
    sources = CaptionerSpec(llama_dir=folder)
    findings = diagnose(sources)
    assert {finding.level for finding in findings} == {"ok"}
    number = sum(parameter.numel() for parameter in model_of(kind).parameters())
    assert any(f"of type {kind}, {number:,} weights in 1 file(s)" in finding.sentence for finding in findings)
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, folder / "model.safetensors")
    assert f"infinite or not numbers, in `{name}`" in next(
        one.sentence for one in diagnose(sources) if one.level == "error"
    )
    (folder / "model.safetensors").unlink()
    assert [one.level for one in diagnose(sources)].count("error") == 1
