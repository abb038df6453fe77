"""Bundles of a LLaMA without adapter: they answer texts as its files do, in all number formats, and see no pictures."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers

from llama_adapter import Captioner, CheckpointError, UsageError
from llama_adapter.app.command_line.doctor.model import diagnose, write_known_answer
from llama_adapter.app.command_line.main import main
from llama_adapter.app.models.bundle import convert
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.packed_bundle import PackJob, pack_bundle
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.llm.pieces.folder import SETTINGS_FILE
from llama_adapter.runtime.schemes import Precision
from tests.app.golden import picture
from tests.app.models.bundles import GOLDEN
from tests.llm.gguf_files import sentencepiece_keys, write_model
from tests.llm.test_chat import CHATML

PROMPTS: list[Any] = ["Why?", "Name a red thing, and one that is blue.", [1, 5, 9, 200]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with shared heads of keys and values, and a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(vocab_size=512, num_hidden_layers=3, head_dim=32, initializer_range=0.5, **sizes)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "LLaMA" / "tokenizer.model"))
    keys = sentencepiece_keys(processor) | {"tokenizer.chat_template": CHATML}
    model = transformers.Qwen3ForCausalLM(config).half()  # so that a bundle in float16 has the same numbers
    return write_model(tmp_path_factory.mktemp("gguf") / "texts.gguf", model, keys)


@pytest.fixture(scope="module")
def bundle(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(CaptionerSpec(llama_dir=file), tmp_path_factory.mktemp("bundle") / "texts", dtype=torch.float32)


def answers(**model: Any) -> list[tuple[int, ...]]:
    with Captioner.load(**model, device="cpu", dtype="float32") as captioner:
        assert captioner.info.template == "chat"
        assert not captioner.info.has_adapter
        return [answer.token_ids for answer in captioner.generate_text(PROMPTS, max_new_tokens=8)]


def test_a_bundle_without_encoder_answers_as_the_file_it_is_made_of(file: Path, bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert answers(model=bundle) == answers(llama_dir=file)
    assert (manifest["vision"], manifest["template"]) == ({}, "chat")
    assert set(manifest["files"]) == {"llm.safetensors", "tokenizer.json", SETTINGS_FILE}


@pytest.mark.slow
def test_ranks_share_a_bundle_without_encoder(bundle: Path) -> None:
    assert answers(model=bundle, tensor_parallel=2) == answers(model=bundle)


@pytest.mark.parametrize(
    ("write", "job", "precision"),
    [
        (quantise_bundle, QuantiseJob, "int8"),
        (quantise_bundle, QuantiseJob, "int4"),
        (pack_bundle, PackJob, "float"),
        (pack_bundle, PackJob, "int4"),
    ],
)
def test_fewer_bits_are_those_of_the_file(
    write: Any, job: Any, precision: Precision, file: Path, bundle: Path, tmp_path: Path
) -> None:
    options = {"dtype": "float32"} if precision == "float" else {"precision": precision}
    direct = write(job(model=str(file), out=str(tmp_path / "direct"), **options))
    again = write(job(model=str(bundle), out=str(tmp_path / "again"), **options))
    expected = answers(llama_dir=file, precision=precision)
    assert answers(model=direct) == answers(model=again) == expected
    assert "ok" in {finding.level for finding in diagnose(CaptionerSpec(model=direct))} <= {"ok", "not tried"}


def test_a_known_answer_needs_no_picture_and_goes_into_bundles_made_of_it(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, whole := tmp_path / "whole")
    text = write_known_answer(whole)
    made = quantise_bundle(QuantiseJob(model=str(whole), out=str(tmp_path / "int8")))
    assert json.loads((made / "known_answer.json").read_text())["text"] == text
    findings = diagnose(CaptionerSpec(model=whole, device="cpu"))
    assert {finding.level for finding in findings} == {"ok"}
    assert any(f"answers {text!r} to its own prompt" in finding.sentence for finding in findings)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("caption PICTURE --model BUNDLE", "is a LLaMA without adapter, and sees no pictures"),
        ("encode PICTURE --model BUNDLE --out encoded", "a model for texts, without a picture encoder"),
        ("export onnx --model BUNDLE --out clip.onnx", "a model for texts, without a picture encoder"),
        ("train DATA --model BUNDLE --out adapter.pth", "has no adapter for pictures"),
        ("quantize --model BUNDLE --out few --calibrate PICTURE", "is a model for texts"),
        ("generate --prompt x --model BUNDLE --encoder clip.om", "is a model for texts alone, so"),
        ("quantize --model PICTURE --out few", "is no model bundle"),
        ("convert --llama-dir FILE --clip CLIP --out x", "go with --adapter, which is missing"),
    ],
)
def test_pictures_are_refused_in_words(
    command: str, said: str, file: Path, bundle: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.om").touch()
    rows = [json.dumps({"question": f"Why {number}?", "answer": "Because."}) for number in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    places = {"PICTURE": picture(), "BUNDLE": bundle, "DATA": "data.jsonl", "FILE": file, "CLIP": "clip.pt"}
    assert main([str(places.get(word, word)) for word in command.split()]) in (1, 2)
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("known_environment")
def test_commands_make_and_read_it(file: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"question": "Why?", "answer": "Because."}\n' * 2)
    for command in (
        f"convert --model {file} --out texts --dtype float32",
        "quantize --model texts --out texts-int8",
        f"pack --model {file} --out packed",
        "generate --prompt Why? --model texts-int8 --max-new-tokens 4",
        "eval data.jsonl --model packed --out scores",
        "doctor --model texts",
    ):
        assert main(command.split()) == 0, capsys.readouterr().err
    assert "to its own prompt" in " ".join(capsys.readouterr().out.split())


def test_it_has_no_clip_and_stands_for_a_llama(bundle: Path) -> None:
    assert answers(llama_dir=bundle) == answers(model=bundle)
    adapter = GOLDEN / "adapters" / "BIAS-TINY.pth"
    with pytest.raises(CheckpointError, match="is for texts, and holds no CLIP"):
        convert(CaptionerSpec(llama_dir=GOLDEN / "LLaMA-HF" / "TINY", adapter=adapter, clip=bundle), bundle / "x")
    with Captioner.load(bundle) as captioner, pytest.raises(UsageError, match="sees no pictures"):
        captioner.caption(picture())
