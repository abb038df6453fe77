"""Towers of every family compute what transformers computes, from the files of Hugging Face, open_clip and timm."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llama_adapter.app.models.checkpoints import open_clip
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.vision.config import ClipConfig, QueryConfig, VisionConfig, clip_config, stored_values
from llama_adapter.vision.encoder import ClipVisionTower, PictureEncoder
from llama_adapter.vision.preprocess import preprocess
from llama_adapter.vision.towers import ClipSource, huggingface_config, huggingface_pixels, read_clip
from tests.app.models.bundles import GOLDEN

TOLERANCE = 1e-4  # of the features' size
OPENAI = GOLDEN / "CLIP" / "tiny-vit-torchscript.pt"


class Case(NamedTuple):
    """A tower of transformers with two heads of the size of a real one, and its image processor."""

    kind: str
    sizes: dict[str, Any]
    processor: str
    pixels: dict[str, Any]

    @property
    def side(self) -> int:
        return int(self.pixels.get("crop_size", self.pixels["size"])["height"])


def clip_case(width: int, heads: int, activation: str, *, mlp: int, patch: int = 14) -> Case:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_attention_heads": heads, "patch_size": patch}
    side = 3 * patch
    pixels = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    return Case(
        "clip_vision_model", sizes | {"hidden_act": activation, "image_size": side}, "CLIPImageProcessor", pixels
    )


def siglip_case(width: int, heads: int, *, mlp: int, patch: int, side: int, **pixels: Any) -> Case:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_attention_heads": heads, "patch_size": patch}
    pixels = {"size": {"height": side, "width": side}, **pixels}
    return Case("siglip_vision_model", sizes | {"image_size": side}, "SiglipImageProcessor", pixels)


def dinov2_case(kind: str, width: int, heads: int) -> Case:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "patch_size": 14, "image_size": 70}
    pixels = {
        "size": {"shortest_edge": 48},
        "crop_size": {"height": 42, "width": 42},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    return Case(kind, sizes, "BitImageProcessor", pixels)


CASES = {
    "CLIP B/32": clip_case(128, 2, "quick_gelu", mlp=512, patch=32),
    "CLIP L/14": clip_case(128, 2, "quick_gelu", mlp=512),
    "CLIP H/14": clip_case(160, 2, "gelu", mlp=640),
    "CLIP bigG/14": clip_case(208, 2, "gelu", mlp=1024),
    "SigLIP base": siglip_case(128, 2, mlp=512, patch=16, side=48),
    "SigLIP so400m": siglip_case(144, 2, mlp=538, patch=14, side=48),
    "SigLIP 2": siglip_case(128, 2, mlp=512, patch=16, side=48, resample=2),
    "DINOv2": dinov2_case("dinov2", 128, 2),
    "DINOv2 with registers": dinov2_case("dinov2_with_registers", 128, 2),
}


def saved(case: Case, folder: Path) -> nn.Module:
    """A model of two layers with random weights, saved as transformers saves it."""
    config = transformers.AutoConfig.for_model(case.kind, num_hidden_layers=2, **case.sizes)
    torch.manual_seed(0)
    classes = {"clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel"}
    name = classes.get(case.kind)
    model: nn.Module = (
        getattr(transformers, name)(config) if name else transformers.AutoModel.from_config(config)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the classes begin with biases of 0 and norms of 1
            parameter.add_(torch.randn_like(parameter) * (0.02 if parameter.ndim > 1 else 0.2))
    model.save_pretrained(folder)  # type: ignore[operator]
    processor_of(case).save_pretrained(folder)
    return model


def processor_of(case: Case) -> Any:
    """The image processor that uses Pillow."""
    name = getattr(transformers, f"{case.processor}Pil", None) or getattr(transformers, case.processor)
    return name(**case.pixels)


def tower_of(clip: ClipSource) -> ClipVisionTower:
    tower = ClipVisionTower(clip.config).eval().requires_grad_(False)
    tower.load_state_dict({name.removeprefix("clip."): tensor for name, tensor in clip.tensors.items()})
    return tower


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def pictures(config: ClipConfig, count: int = 2) -> Tensor:
    return torch.randn(count, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def wanted_features(model: nn.Module, pixels_BCHW: Tensor) -> Tensor:
    features: Tensor = model(pixels_BCHW).last_hidden_state
    inner = getattr(model, "vision_model", model)  # in transformers 4
    return inner.post_layernorm(features) if type(model).__name__ == "CLIPVisionModel" else features  # type: ignore


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@torch.inference_mode()
def test_features_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    clip = open_clip(tmp_path)
    pixels = pictures(clip.config)

    assert (clip.config.image_size, clip.config.num_heads) == (case.side, case.sizes["num_attention_heads"])
    assert difference(tower_of(clip)(pixels), wanted_features(model, pixels)) < TOLERANCE
    assert clip_config(json.loads(json.dumps(stored_values(clip.config)))) == clip.config


# Parts of our names, and what open_clip has in their place; its SigLIPs are timm's.
CLIP_NAMES = {
    **{"patch_embedding": "conv1", "position_embedding": "positional_embedding", "blocks": "transformer.resblocks"},
    **{"pre_norm": "ln_pre", "post_norm": "ln_post", "norm1": "ln_1", "norm2": "ln_2"},
    **{
        "attention.qkv.": "attn.in_proj_",
        "attention.out": "attn.out_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    },
}
TIMM_NAMES = {
    **{"patch_embedding": "trunk.patch_embed.proj", "position_embedding": "trunk.pos_embed", "blocks": "trunk.blocks"},
    **{"post_norm": "trunk.norm", "attention.qkv": "attn.qkv", "attention.out": "attn.proj"},
    **{"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
}
TIMM_UNUSED = ("visual.trunk.attn_pool.latent", "logit_bias", "text.x")


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a tower under the names of open_clip."""
    found = {}
    for name, tensor in tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name.replace("clip.", "visual.", 1)] = tensor.contiguous()
    return found


