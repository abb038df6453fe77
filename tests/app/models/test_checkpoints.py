"""From users' folders and files to a loaded model."""

import dataclasses
import hashlib
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from peft import LoraConfig, get_peft_model
from syrupy.assertion import SnapshotAssertion

import llama_adapter.app.models.checkpoints
from llama_adapter.app.models.bundle import convert, save_bundle
from llama_adapter.app.models.bundle_tensors import open_bundle
from llama_adapter.app.models.checkpoints import SourceFile, adapter_name, claimed_digest, open_llama_parts
from llama_adapter.app.models.llama_folder import base_name, find_llama
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_merged_bundle
from llama_adapter.llm.weights.adapter import open_adapter
from llama_adapter.llm.weights.huggingface import open_huggingface
from llama_adapter.runtime.errors import CheckpointError
from tests.app.assembled import assemble_sources
from tests.app.models.bundles import GOLDEN, SOURCES, another, assert_same, assert_same_weights, before_first_call
from tests.llm.gguf_files import sentencepiece_keys, write_model
from tests.llm.test_sources_of_families import made
from tests.llm.toys import adapter_tensors, build_decoder, refusal

LLAMA = GOLDEN / "LLaMA"
HUGGINGFACE = GOLDEN / "LLaMA-HF" / "TINY"
RELEASED = next(iter(llama_adapter.app.models.checkpoints.RELEASED_ADAPTERS))


def sources(**changes: Any) -> CaptionerSpec:
    return dataclasses.replace(SOURCES, **{"adapter": GOLDEN / "adapters" / "BIAS-TINY.pth", **changes})


@pytest.mark.parametrize(
    "where",
    [
        {"llama_type": "TINY-2SHARD"},
        {"llama_dir": LLAMA / "TINY", "llama_type": None},
        {"llama_dir": HUGGINGFACE, "llama_type": None},
        {"llama_dir": HUGGINGFACE.parent, "llama_type": "TINY"},
        {"llama_dir": HUGGINGFACE.parent, "llama_type": None},  # its only model is taken
    ],
)
@pytest.mark.proves("Hugging Face LLaMA", "CPU")
def test_all_ways_to_name_a_llama_give_the_same_model(where: dict[str, Any]) -> None:
    assert_same_weights(assemble_sources(sources(**where)), assemble_sources(sources()))


