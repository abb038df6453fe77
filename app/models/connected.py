"""Reads tower and connector of a model that sees pictures as tokens, from its folder in Hugging Face's format."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from llama_adapter.llm.picture_format import FRAME, PictureFormat
from llama_adapter.llm.tokenizer import Tokenizer
from llama_adapter.llm.weights.huggingface import weight_files
from llama_adapter.runtime.errors import CheckpointError
from llama_adapter.runtime.tensor_files.arrays import read_json
from llama_adapter.runtime.tensor_files.files import check_dense, check_names, check_shapes, read_tensor_file
from llama_adapter.runtime.text import shown_excerpt
from llama_adapter.vision.config import ConnectorConfig, VisionConfig
from llama_adapter.vision.encoder import Connector
from llama_adapter.vision.towers import ClipSource, huggingface_config, huggingface_pixels, pixel_values, read_clip

_MEANING: Final = "the folder is incomplete, or its files come from different models; download it again"
_TOWERS: Final = ("vision_tower.", "vision_model.")
_LINEARS: Final = {  # names of a connector's layers, by ours
    "multi_modal_projector.linear_1": "up",
    "multi_modal_projector.linear_2": "down",
    "connector.modality_projection.proj": "down",
}


class Connected(NamedTuple):
    """A tower with its connector, and how their tokens stand in a prompt."""

    config: VisionConfig
    tensors: Mapping[str, Tensor]  # of `PictureEncoder`
    format: PictureFormat
    files: tuple[str, ...]  # beside the weights


def open_connected(folder: Path, tokenizer: Tokenizer, *, dim: int) -> Connected:
    """Open tower and connector of LLaVA, Idefics3 or SmolVLM; `dim` is the width of the language model.

    Raises CheckpointError for missing, unknown or misshapen tensors, and for models that are computed in other ways.
    """
    config = read_json(folder / "config.json")
    is_llava = config["model_type"] == "llava"
    vision, name = config.get("vision_config"), str(folder)
    beside, values = pixel_values(folder)
    layer, strategy = config.get("vision_feature_layer", -2), config.get("vision_feature_select_strategy", "default")
    layer = layer[0] if isinstance(layer, list) and len(layer) == 1 else layer
    drops_class = is_llava and strategy == "default"
    if is_llava and (type(layer) is not int or strategy not in ("default", "full")):
        raise _refusal(folder, "joins the features of several layers", (layer, strategy))
    if is_llava and values.get("do_pad"):
        raise _refusal(folder, "pads pictures to squares", {"do_pad": True})
    if (activation := config.get("projector_hidden_act", "gelu")) != "gelu":
        raise _refusal(folder, "has another activation in its connector", activation)
    text = config.get("text_config")
    if (factor := text.get("embedding_multiplier") if isinstance(text, dict) else None) not in (None, 1):  # Granite's
        raise _refusal(folder, "multiplies the tokens of pictures by a factor", factor)
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        found |= {key.removeprefix("model."): tensor for key, tensor in read_tensor_file(file).tensors.items()}
    clip = read_clip(
        found,
        name=name,
        config=huggingface_config(vision if isinstance(vision, dict) else {}, name=name),
        pixels=huggingface_pixels(values, name=name) if is_llava else _cutting(values, name=name),
        prefix=next((prefix for prefix in _TOWERS if any(key.startswith(prefix) for key in found)), _TOWERS[0]),
        layer=layer if is_llava else None,
        drops_class=drops_class,
    )
    if drops_class and (number := clip.config.num_class_tokens) != 1:  # registers would be kept
        what = f"drops the class token, and its tower has {number} tokens before the patches"
        raise _refusal(folder, what, strategy)
    connector, tensors = _connector(found, clip, shuffle=1 if is_llava else config.get("scale_factor", 2), name=name)
    if connector.output_dim != dim:
        raise CheckpointError(
            f"The connector in `{folder}` makes tokens of width {connector.output_dim}, and the decoder's is {dim}",
            hint=_MEANING,
        )
    token_id = config.get("image_token_id", config.get("image_token_index", 32000 if is_llava else 128257))
    token = next((mark for mark, one in tokenizer.marks.items() if one.id == token_id), None)
    if token is None:
        raise CheckpointError(
            f"The tokenizer of `{folder}` has no special token {shown_excerpt(str(token_id))} for pictures",
            hint="copy all files of the model's tokenizer into its folder",
        )
    side = clip.config.image_size
    cut = math.ceil(clip.config.longest / side) if clip.config.longest and not clip.config.is_squashed else 0
    return Connected(
        VisionConfig(clip=clip.config, query=connector),
        {**clip.tensors, **tensors},
        PictureFormat(
            token=token,
            token_id=int(token_id),
            tokens_each=connector.num_queries,
            frame="" if is_llava else tokenizer.settings.names.get("fake_image_token", FRAME),
            most_squares=cut**2 + 1,
        ),
        () if beside is None else (str(beside),),
    )


def _connector(
    found: Mapping[str, Tensor], clip: ClipSource, *, shuffle: Any, name: str
) -> tuple[ConnectorConfig, dict[str, Tensor]]:
    part = {key: tensor for key, tensor in found.items() if key.startswith(("multi_modal_projector.", "connector."))}
    names = {ours: theirs for theirs, ours in _LINEARS.items() if f"{theirs}.weight" in part}
    count, what = clip.config.num_features, f"The connector in `{name}`"
    side = math.isqrt(count)
    fits = type(shuffle) is int and shuffle > 0 and (shuffle == 1 or (side % shuffle == 0 and side**2 == count))
    if not fits:
        raise CheckpointError(f"{what} joins {shuffle!r} of {side} patches in a row", hint=_MEANING)
    up, down = (part.get(f"{names.get(ours)}.weight") for ours in ("up", "down"))
    if down is None or any(one is not None and one.ndim != 2 for one in (up, down)):
        raise CheckpointError(f"{what} has no linear layer with one of the names {', '.join(_LINEARS)}", hint=_MEANING)
    config = ConnectorConfig(
        num_queries=count // shuffle**2,
        shuffle=shuffle,
        mlp_dim=0 if up is None else up.shape[0],
        has_bias=f"{names['down']}.bias" in part,
        output_dim=down.shape[0],
    )
    with torch.device("meta"):
        module = Connector(config, input_dim=clip.config.output_dim)
    state = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in names.items() for kind in ("weight", "bias")}
    wanted = {state[ours]: tuple(tensor.shape) for ours, tensor in module.state_dict().items()}
    check_names(part, list(wanted), what=what, meaning=_MEANING)
    check_dense(part, what=what)
    check_shapes({key: tuple(tensor.shape) for key, tensor in part.items()}, wanted, what=what, meaning=_MEANING)
    return config, {f"query.{ours}": part[theirs] for ours, theirs in state.items() if theirs in part}


def _cutting(values: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """The pixel rule of Idefics3 and SmolVLM, from their preprocessor_config.json, which must have sizes."""
    sizes = [
        size.get("longest_edge") for key in ("size", "max_image_size") if isinstance(size := values.get(key), dict)
    ]
    if len(sizes) < 2 or not all(type(size) is int and 0 < size <= 4096 for size in sizes):
        raise CheckpointError(
            f"`{name}` does not say into which squares pictures are cut: sizes are {shown_excerpt(repr(sizes))}",
            hint="copy the model's preprocessor_config.json into its folder; sides are up to 4096",
        )
    rule = huggingface_pixels({"resample": 1, **values, "size": None}, name=name)
    is_whole = values.get("do_image_splitting") is False
    return rule | {"image_size": sizes[1], "longest": sizes[0], "is_squashed": is_whole, "margin": 0}


def _refusal(folder: Path, what: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"The model in `{folder}` {what} ({shown_excerpt(repr(value))}), which is not computed here",
        hint="LLaVA-1.5, Idefics3 and SmolVLM, and models saved in their form, are read",
    )
