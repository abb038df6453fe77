"""CLIP in all its file formats and the visual part of adapters give one model; wrong files are refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llama_adapter.app.models.checkpoints import open_clip
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.vision.tensor_names import LAYOUTS
from llama_adapter.vision.towers import ClipSource, read_clip
from llama_adapter.vision.weights import build_vision
from tests.llm.toys import adapter_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
ARCHIVE = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"
VISUAL = ("visual_blocks.", "clip_proj", "visual_proj", "visual_query.")
CLIP = open_clip(ARCHIVE)


def visual_of(adapter: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in adapter_tensors(adapter).items() if key.startswith(VISUAL)}


@pytest.fixture(scope="module")
def openai() -> dict[str, Tensor]:
    """The golden CLIP as a plain state dict, a form that is also in use; read without `vision.weights`."""
    with pytest.warns(DeprecationWarning, match="torch.jit.load"):
        module = torch.jit.load(str(ARCHIVE), map_location="cpu")  # type: ignore[no-untyped-call]
    return {key: tensor.detach().clone() for key, tensor in module.state_dict().items()}


def to_huggingface(openai: dict[str, Tensor], *, text: bool = True) -> dict[str, Tensor]:
    """The same CLIP under Hugging Face's names, which test_towers.py compares with those of transformers."""
    renamed = {"visual_projection.weight": openai["visual.proj"].T.contiguous()}
    for ours, theirs in LAYOUTS["clip"].names(2).items():
        [name] = LAYOUTS["openai"].names(2)[ours]
        parts = openai[name].chunk(len(theirs))
        renamed |= {f"vision_model.{key}": part.clone() for key, part in zip(theirs, parts, strict=True)}
    if text:
        renamed["logit_scale"] = openai["logit_scale"]
        renamed["text_projection.weight"] = openai["text_projection"].T.contiguous()
        renamed["text_model.embeddings.token_embedding.weight"] = openai["token_embedding.weight"]
        renamed["text_model.embeddings.position_ids"] = torch.arange(77)[None]
        renamed["text_model.encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64)
        renamed["text_model.final_layer_norm.bias"] = openai["ln_final.bias"]
        renamed["vision_model.embeddings.position_ids"] = torch.arange(257)[None]
    return renamed


def assert_same(one: ClipSource, other: ClipSource) -> None:
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    assert [key for key in one.tensors if not torch.equal(one.tensors[key], other.tensors[key])] == []


def test_state_dict_and_torchscript_archive_are_the_same_clip(tmp_path: Path, openai: dict[str, Tensor]) -> None:
    torch.save(openai, tmp_path / "clip.pt")
    assert_same(open_clip(tmp_path / "clip.pt"), CLIP)


@pytest.mark.parametrize("text", [True, False], ids=["CLIPModel", "CLIPVisionModelWithProjection"])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_huggingface_clip_is_the_same_clip(tmp_path: Path, openai: dict[str, Tensor], text: bool, file: str) -> None:
    tensors = to_huggingface(openai, text=text)
    if file.endswith(".bin"):
        torch.save(tensors, tmp_path / file)
    else:
        save_file(tensors, tmp_path / file)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "clip", "vision_config": {"num_attention_heads": 2}})
    )
    assert_same(open_clip(tmp_path / file), CLIP)
    assert_same(open_clip(tmp_path), CLIP)


@pytest.mark.parametrize("heads", [None, 5, -4])
def test_heads_that_are_unknown_or_do_not_divide_the_width_are_refused(heads: int | None) -> None:
    with pytest.raises(CheckpointError) as caught:
        build_vision(visual_of("BIAS-TINY"), name="BIAS-TINY", clip=CLIP, visual_heads=heads)
    assert "--visual-heads" in caught.value.hint


def test_the_released_width_of_768_has_16_heads() -> None:
    visual = {
        "visual_query.weight": torch.ones(2, 768),
        "visual_proj.weight": torch.ones(64, 768),
        "visual_proj.bias": torch.ones(64),
        "clip_proj.weight": torch.ones(768, 48),
        "clip_proj.bias": torch.ones(768),
    }
    visual |= {f"clip_proj_norm.{kind}": torch.ones(768) for kind in ("weight", "bias")}
    visual |= {f"visual_proj_norm.{kind}": torch.ones(64) for kind in ("weight", "bias")}
    assert build_vision(visual, name="wide", clip=CLIP)[0].query.num_heads == 16


@pytest.mark.parametrize(
    ("missing", "unknown"),
    [
        ("visual.ln_pre.bias", None),
        ("visual.proj", None),
        ("visual.transformer.resblocks.0.attn.in_proj_bias", None),
        (None, "visual.extra"),
        (None, "transformer.resblocks.0.extra"),
    ],
)
def test_a_missing_or_unknown_tensor_of_clip_is_named(
    openai: dict[str, Tensor], missing: str | None, unknown: str | None
) -> None:
    tensors = {name: tensor for name, tensor in openai.items() if name != missing}
    with pytest.raises(CheckpointError, match=f"`{re.escape(missing or unknown or '')}`"):
        read_clip(tensors if unknown is None else {**tensors, unknown: torch.ones(1)}, name="clip")