def test_a_gguf_file_stands_for_a_folder(tmp_path: Path) -> None:
    import transformers

    processor = sentencepiece.SentencePieceProcessor(model_file=str(LLAMA / "tokenizer.model"))
    model = transformers.LlamaForCausalLM.from_pretrained(HUGGINGFACE)
    file = write_model(tmp_path / "tiny.gguf", model, sentencepiece_keys(processor))
    blob = tmp_path / "blobs" / "sha256-4711"  # as Ollama keeps it
    blob.parent.mkdir()
    shutil.copy(file, blob)
    (blob.parent / "README").write_text("blobs")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "tiny.gguf").symlink_to(file)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # without other weights, it says nothing
    (tmp_path / "training_args.bin").touch()
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert find_llama(file).open_tokenizer().settings.chat_template == "{{ messages[0].content }}"
    own = sentencepiece_keys(processor) | {"tokenizer.chat_template": "own"}
    with_template = write_model(tmp_path / "blobs" / "own.gguf", model, own)
    shutil.copy(tmp_path / "chat_template.jinja", with_template.parent)
    assert find_llama(with_template).open_tokenizer().settings.chat_template == "own"
    expected = assemble_sources(sources())
    for place in (file, tmp_path, tmp_path / "alone", blob):
        found = assemble_sources(sources(llama_dir=place, llama_type=None))
        assert_same_weights(found, expected)
        wanted = {tmp_path: file, tmp_path / "alone": tmp_path / "alone" / "tiny.gguf"}.get(place, place)
        assert [source.path for source in found.sources][:2] == [str(wanted)] * 2
        assert found.tokenizer.encode("A red circle") == expected.tokenizer.encode("A red circle")
        assert found.tokenizer.end_ids == expected.tokenizer.end_ids
    with pytest.raises(CheckpointError, match=r"is a file, and no .gguf file"):
        find_llama(tmp_path / "blobs" / "README")
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / name).touch()
        assert find_llama(tmp_path).form == "huggingface"
        (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match="is a file, so it has no sub-folder `7B`"):
        find_llama(file, llama_type="7B")
    shutil.copy(file, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 GGUF models: `other.gguf`, `tiny.gguf`"):
        find_llama(tmp_path)
    with pytest.raises(CheckpointError, match=r"no file .*none.gguf"):
        assemble_sources(sources(llama_dir=tmp_path / "none.gguf", llama_type=None))


def test_links_in_the_hubs_cache_have_the_names_of_repositories_and_files(tmp_path: Path) -> None:
    repository, own = tmp_path / "models--me--Toy-1B", tmp_path / "own.gguf"
    snapshot, blob = repository / "snapshots" / "0f1e", repository / "blobs" / "4711"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    for file in (blob, own):
        file.touch()
    for link, target in {"toy.Q4_0.gguf": blob, "own": own}.items():
        (snapshot / link).symlink_to(target)
    (tmp_path / "mine").symlink_to(snapshot)
    names = {snapshot: "Toy-1B", tmp_path / "mine": "Toy-1B", snapshot / "toy.Q4_0.gguf": "toy.Q4_0.gguf"}
    for place, name in {**names, tmp_path: tmp_path.name, snapshot / "own": "own.gguf"}.items():
        assert base_name(place) == name


def test_a_model_lists_its_sources(tmp_path: Path) -> None:
    model = assemble_sources(sources(adapter=GOLDEN / "adapters" / "LORA-BIAS-TINY.pth", context=77))
    assert [file.role for file in model.sources] == ["llama", "tokenizer", "adapter", "clip"]
    assert model.name == "LORA-BIAS-TINY"
    assert model.merged == ("gates", "lora")
    assert model.decoder_config.context == 77
    assert model.vision_config.channel_order == "rgb"
    shutil.copytree(LLAMA, tmp_path / "LLaMA")
    (tmp_path / "LLaMA" / "tokenizer.model").replace(tmp_path / "LLaMA" / "TINY" / "tokenizer.model")
    (tmp_path / "LLaMA" / "tokenizer.model").write_bytes(b"another")  # the one inside the folder is preferred
    assert find_llama(tmp_path / "LLaMA", llama_type="TINY").tokenizer.parent.name == "TINY"


@pytest.mark.proves("adapters with CLIP inside", "CPU")
def test_clip_in_a_trainer_checkpoint_replaces_the_given_one_and_a_bundle_stands_for_its_own(saved: Path) -> None:
    adapter = GOLDEN / "adapters" / "training-checkpoint-0.pth"
    alone, beside = assemble_sources(sources(adapter=adapter, clip=None)), assemble_sources(sources(adapter=adapter))
    assert_same_weights(alone, beside)
    assert [file.role for file in alone.sources] == ["llama", "tokenizer", "adapter"]
    other = assemble_sources(sources())
    assert not torch.equal(alone.vision_state["clip.projection.weight"], other.vision_state["clip.projection.weight"])
    found = assemble_sources(sources(clip=saved))
    assert_same_weights(found, other)
    assert found.sources[-1] == SourceFile(role="clip", path=str(saved / "vision.safetensors"))


def test_public_releases_are_bgr_by_the_digest_in_their_name(tmp_path: Path) -> None:
    released = Path(shutil.copy(GOLDEN / "adapters" / "BIAS-TINY.pth", tmp_path / f"{RELEASED}_BIAS-7B.pth"))
    assert claimed_digest(released) == RELEASED
    assert adapter_name(released) == "BIAS-7B"
    assert assemble_sources(sources(adapter=released)).vision_config.channel_order == "bgr"
    assert assemble_sources(sources(adapter=released, channel_order="rgb")).vision_config.channel_order == "rgb"
    assert assemble_sources(sources(channel_order="bgr")).vision_config.channel_order == "bgr"


def test_a_renamed_release_is_recognised_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256((GOLDEN / "adapters" / "BIAS-TINY.pth").read_bytes()).hexdigest()
    monkeypatch.setattr(llama_adapter.app.models.checkpoints, "RELEASED_ADAPTERS", {digest: "BIAS-TINY"})
    monkeypatch.setattr(llama_adapter.app.models.checkpoints, "_RELEASED_WIDTH", 64)
    model = assemble_sources(sources())
    assert model.vision_config.channel_order == "bgr"
    assert [file.sha256 for file in model.sources if file.role == "adapter"] == [digest]


def test_the_digest_of_a_model_depends_on_its_files_and_configuration(tmp_path: Path) -> None:
    tensors, adapter = adapter_tensors("BIAS-TINY"), tmp_path / "edited.pth"
    tensors["clip_proj.bias"].add_(1)
    torch.save({"model": tensors}, adapter)
    assert assemble_sources(sources()).digest == assemble_sources(sources()).digest
    assert assemble_sources(sources(adapter=adapter)).digest != assemble_sources(sources()).digest
    assert assemble_sources(sources(visual_heads=2)).digest != assemble_sources(sources()).digest


WRONG_PLACES: dict[str, dict[str, Any]] = {
    "no folder": {"llama_dir": "nowhere"},
    "no sub-folder": {"llama_type": "13B"},
    "several models": {"llama_type": None},
    "no LLaMA": {"llama_dir": GOLDEN / "images", "llama_type": None},
    "a file": {"llama_dir": LLAMA / "tokenizer.model"},
    "CLIP as adapter": {"adapter": GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"},
    "the folder is a model itself": {"llama_dir": LLAMA / "TINY", "llama_type": "7B"},
    "the folder is a model in Hugging Face's form": {"llama_dir": HUGGINGFACE, "llama_type": "7B"},
    "heads unknown": {"visual_heads": None},
}


def test_faults_of_the_sources(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    narrow = dict.fromkeys(("visual_proj.bias", "visual_proj_norm.weight", "visual_proj_norm.bias"), torch.ones(32))
    narrow |= {"visual_proj.weight": torch.ones(32, 48)}
    torch.save({"model": adapter_tensors("BIAS-TINY") | narrow}, tmp_path / "edited.pth")
    for name in ("no tokenizer", "only a fast tokenizer", "no params"):
        shutil.copytree(LLAMA / "TINY", tmp_path / name / "TINY")
    (tmp_path / "only a fast tokenizer" / "TINY" / "tokenizer.json").write_text("{}")
    (tmp_path / "no params" / "TINY" / "params.json").unlink()
    (tmp_path / "LoRA").mkdir()
    (tmp_path / "LoRA" / "adapter_config.json").write_text("{}")
    (tmp_path / "models--me--toy" / "snapshots").mkdir(parents=True)
    wrong = {
        **WRONG_PLACES,
        "no tokenizer": {"llama_dir": tmp_path / "no tokenizer"},
        "only a fast tokenizer": {"llama_dir": tmp_path / "only a fast tokenizer"},
        "no params": {"llama_dir": tmp_path / "no params"},
        "a LoRA": {"llama_dir": tmp_path / "LoRA", "llama_type": None},
        "a repository in the Hub's cache": {"llama_dir": tmp_path / "models--me--toy", "llama_type": None},
        "halves of two adapters": {"adapter": tmp_path / "edited.pth"},
    }
    told = {name: refusal(partial(assemble_sources, sources(**changes)), tmp_path) for name, changes in wrong.items()}
    assert told == snapshot


@pytest.mark.parametrize(
    "reader", ["bundle_tensors.read_vision", "bundle_tensors.read_decoder", "checkpoints.open_llama"]
)
def test_a_bundle_for_a_llama_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    adapter = sources().adapter
    first = assemble_sources(sources())
    second = another(first)
    place = find_llama(save_bundle(tmp_path / "bundle", model=first))
    before_first_call(monkeypatch, reader, lambda: save_bundle(place.folder, model=second, overwrite=True))
    parts = open_llama_parts(place, adapter=open_adapter(adapter))

    assert torch.equal(parts.llama.tensors["norm.weight"].read(), second.decoder_state["norm.weight"])
    assert parts.clip is not None
    assert_same(parts.clip.tensors, {name: second.vision_state[name] for name in parts.clip.tensors})


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of peft
@pytest.mark.parametrize("name", ["llama with biases", "qwen2", "gemma3", "phi3", "olmo2", "granite"])
def test_a_bundle_of_another_family_stands_for_its_folder(name: str, tmp_path: Path) -> None:
    model = made(name, vocab_size=512, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    model.save_pretrained(tmp_path / "folder")
    shutil.copy(LLAMA / "tokenizer.model", tmp_path / "folder")
    source = open_huggingface(tmp_path / "folder")
    names = (f"llama.layers.{layer}.attention.gate" for layer in range(source.config.num_layers))
    gates = dict.fromkeys(names, torch.ones(1, 4, 1, 1))
    visual = {key: one for key, one in adapter_tensors("CAPTION-TINY").items() if not key.startswith("llama.")}
    torch.save(visual | gates, tmp_path / "adapter.pth")
    lora = str(tmp_path / "lora")
    config = LoraConfig(target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(lora)
    given = sources(llama_dir=tmp_path / "folder", llama_type=None, adapter=tmp_path / "adapter.pth", context=30)
    bundle = convert(given, tmp_path / "bundle", dtype=torch.float32)

    other = open_bundle(bundle)
    assert dataclasses.replace(other.config, context=source.config.context) == source.config
    states = [build_decoder(one, None, vocab_size=512)[1] for one in (source, other)]
    assert [key for key in states[0] if not torch.equal(states[0][key], states[1][key])] == []
    has_folds = name in ("gemma3", "granite")
    merged = assemble_sources(dataclasses.replace(given, lora=(lora,)))
    assert merged.merged == (*(("folded",) if has_folds else ()), "gates", "lora:lora=1")
    as_llama = dataclasses.replace(given, llama_dir=bundle, lora=(lora,))
    if has_folds:  # they are in the bundle's weights, and not in those that the LoRA changes
        for merge in (lambda: assemble_sources(as_llama), lambda: stream_merged_bundle(bundle, [lora])):
            with pytest.raises(CheckpointError, match="factors of its family"):
                merge()
        return
    for state in (assemble_sources(as_llama).decoder_state, dict(stream_merged_bundle(bundle, [lora])[1])):
        for key, tensor in merged.decoder_state.items():
            torch.testing.assert_close(state[key], tensor)
