"""LoRA folders of PEFT merged into LLaMA: logits against `peft` itself, and refusals."""

import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_adapter import Captioner, CheckpointError, UsageError
from llama_adapter.__main__ import main
from llama_adapter.app.models.bundle import convert, load_bundle
from llama_adapter.app.models.bundle_manifest import read_manifest
from llama_adapter.app.models.checkpoints import open_llama, stream_sources
from llama_adapter.app.models.llama_folder import find_llama
from llama_adapter.app.models.quantised_model import QuantiseJob, quantise_bundle
from llama_adapter.app.models.spec import CaptionerSpec
from llama_adapter.app.models.stream_model import stream_merged_bundle, stream_model
from llama_adapter.llm.config import DecoderConfig
from llama_adapter.llm.model.llama import LlamaAdapterDecoder
from llama_adapter.llm.split import take
from llama_adapter.llm.weights import peft_config
from llama_adapter.llm.weights.build import decoder_tensors, plan_decoder
from llama_adapter.llm.weights.lora import merged_source, open_loras
from tests.app.assembled import assemble_sources
from tests.app.models.adapters import chat_adapter
from tests.app.models.bundles import assert_same
from tests.app.picture_models import Reference, pictures, save
from tests.llm.test_split import Place
from tests.llm.toys import forward, refusal
from tests.parity.exported import golden_onnx
from tests.parity.golden import GOLDEN

# `peft` uses names that transformers is about to remove, and warns about stored embeddings.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

LLAMA = GOLDEN / "LLaMA-HF/TINY"
CONFIG = DecoderConfig(vocab_size=512, dim=64, num_layers=4, num_heads=4, ffn_dim=192, norm_eps=1e-6)
CHECKPOINTS = ["--llama-dir", str(LLAMA), "--adapter", str(GOLDEN / "adapters/BIAS-TINY.pth"), "--visual-heads", "4"]
CHECKPOINTS += ["--clip", str(GOLDEN / "CLIP/tiny-vit-torchscript.pt"), "--dtype", "float32", "--no-known-answer"]
PREFIX = "base_model.model.model.layers."
IDS = torch.randint(3, 500, (3, 24), generator=torch.Generator().manual_seed(1))
BOUND = 2e-5  # of the largest logit
EYES: dict[str, Any] = {"visual_heads": 4, "clip": GOLDEN / "CLIP/tiny-vit-torchscript.pt"}  # beside an adapter
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "target_modules": r".*\.(q_proj|k_proj|down_proj|o_proj)",
        "rank_pattern": {r"layers\.[01]\.self_attn\.q_proj": 7, "down_proj": 2},
        "alpha_pattern": {"k_proj": 11.5, r"^model\.layers\.2\.mlp\.down_proj": 3},
    },
    "dora": {"r": 5, "lora_alpha": 9, "use_dora": True, "target_modules": "all-linear"},
    "saved": {
        "r": 3,
        "target_modules": "all-linear",
        "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"],
        "fan_in_fan_out": True,
    },
    "ends": {"r": 6, "target_modules": ["embed_tokens", "lm_head", "o_proj"], "bias": "all"},
    "layers": {
        "r": 6,
        "target_modules": ["up_proj", "v_proj"],
        "layers_to_transform": [1, 3],
        "layers_pattern": "layers",
        "exclude_modules": ["layers.3.mlp.up_proj"],
        "bias": "lora_only",
    },
    "dora of ends": {"r": 6, "target_modules": ["embed_tokens", "lm_head"], "use_dora": True, "use_rslora": True},
}


def peft_model(folders: Mapping[str, Path]) -> Any:
    """The LLaMA in float32 with adapters by name, as `peft` loads them."""
    import peft
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    (name, folder), *others = folders.items()
    model = peft.PeftModel.from_pretrained(model, folder, adapter_name=name)
    for name, folder in others:
        model.load_adapter(folder, adapter_name=name)
    return model.eval()


