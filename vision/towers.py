"""Reads picture towers from the files of OpenAI, open_clip and Hugging Face, with the configs beside them."""

# N stored positions, T tokens, P patches, W width

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import check_names, check_shapes, count_blocks, what_is
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.config import VIT_L_14, Activation, ClipConfig, clip_config, stored_values
from llama_adapter.vision.encoder import ClipVisionTower
from llama_adapter.vision.tensor_names import LAYOUTS, MEANING, Layout, translate

# Heads by width, which no file of OpenAI or open_clip stores. In other towers they have a size of 64.
_HEADS: Final = {1152: 16, 1280: 16, 1408: 16, 1536: 16, 1664: 16}
_HEAD_DIM: Final = 64
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "quick_gelu": "quick_gelu",
    "gelu": "exact_gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_FILTERS: Final = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_STATISTICS: Final = (("image_mean", "mean"), ("image_std", "std"))
_FILES: Final = (
    *("model.safetensors", "pytorch_model.bin"),
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
    *("model-*-of-*.safetensors", "pytorch_model-*-of-*.bin"),  # shards
)
_PIXELS: Final = ("processor_config.json", "preprocessor_config.json")  # in the order of transformers 5
# The beginning of `model_type` where a vision tower is CLIP's, SigLIP's or DINOv2's.
_OUR_TYPES: Final = re.compile("clip|metaclip_2|chinese_clip|altclip|siglip|dinov2")  # clip: also clipseg
_OF_ONE_SIZE: Final = "towers for pictures of any size and shape, such as NaFlex, are not read"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSource:
    """An opened tower: its config, and its tensors with the names of `PictureEncoder` (`clip.*`)."""

    name: str  # for messages: the path
    config: ClipConfig
    tensors: Mapping[str, Tensor]


def clip_files(path: str | os.PathLike[str]) -> list[Path]:
    """The weight files of a tower at `path`, which is a file or a folder in the form of Hugging Face or open_clip.

    Several files are the shards of one. Raises CheckpointError if there is none.
    """
    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"There is no CLIP at `{place}`", hint="pass OpenAI's ViT-L-14.pt as --clip")
    if not place.is_dir():
        return [place]
    files = next(filter(None, (sorted(place.glob(name)) for name in _FILES)), [])
    if not files:
        raise CheckpointError(
            f"The folder `{place}` holds no CLIP",
            hint="wanted: model.safetensors or pytorch_model.bin, open_clip's files, a bundle, or a file",
        )
    return files


def configs_beside(file: Path, *, has_visual: bool, are_needed: bool = True) -> dict[str, Any]:
    """`config` and `pixels` of `read_clip` from the JSON files beside a tower's weights; empty if there are none.

    The config of open_clip counts for weights with its names (`has_visual`: `visual.*`), and there before others.
    Raises CheckpointError for a config of something that is not computed here, and for a damaged file. Unless they
    `are_needed`, damaged files with names that many models use are left alone.
    """
    folder, name = file.parent, f"the configs in `{file.parent}`"
    whole = _json(folder / "open_clip_config.json") if has_visual else {}
    model = whole.get("model_cfg")
    if isinstance(model, dict):
        known = _open_clip_config(model, name=name)  # first: a tower that is not computed may have any pixels
        return {"config": known, "pixels": _open_clip_pixels(whole.get("preprocess_cfg"), name=name)}
    config = _json(folder / "config.json", is_needed=are_needed)
    if not _OUR_TYPES.match(str(config.get("model_type", ""))):
        return {}  # of something else, such as a LLaMA beside a CLIP
    inner = config.get("vision_config", config)
    rule = huggingface_pixels(pixel_values(folder, are_needed=are_needed)[1], name=name)
    if "clip" in str(config["model_type"]) and "siglip" not in str(config["model_type"]):
        rule.pop("rgb_first", None)  # these were trained with torchvision's transforms, also where transformers rounds
    return {"config": huggingface_config(inner if isinstance(inner, dict) else {}, name=name), "pixels": rule}


def pixel_values(folder: Path, *, are_needed: bool = True) -> tuple[Path | None, dict[str, Any]]:
    """The file that says how pictures become pixels, and what it says; None, {} without one. Raises CheckpointError."""
    for name in _PIXELS:
        whole = _json(folder / name, is_needed=are_needed)
        values = whole.get("image_processor") if name == _PIXELS[0] else whole
        if isinstance(values, dict) and values:
            return folder / name, values
    return None, {}