@pytest.mark.parametrize("name", ["CLIP H/14", "CLIP bigG/14", "SigLIP base"])
@torch.inference_mode()
def test_files_of_open_clip_give_the_same_tower(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, own = saved(case, tmp_path / "hf"), tmp_path / "open_clip"
    is_clip, width, heads = case.kind.startswith("clip"), case.sizes["hidden_size"], case.sizes["num_attention_heads"]
    own.mkdir()
    tensors = renamed(open_clip(tmp_path / "hf").tensors, CLIP_NAMES if is_clip else TIMM_NAMES)
    projection = torch.randn(width, 64)
    if is_clip:
        tensors["visual.proj"] = projection
    else:
        tensors["visual.trunk.pos_embed"] = tensors["visual.trunk.pos_embed"][None]
        tensors |= {name: torch.ones(1) for name in TIMM_UNUSED}
    save_file(tensors, own / "open_clip_model.safetensors")
    vision: dict[str, Any] = {"image_size": case.side, "width": width, "head_width": width // heads}
    vision |= {} if is_clip else {"timm_model_name": "hf-hub:timm/vit_base_patch16_siglip_224.v2_webli"}
    preprocess_cfg = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    config = {"model_cfg": {"vision_cfg": vision}, "preprocess_cfg": preprocess_cfg}
    (own / "open_clip_config.json").write_text(json.dumps(config))
    clip = open_clip(own)
    pixels, rule = pictures(clip.config), clip.config.pixels

    wanted = wanted_features(model, pixels)
    wanted = wanted @ projection if is_clip else wanted
    assert difference(tower_of(clip)(pixels), wanted) < TOLERANCE
    assert (rule.mean, rule.resample, rule.is_squashed, rule.rgb_first) == ((0.5,) * 3, "bilinear", True, False)


@pytest.mark.parametrize(
    ("width", "heads", "activation"),
    [
        *((768, 12, "quick_gelu"), (1024, 16, "quick_gelu"), (1280, 16, "exact_gelu"), (1664, 16, "exact_gelu")),
        (1536, 16, "gelu_tanh"),  # SigLIP 2's giant-opt, which open_clip has from timm
    ],
)
def test_heads_and_activation_follow_from_the_width_without_a_config(width: int, heads: int, activation: str) -> None:
    sizes = {"image_size": 4, "patch_size": 2, "num_layers": 1, "num_heads": 1, "mlp_dim": 8}
    is_siglip = activation == "gelu_tanh"
    sizes |= {"num_class_tokens": 0, "has_patch_bias": True, "has_pre_norm": False} if is_siglip else {}
    tower = ClipVisionTower(ClipConfig(width=width, output_dim=width, has_projection=False, **sizes))
    names = TIMM_NAMES if is_siglip else CLIP_NAMES
    tensors = renamed({f"clip.{name}": tensor for name, tensor in tower.state_dict().items()}, names)
    tensors |= {} if is_siglip else {"visual.proj": torch.zeros(width, 4)}
    config = read_clip(tensors, name="a").config
    assert (config.num_heads, config.activation, config.mlp_dim) == (heads, activation, 8)


@pytest.mark.parametrize("layer", [-2, -1, 1])
@pytest.mark.parametrize("prefix", ["vision_tower.", "vision_tower.vision_model."])
@torch.inference_mode()
def test_the_tokens_of_a_layer_are_those_that_llava_reads(layer: int, prefix: str, tmp_path: Path) -> None:
    model = saved(CASES["CLIP L/14"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {prefix + key.removeprefix("vision_model."): tensor for key, tensor in stored.items()}
    config = huggingface_config(model.config.to_dict(), name="a")  # type: ignore[union-attr, operator]
    clip = read_clip(
        tensors | {"language_model.x": torch.ones(1)},
        name="a",
        config=config,
        prefix="vision_tower.",
        layer=layer,
        drops_class=True,
    )
    pixels = pictures(clip.config)

    wanted = model(pixels, output_hidden_states=True).hidden_states[layer][:, 1:]
    found = tower_of(clip)(pixels)

    assert found.shape[1] == clip.config.num_features
    assert difference(found, wanted) < TOLERANCE


def odd_pictures(count: int) -> list[Image.Image]:
    """Pictures of odd shapes in many modes, some with the orientation that a camera stores."""
    random, found = np.random.default_rng(7), []
    for number in range(count):
        width, height = (int(side) for side in random.integers(1, 400, 2))
        picture = Image.fromarray(random.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
        picture = picture.resize((width * 2, height * 2)) if number % 3 else picture
        found.append(picture.convert(("RGB", "RGBA", "L", "LA", "P", "CMYK")[number % 6]))
    return found


@pytest.mark.parametrize("name", ["CLIP L/14", "SigLIP base", "SigLIP 2", "DINOv2"])
def test_pixels_are_those_of_the_image_processors(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    saved(case, tmp_path)
    processor = processor_of(case)
    clip = read_clip(
        load_file(tmp_path / "model.safetensors"),
        name="a",
        config={"num_heads": 1},
        pixels=huggingface_pixels(processor.to_dict(), name="a"),
    )
    query = QueryConfig(num_queries=1, width=1, depth=0, num_heads=1, mlp_dim=1, output_dim=1)
    encoder = PictureEncoder(VisionConfig(clip=clip.config, query=query))
    for picture in odd_pictures(24):
        wanted = processor(picture.convert("RGB"), return_tensors="pt")["pixel_values"]
        pixels = torch.from_numpy(preprocess(picture, rule=clip.config.pixels))[None]
        torch.testing.assert_close(encoder.normalise(pixels), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_read_as_one_tower(suffix: str, tmp_path: Path) -> None:
    model = saved(CASES["SigLIP base"], tmp_path)
    whole = open_clip(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="300KB")  # type: ignore[operator]
    found = list(tmp_path.glob("model-*.safetensors"))
    assert len(found) > 1
    for shard in found if suffix == "bin" else ():
        torch.save(load_file(shard), tmp_path / f"pytorch_{shard.stem}.bin")
        shard.unlink()

    shards = open_clip(tmp_path)

    assert shards.config == whole.config
    assert all(torch.equal(shards.tensors[name], tensor) for name, tensor in whole.tensors.items())


@pytest.mark.parametrize("kind", ["metaclip_2", "chinese_clip", "altclip", "clipseg"])
def test_the_config_of_a_relative_of_clip_is_read(kind: str, tmp_path: Path) -> None:
    saved(CASES["CLIP H/14"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"num_attention_heads": 4}
    whole = {"model_type": kind, "vision_config": values}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = open_clip(tmp_path).config
    assert (config.num_heads, config.activation) == (4, "exact_gelu")


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_a_damaged_config_is_not_taken_for_a_missing_one(name: str, tmp_path: Path) -> None:
    saved(CASES["CLIP L/14"], tmp_path)
    (tmp_path / name).write_text((tmp_path / name).read_text()[:-2])
    with pytest.raises(CheckpointError, match=f"{name}` is no JSON"):
        open_clip(tmp_path)


@pytest.mark.parametrize("is_open_clip", [False, True])
def test_the_config_of_open_clip_counts_for_its_own_weights(is_open_clip: bool, tmp_path: Path) -> None:
    saved(CASES["CLIP L/14"], tmp_path)
    vision = {"image_size": 42, "width": 128, "head_width": 32}
    config = {"model_cfg": {"vision_cfg": vision}, "preprocess_cfg": {"resize_mode": "squash"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    if is_open_clip:
        tensors = renamed(open_clip(tmp_path).tensors, CLIP_NAMES) | {"visual.proj": torch.zeros(128, 64)}
        (tmp_path / "model.safetensors").unlink()
        save_file(tensors, tmp_path / "open_clip_model.safetensors")
    found = open_clip(tmp_path).config
    wanted = (4, "exact_gelu", True) if is_open_clip else (2, "quick_gelu", False)
    assert (found.num_heads, found.activation, found.is_squashed) == wanted


@pytest.mark.parametrize("content", ["", "[1]", "[" * 200_000], ids=["empty", "list", "deep"])
def test_a_file_of_openai_is_read_beside_any_config(content: str, tmp_path: Path) -> None:
    file = Path(shutil.copy(OPENAI, tmp_path / "ViT-L-14.pt"))
    (tmp_path / "config.json").write_text(content)
    assert open_clip(file).config == open_clip(OPENAI).config
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_clip(tmp_path)


def test_of_two_files_about_pixels_the_processor_of_all_counts(tmp_path: Path) -> None:
    saved(CASES["CLIP L/14"], tmp_path)
    file = tmp_path / "preprocessor_config.json"
    values = json.loads(file.read_text())
    for mean, processor in ((0.25, {"image_processor": values | {"image_mean": 0.25}}), (0.75, {"patch_size": 8})):
        file.write_text(json.dumps(values | {"image_mean": 0.75}))
        (tmp_path / "processor_config.json").write_text(json.dumps(processor))
        assert open_clip(tmp_path).config.pixels.mean == (mean,) * 3


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"embeddings.cls_token": (1, 1, 8), "encoder.layer.0.mlp.weights_in.weight": (8, 8)}, "has gated MLPs"),
        ({"embeddings.patch_embedding.bias": (8,)}, "lacks"),
        ({"text_model.x": (1,)}, "is no CLIP"),
    ],
)
def test_towers_that_are_not_computed_are_refused(tensors: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_clip({name: torch.zeros(shape) for name, shape in tensors.items()}, name="a")


@pytest.mark.parametrize("tower", ["convnext_base", "eva02_large_patch14_clip_336", "naflexvit_base_patch16_siglip"])
def test_towers_of_timm_other_than_siglip_are_refused_by_name(tower: str, tmp_path: Path) -> None:
    save_file({"visual.trunk.x": torch.zeros(1)}, tmp_path / "open_clip_model.safetensors")
    config = {
        "model_cfg": {"vision_cfg": {"image_size": 224, "timm_model_name": tower}},
        "preprocess_cfg": {"resize_mode": "longest"},  # is not done either, which matters less
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"The tower '{tower}' of timm, by .* is not computed here"):
        open_clip(tmp_path)


def test_settings_of_an_image_processor_have_several_forms() -> None:
    sides = {"height": 224, "width": 224}
    for values in ({"size": sides}, {"size": sides, "crop_size": 224}, {"size": sides, "crop_size": sides}):
        rule = huggingface_pixels({**values, "rescale_factor": 0.00392156862745098}, name="a")
        assert (rule["image_size"], rule["margin"], rule["is_squashed"]) == (224, 0, True)

    values = {"image_mean": 0.5, "image_std": [0.5, 0.4, 0.3], "resample": None, "size": {}}
    assert huggingface_pixels(values, name="a") == {"rgb_first": True, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.4, 0.3)}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": {"shortest_edge": 224}, "do_center_crop": False}, "Pictures by a are not square"),
        ({"size": {"height": 224, "width": 112}}, "Pictures by a are not square"),
        ({"size": 224, "crop_size": 256}, "Pictures by a are .* smaller than their crop"),
        ({"size": {"height": 256, "width": 256}, "crop_size": 224}, "Pictures by a are .* squashed before it"),
        ({"size": {"longest_edge": 224}}, "The size {'longest_edge': 224} of pictures in a is not read"),
        ({"size": {"shortest_edge": 224, "longest_edge": 448}}, "The size .* of pictures in a is not read"),
        ({"size": 224, "crop_size": {"shortest_edge": 224, "longest_edge": 448}}, "The crop_size .* is not read"),
        ({"size": [224, 224]}, r"The size \[224, 224\] of pictures in a is not read"),
        ({"resample": 0}, "The filter 0 in a is not computed"),
        ({"do_normalize": False}, "without resizing or normalisation"),
        ({"do_rescale": None}, "without resizing or normalisation"),  # as in transformers
        ({"rescale_factor": 1 / 127.5}, "from another range than 0 to 255"),
        ({"rescale_factor": "1/255"}, "from another range than 0 to 255"),
    ],
)
def test_preprocessing_that_is_not_done_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        huggingface_pixels(values, name="a")