def write_peft(folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    """A folder that `peft` saves, with random factors, magnitudes and whole weights."""
    import peft
    import transformers

    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name or "modules_to_save" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def our_logits(**model: Any) -> Tensor:
    loaded, tensors = stream_model(CaptionerSpec(**model), dtype=torch.float32)
    decoder = LlamaAdapterDecoder(loaded.decoder_config).eval().requires_grad_(False)
    decoder.load_state_dict(dict(tensors))
    no_pictures = torch.zeros(len(IDS), 0, loaded.decoder_config.dim)
    return decoder.logits(forward(decoder, IDS, decoder.project_prefix(no_pictures)))


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind, written at first use."""
    root = tmp_path_factory.mktemp("lora")

    def folder(kind: str) -> Path:
        place = root / kind
        return place if place.exists() else write_peft(place, seed=len(kind), **KINDS[kind])

    return folder


@pytest.fixture
def plain(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the plain folder, to be damaged."""
    return Path(shutil.copytree(folders("plain"), tmp_path / "plain"))


@pytest.fixture
def foreign(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A LoRA that names another base model."""
    copy = Path(shutil.copytree(folders("plain"), tmp_path / "foreign"))
    edited(base_model_name_or_path="meta-llama/Llama-2-7b-hf")(copy)
    return copy


NOTE = "was trained on `meta-llama/Llama-2-7b-hf`, and is merged into `"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the tiny model without LoRA."""
    out = tmp_path_factory.mktemp("lora") / "bare"
    assert main(["convert", *CHECKPOINTS, "--out", str(out)]) == 0
    return out


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.proves("LoRA of PEFT", "CPU")
def test_logits_are_those_of_peft(kind: str, folders: Callable[[str], Path]) -> None:
    folder = folders(kind)
    theirs = peft_model({"default": folder})(IDS).logits.detach()
    assert distance(our_logits(llama_dir=str(LLAMA), lora=[str(folder)]), theirs) < BOUND
    assert distance(our_logits(llama_dir=str(LLAMA)), theirs) > 1e-2
    assert distance(our_logits(llama_dir=str(GOLDEN / "LLaMA"), llama_type="TINY", lora=[str(folder)]), theirs) < BOUND


@pytest.mark.slow
def test_several_folders_are_summed_with_their_weights(folders: Callable[[str], Path]) -> None:
    places = {"one": folders("plain"), "two": folders("patterns"), "three": folders("layers")}
    weights = {"one": 1.0, "two": 0.5, "three": 1.75}
    model = peft_model(places)
    model.base_model.set_adapter(list(weights))
    for layer in model.modules():
        for name, weight in weights.items() if hasattr(layer, "set_scale") else ():
            layer.set_scale(name, weight)
    theirs = model(IDS).logits.detach()
    texts = [str(places["one"]), f"{places['two']}=0.5", f"{places['three']}=1.75"]
    assert distance(our_logits(llama_dir=str(LLAMA), lora=texts), theirs) < BOUND
    assert distance(our_logits(llama_dir=str(LLAMA), lora=texts[:2]), theirs) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["patterns", "dora"])
@pytest.mark.parametrize("adapter", ["BIAS-TINY", "LORA-BIAS-TINY"])
def test_an_adapter_sees_the_merged_llama(
    adapter: str, kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    peft_model({"default": folders(kind)}).merge_and_unload().save_pretrained(tmp_path / "merged")
    shutil.copy(LLAMA / "tokenizer.model", tmp_path / "merged")
    rest: dict[str, Any] = {"adapter": GOLDEN / f"adapters/{adapter}.pth", **EYES}
    wanted = assemble_sources(CaptionerSpec(llama_dir=tmp_path / "merged", **rest)).decoder_state
    sources = CaptionerSpec(llama_dir=LLAMA, lora=[str(folders(kind))], **rest)
    ours = assemble_sources(sources).decoder_state
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-5, atol=1e-6), name

    bundle = convert(sources, tmp_path / "bundle", dtype=torch.float32)
    stored = load_bundle(bundle)
    assert_same(stored.decoder_state, ours)
    assert stored.merged[-1] == f"lora:{kind}=1"
    listed = [source for source in read_manifest(bundle)["sources"] if source["role"] == "lora"]
    assert [source["path"] for source in listed] == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(len(source["sha256"]) == 64 for source in listed)

    bare = convert(CaptionerSpec(llama_dir=LLAMA, **rest), tmp_path / "bare", dtype=torch.float32)
    if (adapter, kind) == ("LORA-BIAS-TINY", "dora"):  # lengths of rows that contain the adapter's LoRA are others
        with pytest.raises(CheckpointError, match="contain its adapter's changes"):
            stream_merged_bundle(bare, [str(folders(kind))])
        return
    _, tensors = stream_merged_bundle(bare, [str(folders(kind))])
    for name, tensor in tensors:
        assert torch.allclose(tensor, ours[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.slow
def test_forms_of_files_and_names(folders: Callable[[str], Path], plain: Path, tmp_path: Path) -> None:
    literal = Path(shutil.copytree(folders("dora"), tmp_path / "literal"))
    wanted = our_logits(llama_dir=str(LLAMA), lora=[str(folders("plain"))])
    tensors = load_file(plain / "adapter_model.safetensors")
    (plain / "adapter_model.safetensors").unlink()
    named = {key.replace(".weight", ".default.weight"): tensor for key, tensor in tensors.items()}
    torch.save(named, plain / "adapter_model.bin")
    assert torch.equal(our_logits(llama_dir=str(LLAMA), lora=str(plain)), wanted)
    # What changes no weight of the base model, and a name of other models, as in lists for several kinds of them.
    edited(init_lora_weights="mica", merge_weights=True, target_modules=["q_proj", "v_proj", "c_attn"])(plain)
    torch.save({}, plain / "non_lora_state_dict.bin")  # a training wrote it, and changed nothing else
    (plain / "non_lora_lr.json").write_text("{}")
    odd = plain.rename(plain.with_name("odd=name"))
    assert torch.equal(our_logits(llama_dir=str(LLAMA), lora=odd), wanted)
    edited(target_modules="all-linear")(literal)  # PEFT writes the names in its place
    assert our_logits(llama_dir=str(LLAMA), lora=literal).equal(our_logits(llama_dir=str(LLAMA), lora=folders("dora")))


@pytest.mark.slow
def test_whole_weights_may_be_there_twice_and_untrained(folders: Callable[[str], Path], tmp_path: Path) -> None:
    wanted = our_logits(llama_dir=str(LLAMA), lora=[str(folders("saved"))])
    folder = Path(shutil.copytree(folders("saved"), tmp_path / "saved"))  # as PEFT writes it after added tokens
    head = load_file(folder / "adapter_model.safetensors")["base_model.model.lm_head.weight"]
    more = {"modules_to_save": head.clone(), "original_module": head + 1}
    retensored(
        lambda tensors: tensors.update({f"base_model.model.lm_head.{name}.weight": one for name, one in more.items()})
    )(folder)
    edited(modules_to_save=[*KINDS["saved"]["modules_to_save"], "score"])(folder)  # a name of other models too
    assert torch.equal(our_logits(llama_dir=str(LLAMA), lora=folder), wanted)
    retensored(lambda tensors: tensors["base_model.model.lm_head.modules_to_save.weight"].add_(1))(folder)
    with pytest.raises(CheckpointError, match="or a tensor twice"):
        open_loras([str(folder)], CONFIG)


@pytest.mark.slow
def test_a_bundle_for_texts_is_merged_with_whole_norms(folders: Callable[[str], Path], tmp_path: Path) -> None:
    lora = [str(folders("saved"))]
    bundle = convert(CaptionerSpec(llama_dir=LLAMA), tmp_path / "texts", dtype=torch.float32)
    assert distance(our_logits(model=bundle, lora=lora), our_logits(llama_dir=LLAMA, lora=lora)) < BOUND

    key = "base_model.model.model.embed_tokens.weight"
    padded = Path(shutil.copytree(folders("saved"), tmp_path / "padded"))
    retensored(lambda tensors: tensors.update({key: torch.ones(520, 64)}))(padded)
    other = Path(shutil.copytree(folders("saved"), tmp_path / "other"))
    retensored(lambda tensors: tensors.update({A: torch.ones(3, 32)}))(other)
    places: tuple[dict[str, Any], ...] = ({"model": bundle}, {"llama_dir": bundle}, {"llama_dir": LLAMA})
    for place, folder in itertools.product(places, (padded, other)):
        with pytest.raises(CheckpointError, match="has the shape") as caught:
            our_logits(**place, lora=folder)
        assert ("rows of padding, which a bundle lacks" in caught.value.hint) == (
            folder is padded and place != {"llama_dir": LLAMA}
        )


@pytest.mark.slow
def test_norms_of_an_adapter_in_a_bundle_are_not_replaced(
    folders: Callable[[str], Path], bare: Path, tmp_path: Path
) -> None:
    texts = convert(CaptionerSpec(llama_dir=bare), tmp_path / "texts", dtype=torch.float32)
    again = CaptionerSpec(llama_dir=bare, adapter=GOLDEN / "adapters/BIAS-TINY.pth", **EYES)
    for merged in (load_bundle(texts).merged, assemble_sources(again).merged):
        assert merged == ("gates",)
    for place in ({"model": texts}, {"llama_dir": texts}, {"llama_dir": bare}):
        our_logits(**place, lora=folders("plain"))
        with pytest.raises(CheckpointError, match="bundle's weights contain its adapter's changes"):
            our_logits(**place, lora=folders("saved"))


@pytest.mark.slow
def test_labels_of_folders_with_one_name_are_all_kept(folders: Callable[[str], Path], tmp_path: Path) -> None:
    other = shutil.copytree(folders("plain"), tmp_path / "other/plain")
    twice = CaptionerSpec(llama_dir=LLAMA, lora=[str(folders("plain")), str(other)])
    summed = CaptionerSpec(llama_dir=convert(twice, tmp_path / "summed", dtype=torch.float32))
    assert assemble_sources(summed).merged == ("lora:plain=1", "lora:plain=1")
    seeing = dataclasses.replace(summed, adapter=GOLDEN / "adapters/LORA-BIAS-TINY.pth", **EYES)
    assert assemble_sources(seeing).merged == ("lora:plain=1", "lora:plain=1", "gates", "lora")


@pytest.mark.slow
def test_scales_of_an_adapter_in_a_bundle_take_no_lora(folders: Callable[[str], Path], tmp_path: Path) -> None:
    lora = [str(folders("plain"))]
    chat_adapter(tmp_path / "chat.pth")
    sources = {"llama_dir": LLAMA, "adapter": tmp_path / "chat.pth"}
    bundle = convert(CaptionerSpec(**sources), tmp_path / "chat", dtype=torch.float32)
    assert distance(our_logits(**sources, lora=lora), our_logits(**sources)) > 1e-2
    again = convert(CaptionerSpec(llama_dir=bundle), tmp_path / "again", dtype=torch.float32)
    for place, folder in itertools.product(("model", "llama_dir"), (bundle, again)):
        our_logits(**{place: folder})
        with pytest.raises(CheckpointError, match="contain scales of its adapter") as caught:
            our_logits(**{place: folder}, lora=lora)
        assert caught.value.hint.endswith("as --llama-dir, and its adapter as --adapter")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "ends"])
def test_ranks_read_their_part(kind: str, folders: Callable[[str], Path]) -> None:
    source = open_llama(find_llama(LLAMA))
    merged = merged_source(source, open_loras([str(folders(kind))], CONFIG))
    config = plan_decoder(source, None, vocab_size=512)
    given: dict[str, Any] = {"source": merged, "adapter": None, "dtype": torch.float32}
    whole = dict(decoder_tensors(config, **given))
    for rank in range(2):
        share = config.share(rank, 2)
        for name, tensor in decoder_tensors(config, share=share, **given):
            assert torch.equal(tensor, take(name, whole[name], whole=config, share=share)), name


@pytest.mark.slow
def test_commands_and_digests(
    folders: Callable[[str], Path], foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = str(folders("plain"))
    command = ["generate", "--prompt", "Hello", "--raw", "--max-new-tokens", "8", "--llama-dir", str(LLAMA)]
    command += ["--dtype", "float32"]
    texts = {}
    for name, flags in {"none": [], "one": ["--lora", lora], "half": ["--lora", f"{lora}=0.5"]}.items():
        assert main([*command, *flags]) == 0
        texts[name] = capsys.readouterr().out
    assert len(set(texts.values())) == 3
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"model": {"lora": [f"{lora}=0.25", f"{lora}=0.25"]}}))
    assert main([*command, "--config", str(config)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == json.loads(texts["half"])["text"]
    digests = {Captioner.load(llama_dir=LLAMA, lora=one).info.digest for one in ((), lora, f"{lora}=0.5")}
    assert len(digests) == 3
    notes = Captioner.load(llama_dir=LLAMA, lora=[Path(lora), foreign]).info.notes
    [note] = [note for note in notes if "was trained on" in note]  # none for the folder of the same name
    assert note.endswith(f"{NOTE}TINY`")
    (foreign / "chat_template.jinja").write_text("{{ messages }}")
    notes = Captioner.load(llama_dir=LLAMA, lora=[lora, foreign]).info.notes
    [note] = [note for note in notes if "chat template" in note]
    assert note == f"the chat template in the LoRA `{foreign}` is not that of the model, and is not used"
    same = shutil.copytree(LLAMA, tmp_path / "same")
    shutil.copy(foreign / "chat_template.jinja", same)
    assert not any("chat template" in note for note in Captioner.load(llama_dir=same, lora=foreign).info.notes)
    (foreign / "chat_template.jinja").unlink()
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        (foreign / name).write_text("[]")  # damaged, and not used
    assert not any("chat template" in note for note in Captioner.load(llama_dir=LLAMA, lora=foreign).info.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("known_environment")
def test_a_bundle_is_merged_with_a_lora(
    folders: Callable[[str], Path], bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora, out = str(folders("plain")), tmp_path / "merged"
    assert main(["convert", "--model", str(bare), "--lora", lora, "--no-known-answer", "--out", str(out)]) == 0
    whole, merged = dict(stream_merged_bundle(bare, [lora])[1]), load_bundle(out)
    assert_same(merged.decoder_state, whole)
    assert merged.merged == (*load_bundle(bare).merged, "lora:plain=1")
    assert main(["doctor", "--model", str(bare), "--lora", lora]) == 0
    assert "1 LoRA folder(s)" in capsys.readouterr().out

    for rank in range(2):
        loaded, part = stream_merged_bundle(bare, [lora], ranks=Place(rank, 2))
        share = loaded.decoder_config.share(rank, 2)
        for name, tensor in part:
            assert torch.equal(tensor, take(name, whole[name], whole=loaded.decoder_config, share=share)), name

    quantise_bundle(QuantiseJob(model=str(bare), out=str(tmp_path / "int8")))
    with pytest.raises(CheckpointError, match="has int8 weights") as raised:
        stream_merged_bundle(tmp_path / "int8", [lora])
    assert "convert --model" in (raised.value.hint or "")
    spec = CaptionerSpec(model=str(bare), lora=lora, precision="int8")
    loaded, tensors = stream_model(spec, dtype=torch.float32)
    assert loaded.precision == "int8"
    assert any(tensor.dtype == torch.int8 for _, tensor in tensors)


@pytest.mark.slow
@pytest.mark.usefixtures("known_environment")
def test_commands_that_merge_a_lora_of_another_base_tell_it(
    bare: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, lora, out = ["--model", str(bare)], ["--lora", str(foreign)], str(tmp_path / "out")
    half = str(tmp_path / "half")
    assert main(["convert", *CHECKPOINTS, "--dtype", "float16", "--out", half]) == 0
    commands = {
        "checkpoints": ["convert", *CHECKPOINTS, *lora, "--out", f"{out}-1"],
        "bundle": ["convert", *model, *lora, "--no-known-answer", "--out", f"{out}-2"],
        "decoder": ["export", "decoder", "--model", half, *lora, "--without-encoder", "--out", f"{out}-3"],
    }
    for name, command in commands.items():
        assert main(command) == 0, name
        assert f"note: the LoRA `{foreign}` {NOTE}" in capsys.readouterr().err, name
    encoder = ["--encoder", str(golden_onnx())]
    (foreign / "chat_template.jinja").write_text("{{ messages }}")
    for flags in (model, [*model, *encoder], CHECKPOINTS[: CHECKPOINTS.index("--dtype")]):
        assert main(["doctor", *flags, *lora]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert f"warning model: the LoRA `{foreign}` {NOTE}" in told
        assert f"warning model: the chat template in the LoRA `{foreign}` is not that of the model" in told
    without = Path(shutil.copytree(LLAMA, tmp_path / "without"))
    for file in without.glob("tokenizer*"):
        file.unlink()
    assert main(["doctor", "--llama-dir", str(without), *lora]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert f"warning model: the LoRA `{foreign}` {NOTE}without`" in told
    assert "chat template in the LoRA" not in told
    assert main(["doctor", "--model", str(tmp_path / "missing"), *lora]) == 1
    assert " ".join(capsys.readouterr().out.split()).count("is no model bundle") == 1


def test_long_lists_of_full_names_are_compared_quickly() -> None:
    names = [f"model.layers.{layer}.mlp.{name}" for layer in range(126) for name in "abcdefg"]
    given: dict[str, Any] = {"target_modules": names, "exclude_modules": [names[0], "mlp.b", "p.c"]}
    config = peft_config.made_config(Path("config"), r=1, lora_alpha=1, **given)
    start = time.process_time()
    targeted, _ = config.changed(dict.fromkeys(names, (4, 4)))
    assert time.process_time() - start < 4
    assert targeted == {name for name in names[1:] if not name.endswith("b")}


def test_fields_that_exclude_each_other_and_folders_of_lora_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lora and decoder exclude each other"):
        CaptionerSpec(decoder="folder", lora=["x"])
    with pytest.raises(ValueError, match="lora must be folders"):
        CaptionerSpec(lora=[""])
    with pytest.raises(UsageError, match="FOLDER=WEIGHT"):
        open_loras(["x=heavy"], CONFIG)
    for name in ("checkpoint-100", "checkpoint-200", "snapshots/abc"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "adapter_config.json").write_text("{}")
    names = "`checkpoint-100`, `checkpoint-200`, `snapshots/abc`"
    with pytest.raises(CheckpointError, match=f"and its folders {names} have one"):
        open_loras([str(tmp_path)], CONFIG)


def edited(**entries: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | entries))

    return damage


def retensored(edit: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return damage


A, B = f"{PREFIX}0.self_attn.q_proj.lora_A.weight", f"{PREFIX}0.self_attn.q_proj.lora_B.weight"
CONFIGS = json.loads(Path(__file__).with_name("damaged_peft_configs.json").read_text(encoding="utf-8"))
DAMAGE: dict[str, Callable[[Path], object]] = {
    **{name: edited(**entries) for name, entries in CONFIGS.items()},
    "no folder": shutil.rmtree,
    "no config": lambda folder: (folder / "adapter_config.json").unlink(),
    "further weights": lambda folder: torch.save({"projector": torch.ones(2)}, folder / "non_lora_trainables.bin"),
    "embedding of LongLoRA": lambda folder: torch.save({"norm": torch.ones(2)}, folder / "trainable_params.bin"),
    "tower of ms-swift": lambda folder: save_file({"tower": torch.ones(2)}, folder / "vit.safetensors"),
    "further text": lambda folder: (folder / "non_lora_state.bin").write_text("text"),
    "no weights": lambda folder: (folder / "adapter_model.safetensors").unlink(),
    "a config that is a list": lambda folder: (folder / "adapter_config.json").write_text("[]"),
    "weights cut short": lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\0" * 20),
    "a lacking factor": retensored(lambda tensors: tensors.pop(B)),
    "an unused tensor": retensored(
        lambda tensors: tensors.update({B.replace("lora_B.weight", "bias"): torch.ones(64)})
    ),
    "another layer": retensored(lambda tensors: tensors.update({A.replace(".0.", ".7."): tensors[A].clone()})),
    "two adapters": retensored(lambda tensors: tensors.update({A.replace(".weight", ".x.weight"): tensors[A].clone()})),
    "another width": retensored(lambda tensors: tensors.update({A: torch.ones(8, 128)})),
    "factors of another order": retensored(lambda tensors: tensors.update({A: tensors[A].T.contiguous()})),
    "whole numbers": retensored(lambda tensors: tensors.update({A: torch.ones(8, 64, dtype=torch.int32)})),
    "numbers that are not finite": retensored(lambda tensors: tensors[B].fill_(float("nan"))),
}


@pytest.mark.slow
def test_refusals(
    folders: Callable[[str], Path], tmp_path: Path, snapshot: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peft_config._TRIAL_S == 5.0
    monkeypatch.setattr(peft_config, "_TRIAL_S", 1.0)
    told = {}
    for name, damage in DAMAGE.items():
        folder = Path(shutil.copytree(folders("plain"), tmp_path / name / "LORA"))
        damage(folder)
        told[name] = refusal(partial(open_loras, [str(folder)], CONFIG), folder)
    assert told == snapshot


@pytest.mark.slow
def test_what_is_not_summed_and_what_the_adapter_replaces(folders: Callable[[str], Path]) -> None:
    for texts in (
        [f"{folders('dora')}=0.5"],
        [str(folders("dora")), str(folders("plain"))],
        [str(folders("saved")), str(folders("ends"))],
        [f"{folders('saved')}=2"],
    ):
        with pytest.raises(CheckpointError, match="which is not summed"):
            stream_sources(CaptionerSpec(llama_dir=str(LLAMA), lora=texts), dtype=torch.float32)
    # What PEFT stores beside the factors of the embedding equals the LLaMA's own, so it is no whole weight.
    stream_sources(CaptionerSpec(llama_dir=str(LLAMA), lora=[f"{folders('ends')}=2"]), dtype=torch.float32)
    rest: dict[str, Any] = {"adapter": GOLDEN / "adapters/BIAS-TINY.pth", **EYES}
    with pytest.raises(CheckpointError, match="replaces them"):
        assemble_sources(CaptionerSpec(llama_dir=LLAMA, lora=[str(folders("saved"))], **rest))


@pytest.mark.slow
@pytest.mark.parametrize("has_head", [False, True], ids=["without head", "with an equal head"])
def test_tied_weights(has_head: bool, folders: Callable[[str], Path], tmp_path: Path) -> None:
    tied = Path(shutil.copytree(LLAMA, tmp_path / "tied"))
    tensors = {name: one for file in sorted(tied.glob("*.safetensors")) for name, one in load_file(file).items()}
    for file in tied.glob("model*"):
        file.unlink()
    del tensors["lm_head.weight"]
    if has_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tied / "model.safetensors")
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    lora = Path(shutil.copytree(folders("plain"), tmp_path / "lora"))
    edited(ensure_weight_tying=True)(lora)
    our_logits(llama_dir=str(LLAMA), lora=lora)  # nothing is tied
    with pytest.raises(CheckpointError, match="ensure_weight_tying"):
        our_logits(llama_dir=str(tied), lora=lora)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llava", "smolvlm"])
def test_a_lora_of_the_language_model_in_a_model_that_sees_pictures(kind: str, tmp_path: Path) -> None:
    import peft

    base, lora, image = save(tmp_path / "base", kind), tmp_path / "lora", pictures(1)[0]
    reference = Reference(base, kind)
    plain = reference.answer([image], "What?", max_new_tokens=16)
    targets = r".*(language_model|text_model).*\.(q_proj|down_proj)|.*lm_head"
    torch.manual_seed(0)
    model = peft.get_peft_model(reference.model, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets))
    model.save_pretrained(lora)
    reference.model = model.merge_and_unload()
    reference.known.clear()
    merged = reference.answer([image], "What?", max_new_tokens=16)

    def answer() -> list[int]:
        with Captioner.load(base, lora=[str(lora)], device="cpu", dtype="float32") as captioner:
            return list(captioner.ask(image, "What?", max_new_tokens=16).token_ids)

    assert answer() == merged != plain
    if kind == "llava":  # whose modules transformers 4 named otherwise
        file, former = lora / "adapter_model.safetensors", "base_model.model.language_model."
        names = {
            "base_model.model.model.language_model.": f"{former}model.",
            "base_model.model.lm_head": f"{former}lm_head",
        }
        stored = load_file(file)
        for name, other in names.items():
            assert any(key.startswith(name) for key in stored)
            stored = {key.replace(name, other): tensor for key, tensor in stored.items()}
        save_file(stored, file)
        assert answer() == merged
    tower = f"base_model.model.{'vision_tower' if kind == 'llava' else 'vision_model'}.layers.0.q_proj.lora_A.weight"
    retensored(lambda tensors: tensors.update({tower: torch.ones(4, 8)}))(lora)
    with pytest.raises(CheckpointError, match=r"has 1 tensors that do not belong there \(`vision_") as refused:
        answer()
    assert "or a tower, merge it with PEFT" in str(refused.value.hint)