def read_clip(
    tensors: Mapping[str, Tensor],
    *,
    name: str,
    config: Mapping[str, Any] | None = None,
    pixels: Mapping[str, Any] | None = None,
    prefix: str = "",
    layer: int | None = None,
    drops_class: bool = False,
) -> ClipSource:
    """A tower from tensors with the names of any of the files that are read, or with our own.

    Parameters:
        tensors: those of the text tower, and of heads that pool the features, are ignored.
        name: the name in messages.
        config: what tensors do not tell, as fields of `ClipConfig`; the result of `huggingface_config`. For tensors
            with our own names, the result of `stored_values`.
        pixels: fields of `PixelRule` in which it differs from the tower's family; the result of `huggingface_pixels`.
        prefix: of the tower's tensors in a larger model, such as `vision_tower.`; others are ignored.
        layer: whose output the features are, counted as Hugging Face does: 1 is the first, -1 the last. They have no
            norm and no projection. None means the end of the tower.
        drops_class: leaves out class token and registers.

    Raises CheckpointError for a ResNet, for other models, and for missing, unknown or misshapen tensors.
    """
    found = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if "position_embedding" in found:
        return _source(found, _checked(config or {}, name=name), name=name)
    is_huggingface = any(key.startswith("vision_model.") for key in found)
    found = {key.removeprefix("vision_model."): tensor for key, tensor in found.items()}
    layout, unused = _layout(found, is_huggingface=is_huggingface, name=name)
    used = {key: tensor for key, tensor in found.items() if not unused.fullmatch(key)}
    num_layers, what = count_blocks(used, layout.blocks, what=f"`{name}`"), f"CLIP in `{name}`"
    state = translate(used, layout.names(num_layers, used), what=what, scales=layout.scale_names(num_layers))
    if "visual.proj" in used and state["projection.weight"].ndim == 2:
        state["projection.weight"] = state["projection.weight"].t()
    num_kept = num_layers if layer is None else layer % (num_layers + 1)
    if layer is not None and (not num_kept or abs(layer) > num_layers):
        raise CheckpointError(f"{what} has {num_layers} layers, so there is no layer {layer}", hint=MEANING)
    classes, has_end = state.get("class_embedding"), layer is None
    if classes is not None:
        state["class_embedding"] = classes = classes.squeeze(0)  # one class token is a vector
    patch, positions, mlp_bias = (
        state.get(key) for key in ("patch_embedding.weight", "position_embedding", "blocks.0.mlp.up.bias")
    )
    projection = state.get("projection.weight") if has_end else None
    if patch is None or patch.ndim != 4 or any(one is not None and one.ndim != 2 for one in (positions, projection)):
        raise CheckpointError(f"{what} has tensors of unexpected shape", hint=f"{_OF_ONE_SIZE}; {MEANING}")
    assert positions is not None, "a ViT has positions"
    width, patch_size = patch.shape[0], patch.shape[-1]
    grid = round(max(len(positions) - (classes is not None), 0) ** 0.5)
    stated = {key: value for key, value in (config or {}).items() if key != "image_size" or key not in layout.switches}
    if "num_heads" not in stated and width not in _HEADS and width % _HEAD_DIM:
        raise CheckpointError(f"{what} is {width} wide, and its number of heads is unknown", hint=MEANING)
    is_wide = width in _HEADS and not stated  # OpenAI has no tower of these widths
    values: dict[str, Any] = {
        "image_size": grid * patch_size,
        "num_heads": _HEADS.get(width, width // _HEAD_DIM),
        "activation": "exact_gelu" if is_wide else "quick_gelu",
        **layout.switches,
        **stated,
        **(pixels or {}),
        "patch_size": patch_size,
        "width": width,
        "num_layers": num_kept,
        "output_dim": width if projection is None else projection.shape[0],
        "mlp_dim": 0 if mlp_bias is None or mlp_bias.numel() == 4 * width else mlp_bias.numel(),
        "num_class_tokens": 0 if classes is None else 1 if classes.ndim < 2 else len(classes),
        "has_patch_bias": "patch_embedding.bias" in state,
        "has_pre_norm": "pre_norm.weight" in state,
        "has_post_norm": has_end,
        "has_projection": projection is not None,
        "drops_class": drops_class,
    }
    made = _checked(values, name=name)
    is_fixed = "image_size" not in layout.switches and grid != made.patches_per_side
    if grid < 1 or len(positions) != grid**2 + (classes is not None) or is_fixed or made.patches_per_side > 4 * grid:
        raise CheckpointError(
            f"{what} has {len(positions)} positions, and its pictures have {made.patches_per_side} patches a side",
            hint=MEANING,
        )
    state["position_embedding"] = _fitted(positions, made, grid=grid)
    return _source(state, made, name=name)


def clip_tensors(state: Mapping[str, Tensor], config: ClipConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Inverse of `read_clip`: the state dict of `ClipVisionTower` as in adapter files, and `config` for reading it.

    Towers of OpenAI's kind have OpenAI's names and need no config. Others have our own names.
    """
    plain = dataclasses.replace(VIT_L_14, **{name: getattr(config, name) for name in stored_values(VIT_L_14)})
    if config != plain or config.num_heads * _HEAD_DIM != config.width or config.width in _HEADS:
        return dict(state), stored_values(config)
    found = {theirs: state[ours] for ours, (theirs,) in LAYOUTS["openai"].names(config.num_layers).items()}
    return found | {"visual.proj": found["visual.proj"].t().contiguous()}, {}


def huggingface_config(values: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """`config` of `read_clip` from the config of a tower of Hugging Face's; in larger models, their `vision_config`.

    Raises CheckpointError for an activation that is not computed here.
    """
    is_idefics = re.match("idefics3|smolvlm", str(values.get("model_type")))
    known: dict[str, Any] = {"num_heads": 16 if is_idefics else 12}  # defaults of Hugging Face's classes
    names = {"num_attention_heads": "num_heads", "layer_norm_eps": "norm_eps", "image_size": "image_size"}
    known |= {ours: values[theirs] for theirs, ours in names.items() if values.get(theirs) is not None}
    if "hidden_act" in values:
        known["activation"] = _known(_ACTIVATIONS, values["hidden_act"], what="activation", name=name)
    return known


def huggingface_pixels(values: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """`pixels` of `read_clip` from Hugging Face's preprocessor_config.json. Raises CheckpointError if it differs."""
    rule: dict[str, Any] = {"rgb_first": True}
    size, crop = (_sides(values.get(key)) for key in ("size", "crop_size"))
    for key, sides in (("size", size), ("crop_size", crop)):
        if sides is None and values.get(key) not in (None, {}):
            raise CheckpointError(
                f"The {key} {shown_excerpt(repr(values[key]))} of pictures in {name} is not read here",
                hint="known: a whole number, `shortest_edge` alone, or `height` and `width`",
            )
    if size is not None:
        given, is_whole = values["size"], crop is None or not values.get("do_center_crop", True)
        side = size if is_whole or crop is None else crop
        has_sides = "height" in given if isinstance(given, dict) else is_whole
        margin = min(size) - side[0]
        if side[0] != side[1] or margin < 0 or (is_whole and not has_sides) or (has_sides and size != side):
            raise CheckpointError(
                f"Pictures by {name} are not square, smaller than their crop, or squashed before it, which is not done "
                "here"
            )
        rule |= {"image_size": side[0], "margin": margin, "is_squashed": has_sides}
    if values.get("resample") is not None:
        rule["resample"] = _known(_FILTERS, values["resample"], what="filter", name=name)
    for key, ours in _STATISTICS:
        if (value := values.get(key)) is not None:
            rule[ours] = tuple(value) if isinstance(value, list | tuple) else (value,) * 3
    factor = values.get("rescale_factor")
    is_rescaled = factor is None or (isinstance(factor, float) and math.isclose(factor * 255, 1, rel_tol=1e-3))
    if not is_rescaled or not all(values.get(key, True) for key in ("do_resize", "do_rescale", "do_normalize")):
        raise CheckpointError(
            f"Preprocessing without resizing or normalisation, or from another range than 0 to 255, in {name} is not "
            "done here"
        )
    return rule


def _open_clip_config(model: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """`config` of `read_clip` from `model_cfg` of open_clip. Raises CheckpointError for towers that are not read."""
    vision = model.get("vision_cfg")
    vision = vision if isinstance(vision, dict) else {}
    known: dict[str, Any] = {"image_size": vision["image_size"]} if "image_size" in vision else {}
    if (tower := vision.get("timm_model_name")) is not None:
        if not re.match(r"(.*/)?vit_\w+_siglip", str(tower)):
            raise CheckpointError(
                f"The tower {shown_excerpt(repr(tower))} of timm, by {name}, is not computed here",
                hint=f"of the towers of timm, those of SigLIP are; {_OF_ONE_SIZE}",
            )
        return known
    known["activation"] = "quick_gelu" if model.get("quick_gelu") else "exact_gelu"
    width, head_width = vision.get("width"), vision.get("head_width", _HEAD_DIM)
    if type(width) is int and type(head_width) is int and head_width > 0:
        known["num_heads"] = width // head_width
    norm = vision.get("norm_kwargs")
    return known | ({"norm_eps": norm["eps"]} if isinstance(norm, dict) and "eps" in norm else {})


def _open_clip_pixels(values: Any, *, name: str) -> dict[str, Any]:
    """`pixels` of `read_clip` from `preprocess_cfg` of open_clip."""
    values = values if isinstance(values, dict) else {}
    rule = {key: tuple(values[key]) for key in ("mean", "std") if isinstance(values.get(key), list)}
    if "interpolation" in values:
        filters = {filter_: filter_ for filter_ in _FILTERS.values()}
        rule["resample"] = _known(filters, values["interpolation"], what="filter", name=name)
    if "resize_mode" in values:
        modes = {"shortest": False, "squash": True}
        rule["is_squashed"] = _known(modes, values["resize_mode"], what="way to resize", name=name)
    return rule


def _known(table: Mapping[Any, Any], value: Any, *, what: str, name: str) -> Any:
    if not isinstance(value, str | int) or value not in table:
        raise CheckpointError(
            f"The {what} {shown_excerpt(repr(value))} in {name} is not computed here", hint=f"known: {[*table]}"
        )
    return table[value]


def _sides(value: Any) -> tuple[int, int] | None:
    """Height and width of a size in Hugging Face's forms; None for anything else."""
    values = value if isinstance(value, dict) else {"shortest_edge": value}
    short = None if values.get("longest_edge") else values.get("shortest_edge")
    sides = values.get("height", short), values.get("width", short)
    return sides if all(type(side) is int and side > 0 for side in sides) else None  # type: ignore[return-value]


def _json(path: Path, *, is_needed: bool = True) -> dict[str, Any]:
    try:
        return read_json(path) if path.is_file() else {}
    except CheckpointError:
        if is_needed:
            raise
        return {}


def _layout(found: Mapping[str, Tensor], *, is_huggingface: bool, name: str) -> tuple[Layout, re.Pattern[str]]:
    """The names in a file, and those of tensors that are not used. Raises CheckpointError for another model."""
    if "visual.layer1.0.conv1.weight" in found:
        raise CheckpointError(f"`{name}` is a ResNet CLIP, where a ViT is wanted", hint=MEANING)
    if any(".mlp.weights_in." in key for key in found):
        raise CheckpointError(
            f"`{name}` has gated MLPs, as DINOv2's giant size, which are not computed here",
            hint="take the small, base or large size",
        )
    is_openai = any(key.startswith("visual.") for key in found)
    likely = "clip" if is_huggingface else "openai" if is_openai else ""
    kind = next((kind for kind, layout in LAYOUTS.items() if layout.mark in found), likely)
    if kind:
        return LAYOUTS[kind], re.compile(LAYOUTS[kind].unused)
    what = what_is([*found])
    raise CheckpointError(
        f"`{name}` is no CLIP" + (f": it is {what}" if what else ""),
        hint="it should hold `visual.*` (OpenAI, open_clip), or CLIP, SigLIP or DINOv2 in Hugging Face's form; were "
        "two files swapped?",
    )


def _checked(values: Mapping[str, Any], *, name: str) -> ClipConfig:
    try:
        return clip_config(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The sizes of CLIP in `{name}` are impossible: {error}", hint=MEANING) from None


def _fitted(positions_NW: Tensor, config: ClipConfig, *, grid: int) -> Tensor:
    """Stored positions of class token and `grid` x `grid` patches -> those of all tokens of the tower, (T, W).

    Patches are resampled, smoothly in a tower with registers, as in the sources of DINOv2. Registers get zeros.
    """
    num_registers = max(config.num_class_tokens - 1, 0)
    class_NW, patches_PW = positions_NW[: -grid * grid], positions_NW[-grid * grid :]
    side = config.patches_per_side
    if side != grid:
        grid_1WPP = patches_PW.float().view(1, grid, grid, -1).permute(0, 3, 1, 2)
        grid_1WPP = F.interpolate(grid_1WPP, (side, side), mode="bicubic", antialias=num_registers > 0)
        patches_PW = grid_1WPP.flatten(2)[0].T.to(positions_NW.dtype)
    elif not num_registers:
        return positions_NW
    return torch.cat([class_NW, class_NW.new_zeros(num_registers, class_NW.shape[1]), patches_PW])


def _source(state: Mapping[str, Tensor], config: ClipConfig, *, name: str) -> ClipSource:
    """The tensors that the tower has. Raises CheckpointError unless their shapes are those of its config."""
    with torch.device("meta"):
        wanted = {ours: tuple(tensor.shape) for ours, tensor in ClipVisionTower(config).state_dict().items()}
    check_names(state.keys() & wanted.keys(), list(wanted), what=f"CLIP in `{name}`", meaning=MEANING)
    found = {ours: tuple(state[ours].shape) for ours in wanted}
    check_shapes(found, wanted, what=f"CLIP in `{name}`", meaning=MEANING)
    return ClipSource(name=name, config=config, tensors={f"clip.{ours}": state[ours] for ours in wanted})