@pytest.mark.parametrize("missing", ["visual_blocks.1.mlp.fc2.bias", "clip_proj_norm.weight", "visual_query.weight"])
def test_missing_and_unknown_tensors_of_the_visual_part_are_named(missing: str) -> None:
    visual = {name: tensor for name, tensor in visual_of("BIAS-TINY").items() if name != missing}
    visual["visual_blocks.0.gamma"] = torch.ones(48)
    with pytest.raises(CheckpointError, match=rf"`{re.escape(missing)}`.*`visual_blocks\.0\.gamma`"):
        build_vision(visual, name="BIAS-TINY", clip=CLIP, visual_heads=4)


@pytest.mark.parametrize(
    ("key", "shape", "said"),
    [
        ("visual_blocks.1.attn.qkv.bias", (100,), r"has the shape \[100\], where \[144\] is wanted"),
        *((key, (), "shape") for key in ("visual_blocks.0.mlp.fc1.bias", "visual_proj.weight", "clip_proj.bias")),
    ],
)
def test_a_wrong_shape_is_an_error_with_both_shapes(key: str, shape: tuple[int, ...], said: str) -> None:
    visual = visual_of("BIAS-TINY") | {key: torch.zeros(shape)}
    with pytest.raises(CheckpointError, match=said):
        build_vision(visual, name="BIAS-TINY", clip=CLIP, visual_heads=4)


def test_a_missing_or_different_clip_is_an_error(openai: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match=r"no CLIP at `absent\.pt`"):
        open_clip("absent.pt")
    with pytest.raises(CheckpointError, match="none was given"):
        build_vision(visual_of("BIAS-TINY"), name="BIAS-TINY", clip=None, visual_heads=4)
    other = read_clip(openai | {"visual.proj": torch.ones(128, 512)}, name="ViT-B-32.pt")
    with pytest.raises(CheckpointError, match=r"wants CLIP features of width 48, and `ViT-B-32\.pt` gives 512"):
        build_vision(visual_of("BIAS-TINY"), name="BIAS-TINY", clip=other, visual_heads=4)


def test_clips_that_compute_differently_are_refused(tmp_path: Path, openai: dict[str, Tensor]) -> None:
    save_file(to_huggingface(openai), tmp_path / "model.safetensors")
    for config, message in (
        ({"hidden_act": "relu"}, "activation 'relu' .* is not computed here"),
        ({"num_attention_heads": 2, "layer_norm_eps": 0}, "norm_eps .* must be positive"),
        ({"num_attention_heads": 5}, "must be a multiple of num_heads 5"),
        ({"num_attention_heads": 2, "image_size": 448}, r"has \d+ positions, and its pictures have"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "vision_config": config}))
        with pytest.raises(CheckpointError, match=message):
            open_clip(tmp_path)
    with pytest.raises(CheckpointError, match="is a ResNet CLIP"):
        read_clip({"visual.layer1.0.conv1.weight": torch.ones(1)}, name="RN50.pt")


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("adapters/BIAS-TINY.pth", "is no CLIP: it is a LLaMA-Adapter file"),
        ("adapters/training-checkpoint-0.pth", "is no CLIP: it is a checkpoint of the adapter's trainer"),
        ("LLaMA/TINY/consolidated.00.pth", "is no CLIP: it is LLaMA weights in Meta's form"),
        ("LLaMA-HF/TINY/model-00001-of-00002.safetensors", "is no CLIP: it is a language model in Hugging Face's"),
        ("LLaMA/tokenizer.model", "cut short, damaged, or no tensor file"),
        ("LLaMA", "The folder .* holds no CLIP"),
    ],
)
def test_another_file_passed_as_clip_is_recognised(other: str, kind: str) -> None:
    with pytest.raises((CheckpointError), match=kind):
        open_clip(GOLDEN / other)


def test_tensors_of_another_kind_and_impossible_sizes_are_refused(openai: dict[str, Tensor]) -> None:
    message = r"as a tensor of another kind \(strided, int64 on cpu\)"
    with pytest.raises(CheckpointError, match=r"holds `visual\.ln_pre\.bias` " + message):
        read_clip(openai | {"visual.ln_pre.bias": openai["visual.ln_pre.bias"].long()}, name="clip")
    visual = visual_of("BIAS-TINY")
    visual["clip_proj.bias"] = visual["clip_proj.bias"].long()
    with pytest.raises(CheckpointError, match=r"holds `clip_proj\.bias` " + message):
        build_vision(visual, name="BIAS-TINY", clip=CLIP, visual_heads=4)

    tensors = to_huggingface(openai)
    tensors |= {f"vision_model.encoder.layers.0.self_attn.{n}_proj.bias": torch.zeros(()) for n in "qkv"}
    with pytest.raises(CheckpointError, match=r"qkv\.bias` has the shape \[3\]"):
        build_vision(visual_of("BIAS-TINY"), name="BIAS-TINY", clip=read_clip(tensors, name="hf"), visual_heads=4)
    with pytest.raises(CheckpointError, match="image_size must be"):
        read_clip(openai | {"visual.conv1.weight": torch.zeros(0, 3, 0, 0)}, name="clip")
