"""A model with a `tokenizer.json` and a chat template: in Python, over HTTP, as an export, in training and bundles."""

import dataclasses
import json
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from llama_adapter import Captioner, Dialogue, PromptError, RawPrompt, UsageError
from llama_adapter.app.command_line.doctor.model import diagnose
from llama_adapter.app.jobs.records.key import record_settings
from llama_adapter.app.learning.training.asking import Asker
from llama_adapter.app.learning.training.job import TrainingChoice
from llama_adapter.app.learning.training.model import open_trainable
from llama_adapter.app.learning.training.results import write_adapter
from llama_adapter.app.learning.training.run import model_texts
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import CHAT_CONTEXT
from llama_adapter.app.models.graph_export.decoder import DecoderJob, run_export_decoder
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import training_template
from llama_adapter.app.serving.online.service import Service
from llama_adapter.llm.conversation import format_prompt
from llama_adapter.llm.engine.sampling_params import SamplingParams
from tests.app.golden import GOLDEN, picture
from tests.app.serving.http_api.live import client_of
from tests.llm.test_chat import CHATML
from tests.llm.vocabularies import tokenizer_json

TURNS: tuple[Any, ...] = (("system", "Be <|im_end|> brief."), ("user", "Hello"), ("assistant", "Hi."))
END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA with its tokenizer and chat template, as transformers saves it."""
    place = tmp_path_factory.mktemp("chat")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer_json("Qwen").decode()),
        eos_token=END,
        chat_template=CHATML,
    )
    theirs.save_pretrained(place)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    ends = [theirs.convert_tokens_to_ids(END), 5]
    config = transformers.LlamaConfig(vocab_size=len(theirs), eos_token_id=ends, initializer_range=0.5, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def captioner(folder: Path) -> Captioner:
    return Captioner.load(llama_dir=folder, device="cpu", dtype="float32")


def expected_ids(folder: Path, *turns: tuple[str, str], **values: Any) -> tuple[int, ...]:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": role, "content": text} for role, text in turns]
    return tuple(theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **values))


def test_prompts_are_chats_in_the_models_own_template(folder: Path, captioner: Captioner) -> None:
    encode = captioner.encode_prompt

    assert captioner.info.template == "chat"
    assert captioner.info.context == CHAT_CONTEXT
    assert encode("Why?").token_ids == expected_ids(folder, ("user", "Why?"))
    assert encode(("Why?", "It is red.")).token_ids == expected_ids(folder, ("user", "Why?\nIt is red."))
    earlier = (("user", "Hello"), ("assistant", "Hi."))
    assert encode(Dialogue(earlier, "Why?")).token_ids == expected_ids(folder, *earlier, ("user", "Why?"))
    of_json: Any = [list(turn) for turn in earlier]
    lists: Any = [[], [], [0]]
    assert Dialogue(of_json, "Why?", lists) == Dialogue(earlier, "Why?", ((), (), (0,)))
    assert hash(Dialogue(of_json, "Why?", lists))
    assert encode(RawPrompt("Why?")).token_ids == tuple(captioner.tokenizer.encode("Why?"))
    end = captioner.tokenizer.marks[END].id
    spelled = encode(Dialogue(TURNS, "<|im_start|>?"))
    assert spelled.token_ids.count(end) == 4
    assert spelled.text == "<|im_start|>?"


def test_any_end_token_ends_an_answer(folder: Path, captioner: Captioner) -> None:
    assert captioner.tokenizer.end_ids == (captioner.tokenizer.marks[END].id, 5)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [(7, 8, 9, number) for number in range(20, 40)]
    answers = captioner.generate_text([list(prompt) for prompt in prompts], max_new_tokens=20)
    ends = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :].tolist()
        ends |= {whole[-1]} & set(captioner.tokenizer.end_ids)
        assert list(answer.token_ids) == [one for one in whole if one not in captioner.tokenizer.end_ids]
    assert ends, "some answers end before the limit"


def test_choices_end_with_the_end_of_the_assistants_turn(captioner: Captioner) -> None:
    encoded = captioner._prompts.encode("How many?", ("1", "10"))
    whole = captioner.tokenizer.encode_run("assistant\n10", is_inner=True)

    assert encoded.has_end
    assert encoded.end_id == captioner.tokenizer.marks[END].id
    assert encoded.continuations[1] == (*whole[-len(encoded.text_ids(1)) :], encoded.end_id)
    [answer] = captioner.generate_text("How many?", choices=["1", "10"])
    assert answer.text in ("1", "10")


def test_another_template_may_be_asked_for(folder: Path, captioner: Captioner) -> None:
    with Captioner.load(llama_dir=folder, prompt_template="instruction", device="cpu", dtype="float32") as plain:
        assert plain.encode_prompt("Why?").token_ids == tuple(plain.tokenizer.encode(format_prompt("Why?")))
        own, other = (
            record_settings(one.spec, info=one.info, sampling=SamplingParams()).get("template")
            for one in (captioner, plain)
        )
    assert (own.partition(" ")[0], other) == ("chat", "instruction")
    with pytest.raises(ValueError, match="template must be instruction or conversation or chat, got 'chatml'"):
        CaptionerSpec(prompt_template="chatml")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no chat template"):
        Captioner.load(prompt_template="chat")


def test_a_chat_that_the_template_refuses_is_one_error(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "own")
    refuses = "{% if messages[1] is defined %}{{ raise_exception('one turn') }}{% endif %}a"
    (own / "chat_template.jinja").write_text(refuses)
    refused = pytest.raises(PromptError, match="The model's chat template refuses this chat: one turn")
    with Captioner.load(llama_dir=own, device="cpu", dtype="float32") as captioner, refused:
        captioner.generate_text(Dialogue(TURNS, "Why?"))


def test_chats_and_variables_of_their_template_are_those_of_transformers_over_http_too(
    folder: Path, tmp_path: Path
) -> None:
    thinker = shutil.copytree(folder, tmp_path / "thinker")
    more = "{% if enable_thinking is defined and enable_thinking is false %}<think>no</think>{{ effort }}{% endif %}"
    (thinker / "chat_template.jinja").write_text(CHATML + more)
    turns = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi."), ("user", "Why?"))
    values = {"enable_thinking": False, "effort": "low"}
    refused = ({"effort": END, "enable_thinking": False}, {"messages": "x"}, {"effort": ["low"]})
    messages = [{"role": role, "content": text} for role, text in turns]
    asked = {"model": "default", "messages": messages, "max_tokens": 8, "output_ids": True}
    service = Service(lambda: Captioner.load(llama_dir=thinker, device="cpu", dtype="float32"))
    service.start()
    service.wait_until_ready()
    with closing(service), client_of(service) as client:
        post = partial(client.post, "/v1/chat/completions", timeout=300)
        chat = post(json=asked).json()
        thinking = post(json={**asked, "chat_template_kwargs": values}).json()
        codes = [post(json={**asked, "chat_template_kwargs": given}).status_code for given in refused]
        given = {"model": "default", "input": messages, "max_output_tokens": 8}
        response = client.post("/v1/responses", json=given, timeout=300).json()

    ids = expected_ids(thinker, *turns)
    with Captioner.load(llama_dir=thinker, device="cpu", dtype="float32") as captioner:
        [expected] = captioner.generate_text([list(ids)], max_new_tokens=8)
        dialogue = Dialogue((), "Why?", values=json.dumps(values))
        assert captioner.encode_prompt(dialogue).token_ids == expected_ids(thinker, ("user", "Why?"), **values)
        with pytest.raises(PromptError, match="`effort` cannot be given"):
            captioner.generate_text(Dialogue((), "Why?", values=json.dumps({"effort": "<|im_end|>"})))
    assert chat["usage"]["prompt_tokens"] == len(ids) == response["usage"]["input_tokens"]
    assert thinking["usage"]["prompt_tokens"] == len(expected_ids(thinker, *turns, **values)) > len(ids)
    assert codes == [400, 400, 400]
    assert tuple(chat["choices"][0]["answer_details"]["output_ids"]) == expected.token_ids
    assert chat["choices"][0]["message"]["content"] == expected.text
    assert response["output"][0]["content"][0]["text"] == expected.text


@pytest.mark.proves("chat templates", "ONNX")
def test_an_export_has_the_tokenizer_and_its_template(folder: Path, tmp_path: Path) -> None:
    run_export_decoder(DecoderJob(spec=CaptionerSpec(llama_dir=str(folder)), out=str(tmp_path / "decoder")))
    load = {"llama_dir": folder, "device": "cpu", "dtype": "float32"}
    with Captioner.load(**load) as torchs, Captioner.load(decoder=tmp_path / "decoder") as exported:
        prompts = ["Why?", Dialogue(TURNS, "Why?")]
        assert exported.info.template == "chat"
        assert exported.tokenizer.end_ids == torchs.tokenizer.end_ids
        answers = [[one.token_ids for one in which.generate_text(prompts)] for which in (torchs, exported)]
        assert answers[0] == answers[1]


@pytest.mark.parametrize("template", ["chat", None])
def test_an_adapter_keeps_the_template_of_its_training(template: Any, folder: Path, tmp_path: Path) -> None:
    choice = TrainingChoice(
        sets=("bias",),
        clip=str(GOLDEN / "CLIP/tiny-vit-torchscript.pt"),
        **{"visual_width": 48, "visual_depth": 2, "visual_heads": 4, "adapter_layers": 2},
    )
    spec = CaptionerSpec(llama_dir=str(folder), prompt_template=template)
    model = open_trainable(spec, choice, dtype=torch.float32, device="cpu", seed=0)
    write_adapter(model, tmp_path / "adapter.pth")
    given = {"adapter": str(tmp_path / "adapter.pth"), "clip": choice.clip}
    trained = CaptionerSpec(llama_dir=str(folder), device="cpu", dtype="float32", **given)
    tokenizer, _, prompt = model_texts(trained)
    asker = Asker(tokenizer, default_prompt=prompt, template=training_template(trained))
    row = asker.row("Which?", "red")
    convert(trained, tmp_path / "bundle", dtype=torch.float32)

    expected = tuple(tokenizer.encode(format_prompt("Which?")))
    if template:
        expected = expected_ids(folder, ("user", "Which?"))
    assert row.token_ids[: row.num_prompt] == expected
    assert row.token_ids[-1] == tokenizer.marks[END].id
    assert len(row.labels) == len(row.token_ids) - row.num_prompt, "each token counts: id 0 is one like others"
    names = {"tokenizer.json", "tokenizer_config.json"}
    assert names < set(read_manifest(tmp_path / "bundle")["files"])
    assert {finding.level for finding in diagnose(CaptionerSpec(model=tmp_path / "bundle"))} == {"ok", "not tried"}
    bundle = dataclasses.replace(CaptionerSpec(model=str(tmp_path / "bundle")), device="cpu", dtype="float32")
    for one in (trained, bundle):
        with Captioner.from_spec(one) as captioner:
            assert captioner.info.template == (template or "instruction")
            assert captioner.encode_prompt("Which?").token_ids == expected
            assert captioner.ask(picture(), "Which?", max_new_tokens=2).error is None


def test_an_adapter_with_an_unknown_template_is_refused(folder: Path, tmp_path: Path) -> None:
    file = torch.load(GOLDEN / "adapters/BIAS-TINY.pth", weights_only=True)
    torch.save({**file, "config": {**file.get("config", {}), "template": "x"}}, tmp_path / "adapter.pth")
    spec = CaptionerSpec(llama_dir=str(GOLDEN / "LLaMA"), llama_type="TINY", adapter=str(tmp_path / "adapter.pth"))
    with pytest.raises(Exception, match="as `template`, which is none of instruction, conversation, chat"):
        Captioner.from_spec(spec)
